"""`python -m experiments.benchmarks.memory`: the server process's memory after every round, over many rounds.

Clients add noise of their own to what they receive, so that two hundred rounds take minutes. Whatever a round leaves
behind shows as a slope over the last three quarters of the rounds: "flat" is one of at most a thousandth of what a
round's clients send, with 97.5 % confidence. Each run is a process of its own; with Flower's simulation the SuperLink
is a part of it. Read at the start of a round: by then a server has let go of what it is going to let go of.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

import strategies
from experiments.engine import VirtualGrid
from strategies import MessageStrategy, UpdateStrategy, partition_order

from .cells import answer, cell, resident, simulate

_MODULE = "experiments.benchmarks.memory"  # whatever name it runs under
SHAPES = ((256, 784), (256,), (128, 256), (128,), (62, 128), (62,))
"""An MLP 784-256-128-62: 241,854 numbers, .97 MB in float32."""
MODEL_KB = 4 * sum(int(np.prod(shape)) for shape in SHAPES) / 1e3
FLAT = 1e-3
"""A slope is flat up to this share of what a round's clients send."""
BLOCKS = 10

STRATEGIES: dict[str, Callable[..., UpdateStrategy]] = {
    "CRAFT": partial(strategies.CRAFT, server_lr=0.01),
    # Those that remember something of each client.
    "FedLF": strategies.FedLF,
    "CLAIR": partial(strategies.CLAIR, form="clients", rank=4, matrices=4),
    "Local": strategies.Local,
}
FLOWER = "Flower's FedAvg"
CASES = (
    ("CRAFT", "ray", "legacy"),
    ("CRAFT", "ray", "message"),
    (FLOWER, "ray", "message"),
    (FLOWER, "stock", "message"),
    ("CRAFT", "stock", "message"),
    ("FedLF", "ray", "legacy"),
    ("CLAIR", "ray", "legacy"),
    ("Local", "ray", "legacy"),
)
"""Strategy, engine (ours on Ray, or Flower's simulation), and which of Flower's APIs the server runs."""
FIELDS = ("who", "engine", "api", "rounds", "clients", "registered", "first_mb", "settled_mb", "last_mb", "last_rss_mb",
          "slope_kb", "error_kb", "verdict", "seconds_a_round", "note")  # fmt: skip

app = ClientApp()


@app.train()
def add_noise(message: Message, context: Context) -> Message:
    """Add this client's noise to every array; answers in the API it is asked in."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    legacy = "fitins.parameters" in message.content
    record = message.content["fitins.parameters" if legacy else "arrays"]
    assert isinstance(record, ArrayRecord)
    arrays = [a + 0.1 * rng.standard_normal(a.shape, np.float32) for a in record.to_numpy_ndarrays()]
    reply = ArrayRecord(dict(zip(record, ArrayRecord(arrays).values(), strict=True)))
    told = {"initial_loss": 1.0, "train_loss": 0.5}
    if not legacy:
        return Message(
            RecordDict({"arrays": reply, "metrics": MetricRecord({"num-examples": 10, **told})}), reply_to=message
        )
    content = RecordDict({
        "fitres.parameters": reply,
        "fitres.num_examples": MetricRecord({"num_examples": 10}),
        "fitres.metrics": ConfigRecord(told),  # type: ignore[arg-type]
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    })  # fmt: skip
    return Message(content, reply_to=message)


def measure(who: str, engine: str, api: str, rounds: int, clients: int, registered: int) -> dict[str, Any]:
    """Return this process's own memory and all that is resident, in MB, after each round, and seconds a round."""
    own: list[float] = []
    rss: list[float] = []
    began = [0.0]

    def note() -> None:
        if not own:
            began[0] = time.perf_counter()
        mine, shared = resident()
        own.append(mine / 1e6)
        rss.append((mine + shared) / 1e6)

    start = [np.zeros(shape, np.float32) for shape in SHAPES]
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        if who == FLOWER:
            theirs = _Flower(
                note, fraction_train=clients / registered, min_train_nodes=clients, min_available_nodes=registered,
                fraction_evaluate=0.0, min_evaluate_nodes=0,
            )  # fmt: skip
            theirs.start(grid, ArrayRecord(start), num_rounds=rounds)
        else:
            strategy = _watched(
                STRATEGIES[who], note, fraction_fit=0.0, min_fit_clients=clients, min_available_clients=registered,
                fraction_evaluate=0.0, min_evaluate_clients=0, initial_parameters=ndarrays_to_parameters(start),
                partition_order=None if isinstance(grid, VirtualGrid) else partition_order,
            )  # fmt: skip
            if api == "message":
                MessageStrategy(strategy).start(grid, ArrayRecord(start), num_rounds=rounds)
            else:
                assert isinstance(grid, VirtualGrid)
                grid.lends_views = True
                inner = Server(client_manager=SimpleClientManager(), strategy=strategy)
                parts = ServerAppComponents(server=inner, config=ServerConfig(num_rounds=rounds))
                ServerApp(server_fn=lambda _: parts)(grid, context)
        note()  # what is left of the last round

    gc.collect()
    simulate(engine, server, app, registered, max(2 * clients * 2**20, 256 * 2**20))
    seconds = (time.perf_counter() - began[0]) / rounds
    return {"own_mb": own[1:], "rss_mb": rss[1:], "seconds_a_round": seconds}  # own[0]: before the first round


class _Flower(FlowerFedAvg):
    """Flower's FedAvg, watched."""

    def __init__(self, note: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._note = note

    def configure_train(self, *given: Any, **named: Any) -> Any:
        self._note()
        return super().configure_train(*given, **named)


def _watched(make: Callable[..., UpdateStrategy], note: Callable[[], None], **given: Any) -> UpdateStrategy:
    """Return a strategy that notes the memory before it configures a round, and refuses to measure a failed one."""
    strategy = make(**given)
    configure, aggregate = strategy.configure_fit, strategy.aggregate_fit

    def configure_fit(*given: Any, **named: Any) -> Any:
        note()
        return configure(*given, **named)

    def aggregate_fit(*given: Any, **named: Any) -> Any:
        parameters, metrics = aggregate(*given, **named)
        if metrics["failed_round"] or metrics["clients_accepted"] != strategy.min_fit_clients:
            raise RuntimeError(f"a round cannot be measured: {metrics}")
        return parameters, metrics

    strategy.configure_fit, strategy.aggregate_fit = configure_fit, aggregate_fit  # type: ignore[method-assign]
    return strategy


def slope(values: Sequence[float], blocks: int = BLOCKS) -> tuple[float, float]:
    """Fit a line to a series through the medians of `blocks` blocks of equal length.

    Consecutive readings resemble each other, which an ordinary fit would take for certainty; blocks much longer than
    that resemblance do not. Their medians, as an allocator hands back some pages in one round and takes them again in
    the next. What is left over of the series after division is cut off at its start.

    Returns
    -------
    (float, float)
        The slope a step, and half the width of its 95 % interval.

    Raises
    ------
    ValueError
        If there are fewer values than blocks, or fewer than three blocks.
    """
    length = len(values) // blocks
    if blocks < 3 or length < 1:
        raise ValueError(f"{len(values)} values do not make {blocks} blocks; at least three blocks of one are needed.")
    middles = np.median(np.asarray(values, float)[len(values) - length * blocks :].reshape(blocks, length), axis=1)
    x = length * (np.arange(blocks) - (blocks - 1) / 2)
    found = float(x @ middles / (x @ x))
    rest = middles - middles.mean() - found * x
    error = np.sqrt(rest @ rest / (blocks - 2) / (x @ x))
    return found, float(student.ppf(0.975, blocks - 2) * error)


def verdict(found: float, error: float, clients: int) -> str:
    """Say what a slope and its error, in kB a round of so many clients, mean: flat, grows, or cannot be told."""
    if found + error <= FLAT * clients * MODEL_KB:
        return "flat"
    return "grows" if found - error > 0 else "not told"


def summary(series: dict[str, Any], clients: int) -> dict[str, Any]:
    """Return a row's figures from what `measure` returned; the first quarter of the rounds is not fitted."""
    own = series["own_mb"]
    settled = len(own) // 4
    found, error = (1e3 * value for value in slope(own[settled:]))
    return {
        "first_mb": own[0], "settled_mb": own[settled], "last_mb": own[-1], "last_rss_mb": series["rss_mb"][-1],
        "slope_kb": found, "error_kb": error, "verdict": verdict(found, error, clients), **series,
    }  # fmt: skip


def run(
    *,
    rounds: int = 200,
    clients: int = 50,
    registered: int = 200,
    cases: Sequence[tuple[str, str, str]] | None = None,
    progress: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure every case and return a row for each."""
    rows = []
    for who, engine, api in CASES if cases is None else cases:
        progress(f"memory: {who}, {engine}, {api} API ...")
        given = {"who": who, "engine": engine, "api": api, "rounds": rounds, "clients": clients,
                 "registered": registered}  # fmt: skip
        found = cell(_MODULE, "measure", **given)
        rows.append({**given, **(found if "note" in found else summary(found, clients))})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Make a table of the rows."""
    first = rows[0]
    made = Table(
        "strategy", "engine", "API", "own MB: first", f"round {first['rounds'] // 4 + 1}", "last", "resident",
        "kB a round", "verdict", "s a round",
        title=f"server memory, {first['rounds']} rounds of {first['clients']} of {first['registered']} clients, "
        f"model {MODEL_KB:.0f} kB",
    )  # fmt: skip
    for row in rows:
        name = (row["who"], row["engine"], row["api"])
        if "slope_kb" not in row:
            made.add_row(*name, row["note"][-80:])
            continue
        made.add_row(
            *name, *(f"{row[key]:.1f}" for key in ("first_mb", "settled_mb", "last_mb", "last_rss_mb")),
            f"{row['slope_kb']:.1f} ± {row['error_kb']:.1f}", row["verdict"], f"{row['seconds_a_round']:.2f}",
        )  # fmt: skip
    return made


def figure_of(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw each server's own memory by round, with the slope in the legend."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    axes = figure.add_subplot()
    engines = {"ray": "-", "stock": "--"}
    names = list(dict.fromkeys(row["who"] for row in rows))
    for row in rows:
        if "own_mb" not in row:
            continue
        where = "Flower's simulation" if row["engine"] == "stock" else row["engine"]
        label = f"{row['who']}, {where}, {row['api']}: {row['slope_kb']:.1f} ± {row['error_kb']:.1f} kB a round"
        axes.plot(
            range(1, len(row["own_mb"]) + 1), row["own_mb"], engines.get(row["engine"], "-"),
            color=f"C{names.index(row['who'])}", alpha=0.5 if row["api"] == "legacy" and row["who"] == "CRAFT" else 1,
            linewidth=1.3, label=label,
        )  # fmt: skip
    axes.set_xlabel("round")
    axes.set_ylabel("the server process's own memory, MB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    return figure


def save(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write memory.csv (a row a case), memory_rounds.csv (every reading) and memory.png."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    (out / "memory.csv").write_text(text.getvalue())
    lines = ["who,engine,api,round,own_mb,rss_mb"]
    for row in rows:
        for number, (own, rss) in enumerate(zip(row.get("own_mb", ()), row.get("rss_mb", ()), strict=True), 1):
            lines.append(f"{row['who']},{row['engine']},{row['api']},{number},{own:.3f},{rss:.3f}")
    (out / "memory_rounds.csv").write_text("\n".join(lines) + "\n")
    figure_of(rows).savefig(out / "memory.png", dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 rounds of 10 of 40 clients: two minutes")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        answer(args.cell, measure=measure)
        return
    console = Console()
    console.print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    rounds, clients, registered = (40, 10, 40) if args.quick else (200, 50, 200)
    rows = run(rounds=rounds, clients=clients, registered=registered, progress=console.print)
    console.print(table(rows))
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
