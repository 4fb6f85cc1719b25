"""Resuming runs: what a run leaves that was killed and went on is what an uninterrupted one leaves, bit for bit."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import Grid, ServerApp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from client_apps import make_client_app
from client_apps.errors import ConfigError
from experiments.checkpoint import RunCheckpoints, Start, find_start, load_states, save_states
from experiments.config import check, compose
from experiments.engine import SerialGrid, VirtualGrid, serve_on, wire
from experiments.engine.ray_grid import RayGrid
from experiments.resume import claimed
from experiments.run import run as run_one
from experiments.server_app import make_server_app
from strategies import CRAFT, Checkpointed, MessageStrategy, RoundsFailed

from ..faults.table import says
from .cli import ROOT, rounds, run

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLIENTS = 8
SMALL = (
    f"num_clients={CLIENTS}", "clients_per_round=4", "num_rounds=5", "client.lr=0.1", "model.hidden=[8]",
    "checkpoint.every=2", "simulation=serial", "tracking.progress=false", "tracking.tensorboard=false",
)  # fmt: skip


class Killed(BaseException):
    """Ends a run as nothing in it expects."""


class Mortal(SerialGrid):
    """A grid on which a run is ended when it has sent so many rounds' messages."""

    def __init__(self, *args: Any, exchanges: int) -> None:
        super().__init__(*args)
        self.left = exchanges

    def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().collect(messages, own=own)


def serve(cfg: Mapping[str, Any], grid: VirtualGrid | None = None) -> None:
    """Run a configuration as `experiments.run` does, in this process."""
    server_app = make_server_app(cfg, check(cfg))
    serve_on(grid or SerialGrid(make_client_app(cfg), cfg["num_clients"]), server_app)


def kill(cfg: Mapping[str, Any], exchanges: int) -> Path:
    """Run a configuration until it is killed, as if by SIGKILL: what ends a run in order is undone."""
    with pytest.raises(Killed):
        serve(cfg, Mortal(make_client_app(cfg), cfg["num_clients"], exchanges=exchanges))
    folder = Path(cfg["output_dir"])
    for name in ("status.json", "model.safetensors", "clients.parquet"):
        (folder / name).unlink(missing_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "los')
    return folder


def left(folder: Path) -> tuple[bytes, list[dict[str, Any]], Any, dict[str, Any], list[str]]:
    """What a run has left, but for the time it took."""
    records = [{k: v for k, v in r.items() if "seconds" not in k} for r in rounds(folder)]
    rows = folder / "clients.parquet"
    status = json.loads((folder / "status.json").read_text())
    return (
        (folder / "model.safetensors").read_bytes(),
        records,
        pq.read_table(rows).to_pydict() if rows.exists() else None,
        {key: value for key, value in status.items() if key != "seconds"},
        sorted(path.name for path in (folder / "checkpoints").iterdir()),
    )


def same(one: Any, other: Any) -> None:
    """Compare what two runs have left; NaN equals NaN."""
    assert one[0] == other[0]
    assert one[1] == other[1]
    np.testing.assert_equal(one[2], other[2])
    assert one[3:] == other[3:]


LINEAR = (
    "dataset=linear", "task=regression", "model=linear", "evaluation=federated", "strategy=clair",
    "clients_per_round=8", "dataset.p=8", "dataset.q=5", "dataset.rank=1", "~model.hidden",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "craft": ("strategy=craft",),
    "craft-federated": ("strategy=craft", "evaluation=federated"),
    "craft-ema-now-and-then": ("strategy=craft", "strategy.reference=ema", "evaluation.every=3"),
    "fedlf": ("strategy=fedlf",),
    "fedfv": ("strategy=fedfv", "evaluation=federated"),
    "fedadam": ("strategy=fedadam",),
    "fedref": ("strategy=fedref", "strategy.window=2"),
    "afl": ("strategy=afl",),
    "ditto-and-stale": (
        "strategy=fedavg", "client.ditto_lambda=0.5", "client.stale_update=0.5", "evaluation=federated",
    ),
    "failing": ("strategy=fedavg", "strategy.min_completed=4", "strategy.max_failed_rounds=99", "client.lr=1e30"),
    "clair": LINEAR,
}  # fmt: skip


def configured(folder: Path, *overrides: str) -> dict[str, Any]:
    small = [word for word in SMALL if "~model.hidden" not in overrides or not word.startswith("model.")]
    return compose([*small, *(o for o in overrides if o != "~model.hidden"), f"output_dir={folder}"])


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_a_killed_run_goes_on_and_leaves_what_an_uninterrupted_one_leaves(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cfg = configured(tmp_path / "whole", *overrides)
    serve(cfg)
    expected = left(tmp_path / "whole")
    assert len(expected[1]) >= 5
    # In the fourth round: three are complete, and two are saved.
    exchanges = 6 if cfg["evaluation"]["mode"] == "federated" else 3
    folder = kill({**cfg, "output_dir": str(tmp_path / "killed")}, exchanges)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    serve({**cfg, "output_dir": str(tmp_path / "elsewhere"), "resume": str(folder)})
    same(left(tmp_path / "elsewhere"), expected)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    serve({**cfg, "output_dir": str(folder), "resume": "auto"})
    same(left(folder), expected)
    aside = (folder / "metrics.jsonl.aside1").read_text().splitlines()
    assert json.loads(aside[0])["round"] == 3  # what was run again
    assert aside[1] == '{"round": 4, "los'


def test_on_ray_and_back(tmp_path: Path) -> None:
    words = ("strategy=craft", "client.ditto_lambda=0.5", "client.stale_update=0.5", "evaluation=federated")
    cfg = configured(tmp_path / "whole", *words, "num_rounds=6")
    serve(cfg)
    folder = kill({**cfg, "output_dir": str(tmp_path / "killed")}, 6)  # saved: 2

    class MortalRay(RayGrid):
        left = 6

        def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
            self.left -= 1
            if self.left < 0:
                raise Killed
            return super().collect(messages, own=own)

    again = {**cfg, "output_dir": str(folder), "resume": "auto"}
    store = {"num_cpus": 1, "object_store_memory": 128 * 2**20}
    with MortalRay(make_client_app(cfg), CLIENTS, init_args=store) as grid, pytest.raises(Killed):
        serve(again, grid)  # from 2; saved: 4
    assert [r["round"] for r in rounds(folder)] == [1, 2, 3, 4, 5]
    serve(again)
    same(left(folder), left(tmp_path / "whole"))


def test_a_run_that_failed_goes_on_once_more(tmp_path: Path) -> None:
    """As after a full disk: the run ended in order, and says so."""
    cfg = configured(tmp_path / "whole")
    serve(cfg)
    killed = {**cfg, "output_dir": str(tmp_path / "killed")}
    with pytest.raises(Killed):
        serve(killed, Mortal(make_client_app(cfg), CLIENTS, exchanges=3))
    assert json.loads((tmp_path / "killed" / "status.json").read_text())["status"] == "failed"
    serve({**killed, "resume": "auto"})
    same(left(tmp_path / "killed"), left(tmp_path / "whole"))
    assert json.loads((tmp_path / "killed" / "status.json.aside1").read_text())["status"] == "failed"
    assert (tmp_path / "killed" / "model.safetensors.aside1").exists()


def test_a_resume_that_is_interrupted_can_be_resumed(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "whole")
    serve(cfg)
    first = kill({**cfg, "output_dir": str(tmp_path / "first")}, 3)
    elsewhere = {**cfg, "output_dir": str(tmp_path / "second"), "resume": str(first)}
    second = kill(elsewhere, 0)  # before its first round
    with pytest.raises(FileExistsError, match=r"holds an earlier run: .*resume=auto"):
        serve(elsewhere)
    second = kill({**elsewhere, "resume": "auto"}, 1)
    serve({**elsewhere, "resume": str(second)})
    same(left(second), left(tmp_path / "whole"))


def test_seconds_and_tensorboard_go_on(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "killed", "tracking.tensorboard=true")
    folder = kill(cfg, 3)
    before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    serve({**cfg, "output_dir": str(tmp_path / "elsewhere"), "resume": str(folder / "checkpoints" / "round-000002")})
    serve({**cfg, "resume": "auto"})
    for path in (folder, tmp_path / "elsewhere"):
        records = rounds(path)
        assert [r["seconds"] for r in records[:3]] == [r["seconds"] for r in before[:3]]
        seconds = [r["seconds"] for r in records]
        assert seconds == sorted(seconds)
        assert seconds[3] - seconds[2] == pytest.approx(records[3]["round_seconds"])
        events = EventAccumulator(str(path)).Reload()
        for name in ("accuracy", "train_loss", "path_length"):
            told = [(event.step, event.value) for event in events.Scalars(name)]
            assert told == [(r["round"], pytest.approx(r[name], rel=1e-6)) for r in records if name in r]


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = configured(tmp_path / "whole", "num_rounds=6")
    serve(cfg)
    short = configured(tmp_path / "short", "num_rounds=3")
    serve(short)
    for resume in ("auto", str(tmp_path / "short")):
        run_one({**short, "resume": resume})
        assert re.search(r"Nothing to do: the run in \S+short has finished its 3 rounds", capsys.readouterr().out)
    serve({**cfg, "output_dir": str(tmp_path / "short"), "resume": "auto"})
    assert left(tmp_path / "short")[:4] == left(tmp_path / "whole")[:4]
    with pytest.raises(
        ConfigError, match=r"num_rounds=3 is below the round of the checkpoint .*round-000006; raise it"
    ):
        find_start({**short, "resume": "auto"}, check(short))


def test_what_was_killed_after_its_last_round_is_completed(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "a", "strategy=afl")  # the model to deploy is not the one that training goes on from
    serve(cfg)
    expected = left(tmp_path / "a")
    for name in ("status.json", "model.safetensors"):
        (tmp_path / "a" / name).unlink()
    serve({**cfg, "resume": "auto"})
    same(left(tmp_path / "a"), expected)


def test_the_best_is_kept_and_the_score_is_the_headline(tmp_path: Path) -> None:
    cfg = configured(tmp_path, "checkpoint.every=1", "checkpoint.keep=1")
    serve(cfg)
    scores = {r["round"]: r["accuracy"] for r in rounds(tmp_path) if r["round"]}
    best = max(scores, key=lambda number: (scores[number], number))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("round-*"))
    assert kept == sorted({f"round-{best:06d}", "round-000005"})
    for name in kept:
        score = json.loads((tmp_path / "checkpoints" / name / "score.json").read_text())
        assert score == {"metric": "accuracy", "value": scores[int(name[-6:])]}


def test_without_checkpoints_there_is_no_folder(tmp_path: Path) -> None:
    serve(configured(tmp_path, "num_rounds=1", "checkpoint.every=null"))
    assert not (tmp_path / "checkpoints").exists()


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its fourth round."""
    return kill(configured(tmp_path_factory.mktemp("killed") / "run"), 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=1"], r"was taken with seed=0, not 1; resume with seed=0"),
        (["strategy=fedavg"], r"was taken with strategy\._target_=strategies\.CRAFT, not strategies\.FedAvg"),
        (["strategy.server_lr=0.3"], r"strategy\.server_lr=0\.1, not 0\.3"),
        (["client.lr=0.2"], r"client\.lr=0\.1, not 0\.2"),
        (["model.hidden=[9]"], r"model\.hidden=\[8\], not \[9\]"),
        (["dataset.partition.alpha=0.5"], r"dataset\.partition\.alpha=0\.1, not 0\.5"),
        (["evaluation=federated"], r"evaluation\.mode=server, not federated"),
        (["target_accuracy=0.5"], r"target_accuracy=None, not 0\.5"),
        (["num_rounds=1"], "num_rounds=1 is below the round of the checkpoint"),
    ],
)
def test_another_configuration_is_refused_and_the_difference_named(
    overrides: list[str], words: str, killed: Path, tmp_path: Path
) -> None:
    cfg = configured(tmp_path / "out", *overrides, f"resume={killed}")
    with pytest.raises(ConfigError, match=words) as error:
        serve(cfg)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_where_and_how_a_run_goes_on_may_differ(killed: Path, tmp_path: Path) -> None:
    words = (
        "simulation=ray", "client.device=cpu", "strategy.device=cpu", "data_dir=elsewhere", "checkpoint.every=1",
        "tracking.examples=0", "round_timeout=60", "skip_finished=true", "num_rounds=9",
    )  # fmt: skip
    cfg = configured(tmp_path / "out", *words, f"resume={killed}")
    assert find_start(cfg, check(cfg)).round == 2


def test_another_model_is_refused_even_where_the_configuration_agrees(killed: Path, tmp_path: Path) -> None:
    cfg = configured(tmp_path / "out", f"resume={killed}")
    task = check(configured(tmp_path / "out", "model.hidden=[9]"))
    with pytest.raises(ConfigError, match=r"holds '.*' in shape \(8, 64\), this model has \(9, 64\)"):
        find_start(cfg, task)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "there is no checkpoint .no such folder.; name the folder of a run"),
        (lambda folder: folder.mkdir(), "no checkpoints/round-NNNNNN in it, and it is no checkpoint itself"),
        (lambda folder: (folder / "checkpoints").mkdir(parents=True), "there is no checkpoint"),
        (lambda folder: (folder / "checkpoints/round-000003").mkdir(parents=True), "none of the 1 checkpoints in"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    cfg = configured(tmp_path / "out", f"resume={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=rf"resume=\S+/run: .*{words}"):
        find_start(cfg, check(cfg))


@pytest.mark.parametrize("checkpoint", ["null", "{every: 0, keep: 1}", "{every: 2}", "{every: 2, keep: 0}", "{a: 1}"])
def test_impossible_settings_are_refused(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        check({**configured(tmp_path), "checkpoint": {"null": None}.get(checkpoint, yaml_of(checkpoint))})
    with pytest.raises(ConfigError, match="resume="):
        check({**configured(tmp_path), "resume": 5})


def yaml_of(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def test_clients_states_that_cannot_be_reached_are_told(
    tmp_path: Path, killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Foreign(Grid):
        """Not one of ours: a real fleet, or Flower's simulation."""

        def __init__(self) -> None:
            pass

        set_run = run = create_message = get_node_ids = push_messages = pull_messages = send_and_receive = None

    Foreign.__abstractmethods__ = frozenset()
    words = ("client.ditto_lambda=0.5", "evaluation=federated")
    folder = kill(configured(tmp_path / "ditto", *words), 6)
    cfg = configured(tmp_path / "out", *words, f"resume={folder}")
    task = check(cfg)
    with pytest.raises(ConfigError, match=r"clients keep personal models .* cannot be restored on this engine"):
        RunCheckpoints(cfg, find_start(cfg, task), task, Foreign())
    with caplog.at_level(logging.WARNING):
        RunCheckpoints(cfg, Start(), task, Foreign())
    assert "this run cannot be resumed" in caplog.text
    (folder / "checkpoints" / "round-000002" / "clients.json").unlink()  # as from an engine that reaches none
    sums = folder / "checkpoints" / "round-000002" / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "clients.json" not in line))
    with pytest.raises(ConfigError, match="lacks the clients' personal models"):
        serve(cfg)


class Faulty:
    """Ends a process, as it were, at the n-th step of moving files about; a copy is left by half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left, self.happened = number, False
        steps = ((Path, "replace"), (Path, "write_bytes"), (shutil, "copyfile"), (shutil, "copytree"), (Path, "mkdir"))
        for owner, name in steps:
            monkeypatch.setattr(owner, name, self.instead(getattr(owner, name), name))

    def instead(self, original: Any, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.left -= 1
            if not self.left:
                self.happened = True
                if name == "write_bytes":
                    original(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return original(*args, **more)

        return call


@pytest.mark.parametrize("in_place", [True, False])
def test_killed_at_any_step_of_going_on_nothing_is_lost(
    in_place: bool, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = (killed / "checkpoints/round-000002/records.jsonl").read_bytes()
    beyond = (killed / "metrics.jsonl").read_bytes()[len(records) :]
    rows = pq.read_table(killed / "checkpoints/round-000002/clients.parquet").to_pydict()
    for number in range(1, 50):
        folder = tmp_path / str(number)
        source = shutil.copytree(killed, folder) if in_place else killed
        if in_place:
            (folder / "status.json").write_text("{}")  # as of a run that failed
            shutil.copyfile(folder / "checkpoints/round-000002/clients.parquet", folder / "clients.parquet")
        cfg = configured(folder, f"resume={source}")
        task = check(cfg)

        def go_on(cfg: Mapping[str, Any] = cfg, task: Any = task) -> None:
            with RunCheckpoints(cfg, find_start(cfg, task), task, SerialGrid(make_client_app(cfg), CLIENTS)):
                pass

        with monkeypatch.context() as patched:
            fault = Faulty(patched, number)
            try:
                go_on()
            except Killed:
                pass
            else:
                break
            assert fault.happened
        if not (folder / "metrics.jsonl").exists() or in_place:
            go_on()  # the same command, typed again
        assert (folder / "metrics.jsonl").read_bytes() == records
        assert pq.read_table(folder / "clients.parquet").to_pydict() == rows
        assert not (folder / "status.json").exists()
        assert find_start({**cfg, "resume": "auto"}, task).round == 2
        if in_place:
            assert beyond in [path.read_bytes() for path in folder.glob("metrics.jsonl.aside?")]
            assert len(list(folder.glob("status.json.aside?"))) == 1
    assert number > 4


# ---- auto, and sweeps --------------------------------------------------------------------------------------------


def test_auto_starts_where_there_is_nothing_or_nothing_saved_yet(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "run", "resume=auto", "num_rounds=3", "checkpoint.every=3")
    kill(cfg, 2)
    assert not list((tmp_path / "run" / "checkpoints").glob("round-*"))
    serve(cfg)
    assert (tmp_path / "run.aside1" / "metrics.jsonl").exists()
    assert [r["round"] for r in rounds(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_start_does_not_mix_with_what_is_there(killed: Path) -> None:
    cfg = configured(killed)
    with pytest.raises(FileExistsError, match=r"holds an earlier run: .*go on with that run by resume=auto"):
        serve(cfg)


def test_a_cell_that_was_killed_goes_on_and_another_ones_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "cell", "skip_finished=true")
    folder = kill(cfg, 3)
    with claimed(cfg) as reason:
        assert reason is None
    assert not list(tmp_path.glob("*.aside*"))
    assert find_start({**cfg, "resume": "auto"}, check(cfg)).round == 2
    other = configured(folder, "skip_finished=true", "seed=1")
    with claimed(other) as reason:
        assert reason is None
    assert (tmp_path / "cell.aside1" / "checkpoints" / "round-000002").is_dir()
    assert not list(folder.iterdir())


def test_a_cell_that_diverged_is_still_skipped_and_auto_tries_again(tmp_path: Path) -> None:
    words = ("strategy=fedavg", "client.lr=1e30", "strategy.max_failed_rounds=3", "strategy.min_completed=4")
    cfg = configured(tmp_path / "cell", *words)
    for _ in range(2):
        with pytest.raises(RoundsFailed, match="3 rounds in a row"):
            serve({**cfg, "resume": "auto"})
    with claimed(cfg) as reason:
        assert "would again" in str(reason)


# ---- clients' states ---------------------------------------------------------------------------------------------


def test_states_of_clients_survive_bit_for_bit_and_equal_ones_are_written_once(tmp_path: Path) -> None:
    big = np.arange(10_000, dtype=np.float32)
    shared = ArrayRecord([big, np.array(2, np.int64), np.zeros((0, 3), np.float16)])
    states = {
        0: RecordDict({"a": shared, "m": MetricRecord({"x": 1, "y": [0.1, 2.0], "nan": float("nan")})}),
        5: RecordDict({"a": ArrayRecord([big.copy()]), "c": ConfigRecord({"b": b"\x00\xff", "l": [b"1"], "t": True})}),
        7: RecordDict(),
    }  # fmt: skip
    packed = {partition: wire.pack(state) for partition, state in states.items()}
    save_states(tmp_path, packed)
    found = {partition: wire.unpack(records) for partition, records in load_states(tmp_path).items()}
    assert list(found) == [0, 5, 7]
    for partition, state in states.items():
        assert list(found[partition]) == list(state)
        for name, record in state.items():
            assert str(found[partition][name]) == str(record)
            if isinstance(record, ArrayRecord):
                assert found[partition][name] == record
    assert (tmp_path / "clients.safetensors").stat().st_size < 1.5 * big.nbytes


# ---- in a ServerApp of one's own -----------------------------------------------------------------------------------


class Adder(Client):
    """Adds to every array a number that depends on the round and on the client; no code of this project."""

    def __init__(self, cid: int) -> None:
        self.cid = cid

    def fit(self, ins: FitIns) -> FitRes:
        step = np.float32(0.1 * (self.cid + 1) / int(ins.config["server_round"]))
        arrays = [
            a + step * (1 + np.arange(a.size, dtype=a.dtype).reshape(a.shape))
            for a in parameters_to_ndarrays(ins.parameters)
        ]
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), self.cid + 1, {})  # fmt: skip


legacy_clients = ClientApp(client_fn=lambda context: Adder(int(context.node_config["partition-id"])))
message_clients = ClientApp()


@message_clients.train()
def train(message: Message, context: Context) -> Message:
    """The same, as Flower's newer API has it."""
    cid, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    step = np.float32(0.1 * (cid + 1) / number)
    arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
    moved = {k: a + step * (1 + np.arange(a.size, dtype=a.dtype).reshape(a.shape)) for k, a in arrays.items()}
    record = ArrayRecord(array_dict={k: ArrayRecord([a])["0"] for k, a in moved.items()})
    content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": cid + 1})})
    return Message(content, reply_to=message)


START = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)]


def own_server(folder: Path, total: int, found: list[Parameters]) -> ServerApp:
    def server_fn(context: Context) -> ServerAppComponents:
        initial = ndarrays_to_parameters(START)
        inner = CRAFT(initial_parameters=initial, min_available_clients=4, fraction_fit=0.5, fraction_evaluate=0.0)
        strategy = Checkpointed(inner, folder, every=2, num_rounds=total, resume="auto")
        aggregate = strategy.aggregate_fit

        def noted(server_round: int, results: Any, failures: Any) -> Any:
            parameters, metrics = aggregate(server_round, results, failures)
            found.append(parameters)
            return parameters, metrics

        strategy.aggregate_fit = noted  # type: ignore[method-assign]
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=total - strategy.rounds_done))

    return ServerApp(server_fn=server_fn)


def test_in_a_legacy_server_app(tmp_path: Path) -> None:
    whole: list[Parameters] = []
    serve_on(SerialGrid(legacy_clients, 4), own_server(tmp_path / "whole", 6, whole))
    rest: list[Parameters] = []
    app = own_server(tmp_path / "killed", 6, rest)
    with pytest.raises(Killed):
        serve_on(Mortal(legacy_clients, 4, exchanges=5), app)
    del rest[:]
    serve_on(SerialGrid(legacy_clients, 4), own_server(tmp_path / "killed", 6, rest))
    assert [p.tensors for p in rest] == [p.tensors for p in whole[4:]]
    again: list[Parameters] = []
    serve_on(SerialGrid(legacy_clients, 4), own_server(tmp_path / "killed", 6, again))  # nothing is left to run
    assert again == []


def test_behind_the_message_api(tmp_path: Path) -> None:
    def go(folder: Path, num_rounds: int, scores: dict[int, float]) -> Any:
        out = []
        app = ServerApp()

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
            return MetricRecord({"accuracy": scores[number]})

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            inner = CRAFT(min_available_clients=4, fraction_fit=0.5, fraction_evaluate=0.0)
            kept = Checkpointed(inner, folder, every=1, keep=1, metric="accuracy", resume="auto")
            record = ArrayRecord(array_dict={f"layer.{i}": ArrayRecord([a])["0"] for i, a in enumerate(START)})
            left = num_rounds - kept.rounds_done
            out.append(MessageStrategy(kept).start(grid, record, num_rounds=left, evaluate_fn=evaluated))

        serve_on(SerialGrid(message_clients, 4), app)
        return out[0]

    scores = {0: 0.0, 1: 0.2, 2: 0.9, 3: 0.3, 4: 0.4, 5: 0.5}
    whole = go(tmp_path / "whole", 5, scores)
    go(tmp_path / "part", 3, scores)
    rest = go(tmp_path / "part", 5, scores)
    assert list(rest.train_metrics_clientapp) == [4, 5]
    assert list(rest.arrays) == ["layer.0", "layer.1"]
    for name, array in whole.arrays.items():
        assert array.data == rest.arrays[name].data
    for folder in ("whole", "part"):
        assert sorted(p.name for p in (tmp_path / folder).glob("round-*")) == ["round-000002", "round-000005"]


# ---- real processes ------------------------------------------------------------------------------------------------


def test_kill_minus_nine_at_several_moments(tmp_path: Path) -> None:
    words = [
        f"num_clients={CLIENTS}", "clients_per_round=4", "num_rounds=150", "client.lr=0.1", "model.hidden=[8]",
        "checkpoint.every=3", "simulation=serial", "tracking.progress=false", "tracking.tensorboard=false",
        "client.ditto_lambda=0.5", "evaluation=federated", "evaluation.every=2",
    ]  # fmt: skip
    cfg = compose([*words, f"output_dir={tmp_path / 'whole'}"])
    serve(cfg)
    folder = tmp_path / "killed"
    records = folder / "metrics.jsonl"

    def lines(number: int) -> bool:
        return records.exists() and records.read_bytes().count(b"\n") >= number

    def writing() -> bool:
        # Should it never be caught in the act, it is killed later all the same.
        return lines(60) or (lines(20) and bool(list((folder / "checkpoints").glob(".round-*.tmp"))))

    for moment in (lambda: lines(8), writing):
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.run", *words, f"output_dir={folder}", "resume=auto"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True,
        )  # fmt: skip
        try:
            limit = time.monotonic() + 240
            while not moment() and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.0005)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
        assert not (folder / "status.json").exists()
    found = run(*words, f"output_dir={folder}", "resume=auto", "tracking.progress=true")
    assert found.returncode == 0, found.stdout
    same(left(folder), left(tmp_path / "whole"))
    says("`kill -9` of a run, and the same command again", found.stdout)
