"""The demo: CRAFT on a fleet of SuperNodes, one of which is killed in the middle of a round and comes back."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.processes import ProcessTree, free_port, wait_for
from experiments.submit import Flower, FlowerError, program, quiet, submit, wait_until_serving

from .keys import make_keys

NODES = 3
CONNECTION = "fleet"
# What the run is, but for --overrides, which win. A client that has not answered after round_timeout is done without;
# two of three suffice; the next round waits for a node that died.
OVERRIDES = (
    f"num_clients={NODES}", f"clients_per_round={NODES}", "strategy=craft_mean_norm", "client.lr=0.1",
    "client.local_epochs=5", "round_timeout=300", "++strategy.min_completed=2", "++strategy.wait_timeout=120",
)  # fmt: skip
_DATA = ("dataset=digits", "dataset.partition.alpha=1")  # unless --overrides name another data set
_ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0
_TRAINING = re.compile(r"Receiving: train message")
_ONLINE = re.compile(r"SuperNode ID:")


@dataclass
class Fleet:
    """A SuperLink with TLS and SuperNode authentication, and its SuperNodes, on loopback.

    Parameters
    ----------
    tree : ProcessTree
        Everything is started in it.
    folder : Path
        Gets keys, logs, Flower's state and the run's results; it is also the apps' working directory.
    """

    tree: ProcessTree
    folder: Path
    nodes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = self.folder / "keys"
        self.port = free_port()
        self.flower = Flower(self.tree, CONNECTION, self.folder / "flwr")

    def start(self) -> None:
        """Make keys, start everything, and wait until all nodes are online.

        Raises
        ------
        FlowerError, TimeoutError
            If something does not start; with the last lines of its log.
        """
        make_keys(self.keys, hosts=(), nodes=NODES)
        home = self.folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self.port}"\n'
            f"root-certificates = {json.dumps(str(self.keys / 'ca.pem'))}\n"
        )
        log = self.folder / "superlink.log"
        process = self._start(
            log, "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(self.keys / "ca.pem"), "--ssl-certfile", str(self.keys / "superlink.pem"),
            "--ssl-keyfile", str(self.keys / "superlink.key"), "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "state.db"),
        )  # fmt: skip
        wait_until_serving(process, log, self.port, self.keys / "ca.pem")
        for number in range(NODES):
            self.flower.call("supernode", "register", str(self.keys / f"node-{number}.pub"), CONNECTION)
            self.start_node(number)
        wait_for(self._all_online, _START_SECONDS, "the SuperNodes were not online", interval=1.0)

    def start_node(self, number: int) -> None:
        """Start a SuperNode."""
        self.nodes[number] = self._start(
            self.log(number), "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", str(self.keys / "ca.pem"),
            "--auth-supernode-private-key", str(self.keys / f"node-{number}"),
            "--node-config", f"partition-id={number} num-partitions={NODES}", "--port", str(free_port()),
        )  # fmt: skip

    def log(self, number: int) -> Path:
        """Return where a SuperNode writes."""
        return self.folder / f"node-{number}.log"

    def _start(self, log: Path, name: str, *words: str) -> subprocess.Popen[str]:
        environment = quiet(self.folder / "flwr")
        return self.tree.start([program(name), *words], log=log, cwd=self.folder, environment=environment)

    def _all_online(self) -> bool:
        found = self.flower.call("supernode", "list", CONNECTION)["nodes"]
        return [str(node["status"]) for node in found].count("online") == NODES


class Accident:
    """Kills a SuperNode as soon as it trains in a round after the first, and starts it again once that round is over.

    Parameters
    ----------
    fleet : Fleet
    number : int
        The SuperNode.
    metrics : Path
        The run's metrics.jsonl.
    say : callable
        Told what happens.
    """

    def __init__(self, fleet: Fleet, number: int, metrics: Path, say: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.number = number
        self.metrics = metrics
        self.say = say
        self.round: int | None = None
        self.started = False
        self.back = False
        self._killed = 0.0

    def __call__(self) -> None:
        """Look whether it is time for the next step; called again and again."""
        done = len(rounds(self.metrics)) - 1  # the first record is the initial model's
        log = self.fleet.log(self.number).read_text(errors="replace")
        if self.round is None:
            if done >= 1 and len(_TRAINING.findall(log)) > done:
                self.fleet.tree.kill(self.fleet.nodes[self.number])
                self.round, self._killed = done + 1, time.monotonic()
                self.say(f"SuperNode {self.number} killed (kill -9) while it trains in round {self.round}")
        elif not self.started:
            if done >= self.round:
                self.say(f"round {self.round} ended without it, {self._seconds()} s after its death; starting it again")
                self.fleet.start_node(self.number)
                self.started = True
        elif not self.back and len(_ONLINE.findall(log)) > 1:
            self.back = True
            self.say(f"SuperNode {self.number} is back, {self._seconds()} s after its death")

    def _seconds(self) -> int:
        return round(time.monotonic() - self._killed)


def rounds(metrics: Path) -> list[dict[str, Any]]:
    """Return the rounds written so far; a line that is being written is not one yet."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def demonstrate(folder: Path, *, num_rounds: int = 4, overrides: Sequence[str] = (), timeout: float = 1200.0) -> int:
    """Run the demo and return the exit status of `experiments.submit`; 1 if the node did not die or come back.

    A configuration that cannot run is refused with status 2 before anything is started.

    Parameters
    ----------
    folder : Path
        Gets everything; it must be empty.
    num_rounds : int
        Rounds of the run.
    overrides : sequence of str
        As for `python -m experiments.run`. A relative `data_dir` counts from the current folder.
    timeout : float
        Seconds after which the run is stopped.
    """
    from client_apps.errors import ConfigError  # with PyTorch: seconds that `keys` does not need
    from experiments.config import check, compose

    console = Console(soft_wrap=True, highlight=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - began:6.1f} s] {text}", style="bold", markup=False)

    output = folder / "run"
    data = () if any(word.startswith("dataset=") for word in overrides) else _DATA
    words = [*OVERRIDES, *data, f"num_rounds={num_rounds}", *overrides, f"output_dir={output}"]
    try:
        cfg = compose(words)
        if cfg["data_dir"] is not None:  # the apps run in another folder
            words.append(f"data_dir={Path(cfg['data_dir']).resolve()}")
        check(compose(words))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    value = shlex.join(words).replace("\\", "\\\\").replace('"', '\\"')
    try:
        with ProcessTree() as tree:
            fleet = Fleet(tree, folder)
            say(f"starting a SuperLink and {NODES} SuperNodes with TLS and keys; everything goes to {folder}")
            fleet.start()
            say(f"SuperLink on 127.0.0.1:{fleet.port}, {NODES} SuperNodes online")
            accident = Accident(fleet, NODES - 1, output / "metrics.jsonl", say)
            status = submit(
                fleet.flower, str(_ROOT), [f'overrides="{value}"'], timeout=timeout,
                meanwhile=accident,
            )  # fmt: skip
            say("ending the fleet")
    except (FlowerError, TimeoutError) as error:
        sys.stderr.write(f"the fleet did not start: {error}\nIts logs are in {folder}.\n")
        return 2
    say("the fleet has ended")
    records = rounds(output / "metrics.jsonl")
    if not records:
        sys.stderr.write(f"There is no result; the logs are in {folder}.\n")
        return status or 1
    _show(console, records)
    console.print(f"results in\n{output}", markup=False)
    if status == 0 and not accident.back:
        happened = "did not come back" if accident.started else "was not killed and started again"
        sys.stderr.write(f"SuperNode {accident.number} {happened} while the run went on; take more --rounds.\n")
        return 1
    return status


def _show(console: Console, records: Sequence[dict[str, Any]]) -> None:
    table = Table("round", "seconds", "accepted", "failed", "accuracy", "worst10", "why clients failed")
    for record in records:
        reasons = Counter(_brief(reason) for reason in json.loads(record.get("failure_reasons") or "[]"))
        shares = [f"{record[key]:.1%}" if record.get(key) is not None else "" for key in ("accuracy", "worst10")]
        counts = [str(record.get(key, "")) for key in ("clients_accepted", "clients_failed")]
        why = "; ".join(f"{count}x {reason}" for reason, count in reasons.items())
        table.add_row(str(record["round"]), f"{record['round_seconds']:.1f}", *counts, *shares, why)
    console.print(table)


def _brief(reason: str) -> str:
    """Return the reason that Flower's sentence about it holds, or all of it."""
    found = re.search(r"\(reason: (?:Error: )?(.*?)\)\. It originated", reason)
    return found[1] if found else reason
