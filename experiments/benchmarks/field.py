"""`python -m experiments.benchmarks.field`: what one `aggregate_fit` of every strategy costs, next to FedAvg's.

Two rounds: many clients of a convolutional network, and very many of a small one. Every strategy gets a process
of its own, where its rounds alternate with rounds of our FedAvg; ratios are of their medians. What is measured is
a later round, with state present and half of the clients new since the round before, so that a history costs
what it costs. On the CPU.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import strategies
from strategies import CRAFT, LayerMap, UpdateStrategy

from . import aggregation
from .aggregation import MODELS, Results, Row, alternate, make_model, make_round, peak_growth, size_of
from .cells import machine_memory

BASE = "FedAvg"
"""What all others are compared with."""

STRATEGIES: dict[str, Callable[..., UpdateStrategy]] = {
    BASE: strategies.FedAvg,
    "CRAFT": CRAFT,
    "CRAFT inequality": partial(CRAFT, constraint="inequality"),
    "CRAFT whole model": partial(CRAFT, granularity="model"),
    "NormalisedMomentum": strategies.NormalisedMomentum,
    "FedAvgM": strategies.FedAvgM,
    "FedRef": strategies.FedRef,
    "FedProx": strategies.FedProx,
    "FedNova": strategies.FedNova,
    "FedAdam": strategies.FedAdam,
    "FedYogi": strategies.FedYogi,
    "FedAdagrad": strategies.FedAdagrad,
    "AFL": strategies.AFL,
    "QFedAvg": strategies.QFedAvg,
    "FedFV": strategies.FedFV,
    "FedMGDA": strategies.FedMGDA,
    "FedLF": strategies.FedLF,
    "ConFIG": strategies.ConFIG,
    "FedMedian": strategies.FedMedian,
    "FedTrimmedAvg": strategies.FedTrimmedAvg,
    "Krum": strategies.Krum,
    "CLAIR clients": partial(strategies.CLAIR, form="clients"),
    "Local": strategies.Local,
    "OracleFedAvg": strategies.OracleFedAvg,
}
"""Everything the suite has, with its defaults; a new strategy joins by a line."""

ROUNDS = (("resnet20", 100), ("mlp", 1000))
QUICK = (("resnet20", 20), ("mlp", 50))

WARM_UPS = {"FedRef": 6}
"""Rounds before the first that is measured, where one is not enough: FedRef averages until its window is full."""

FIELDS = (*aggregation.FIELDS, "memory_ratio", "kept_mb")
"""Columns of a row. Both ratios are to our FedAvg; `kept_mb` is what a strategy keeps from round to round."""

_GRAIN = 2**17
"""Bytes: the kernel counts resident pages in batches of about this size, and says nothing about less."""


class Rounds:
    """Rounds of one strategy: at each call the next one, in turn with one of two sets of clients that share half.

    Parameters
    ----------
    strategy : UpdateStrategy
    results : list of (ClientProxy, FitRes)
        One and a half times as many as a round has.
    m : int
        Clients of a round.
    """

    def __init__(self, strategy: UpdateStrategy, results: Results, m: int) -> None:
        self.strategy = strategy
        self._sets = (results[-m:], results[:m])
        self._number = 0

    def __call__(self) -> None:
        """Aggregate a round.

        Raises
        ------
        RuntimeError
            If the round failed or left a client out: its time would be of something else.
        """
        self._number += 1
        clients = self._sets[self._number % 2]
        _, metrics = self.strategy.aggregate_fit(self._number, clients, [])
        if metrics["failed_round"] or metrics["clients_accepted"] != len(clients):
            why = metrics.get("failed_reason") or metrics.get("rejection_reasons")
            raise RuntimeError(f"round {self._number} of {type(self.strategy).__name__} cannot be measured: {why!s}")


def kept_bytes(strategy: UpdateStrategy) -> int:
    """Bytes of what a strategy remembers between rounds; the global model is not counted."""
    records = len(json.dumps(strategy.records)) if strategy.records else 0
    return records + sum(tensor.nbytes for tensor in strategy.memory.values())


def measure(who: str, model: str, m: int, repeats: int, budget: float) -> Row:
    """Measure a strategy next to FedAvg in this process, which should be a fresh one; memory comes first."""
    layers, start, results = make_round(model, m + m // 2)

    def rounds_of(name: str) -> Rounds:
        return Rounds(STRATEGIES[name](layers=layers, initial_parameters=start, device="cpu"), results, m)

    rounds = rounds_of(who)
    for _ in range(WARM_UPS.get(who, 1)):
        rounds()  # state is there after this, and libraries have made their buffers
    began = time.perf_counter()
    extra = peak_growth(rounds)
    seconds = time.perf_counter() - began
    calls = {BASE: rounds} if who == BASE else {BASE: rounds_of(BASE), who: rounds}
    calls[BASE]()
    if seconds > budget:  # too slow to repeat: a single one, then one of FedAvg
        times = {who: [seconds], **alternate({BASE: calls[BASE]}, 1, budget, warm_ups=0)}
    else:
        times = alternate(calls, repeats, budget, warm_ups=0)
    medians = {name: statistics.median(found) for name, found in times.items()}
    received = size_of(layers) * m
    return {
        "section": "field", "model": model, "d": layers.size, "m": m, "device": "cpu", "who": who,
        "seconds": medians[who], "ratio": medians[who] / medians[BASE], "repeats": len(times[who]),
        "updates_mb": received / 1e6, "extra_mb": extra / 1e6, "of_updates": extra / received,
        "kept_mb": kept_bytes(rounds.strategy) / 1e6,
    }  # fmt: skip


def run(
    rounds: Sequence[tuple[str, int]] = ROUNDS,
    *,
    repeats: int = 3,
    budget: float = 15.0,
    max_gb: float = 3.0,
    report: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure every strategy in every round.

    Parameters
    ----------
    rounds : sequence of (str, int)
        Keys of `aggregation.MODELS` and numbers of clients m.
    repeats : int
        Alternating repetitions of a strategy and FedAvg.
    budget : float
        Seconds after which no further repetition starts. A single round that takes longer is not repeated.
    max_gb : float
        Rounds whose updates take more GB than this are skipped, and say so in their row.
    report : callable
        Called with a line of text as each measurement starts.

    Returns
    -------
    list of dict
        Rows with the keys of `FIELDS`, those that apply; a strategy that fails has its reason under `skipped`.
    """
    rows: list[Row] = []
    # Processes forked from one that has only imported: each is fresh, and none waits seconds for its imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([aggregation.__name__])
    for model, m in rounds:
        layers = LayerMap.from_module(make_model(model))
        what = {"section": "field", "model": model, "d": layers.size, "m": m}
        gb = size_of(layers) * m / 1e9
        if gb > max_gb:
            rows.append({**what, "skipped": f"updates of {gb:.1f} GB exceed {max_gb:g} GB"})
            continue
        base: float | None = None
        for who in STRATEGIES:
            report(f"{model}, m={m}, {who}")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    row = pool.submit(measure, who, model, m, repeats, budget).result()
                except RuntimeError as error:  # a dead process is one too
                    rows.append({**what, "who": who, "skipped": f"failed: {error}"})
                    continue
            extra = max(row["extra_mb"], _GRAIN / 1e6)
            base = extra if who == BASE else base
            rows.append({**row, "memory_ratio": extra / base} if base else row)
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table a round: every strategy, those with the smallest time ratio first; then those that were not measured."""
    found = []
    for model, d, m in dict.fromkeys((row["model"], row["d"], row["m"]) for row in rows):
        table = Table(title=f"one aggregate_fit: {model}, d = {d}, m = {m}; ratios to {BASE}",
                      box=box.SIMPLE, padding=(0, 1, 0, 0))  # fmt: skip
        table.add_column("strategy")
        for name in ("seconds", "ratio", "extra MB", "ratio", "kept MB"):
            table.add_column(name, justify="right")
        for row in _sorted(rows, model, m, "ratio"):
            table.add_row(
                row["who"], f"{row['seconds']:.3g}", f"{row['ratio']:.2f}", f"{row['extra_mb']:.1f}",
                _or_dash(row.get("memory_ratio"), ".2f"), _or_dash(row["kept_mb"] or None, ".3f"),
            )  # fmt: skip
        for row in rows:
            if row.get("skipped") and (row["model"], row["m"]) == (model, m):
                table.add_row(row.get("who", "all"), row["skipped"])
        found.append(table)
    return found


def _sorted(rows: Sequence[Row], model: str, m: int, key: str) -> list[Row]:
    """Rows of a round that have a value, smallest first."""
    return sorted((r for r in rows if (r["model"], r["m"]) == (model, m) and key in r), key=lambda row: row[key])


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def figure_of(rows: Sequence[Row]) -> Figure:
    """A row of panels a round: bars of both ratios, log scale, each panel sorted, with the figures at the bars."""
    rounds = list(dict.fromkeys((row["model"], row["m"]) for row in rows))
    figure = Figure(figsize=(12, 5.2 * len(rounds)), layout="constrained")
    for (model, m), (left, right) in zip(rounds, figure.subplots(len(rounds), 2, squeeze=False), strict=True):
        by_time = _sorted(rows, model, m, "ratio")
        _bars(left, by_time, "ratio", [f"{_short(r['seconds'])} s" for r in by_time])
        by_memory = _sorted(rows, model, m, "memory_ratio")
        kept = [f", keeps {_short(r['kept_mb'])}" if r["kept_mb"] else "" for r in by_memory]
        _bars(right, by_memory, "memory_ratio",
              [f"{_short(r['extra_mb'])} MB{k}" for r, k in zip(by_memory, kept, strict=True)])  # fmt: skip
        left.set(title=f"{model}, m = {m}: seconds", xlabel=f"seconds / {BASE}'s")
        right.set(title=f"{model}, m = {m}: extra memory", xlabel=f"extra memory / {BASE}'s")
    return figure


def _bars(axes: Axes, rows: Sequence[Row], key: str, labels: Sequence[str]) -> None:
    """Draw horizontal bars from FedAvg's 1 to a row's ratio, the smallest on top; CRAFT's stand out."""
    if not rows:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    values = [row[key] for row in rows]
    colours = ["#D55E00" if row["who"].startswith("CRAFT") else "#0072B2" for row in rows]
    axes.barh(range(len(rows)), [v - 1 for v in values], left=1, color=colours, height=0.7)
    axes.set_xscale("log")
    low, high = min(0.9, *values), max(1.1, *values)
    axes.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.55)  # room for the labels
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    for y, (value, label) in enumerate(zip(values, labels, strict=True)):
        axes.annotate(f"{value:.2g}×  {label}" if value < 10 else f"{value:.0f}×  {label}", (max(value, 1), y),
                      (4, 0), textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["who"] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _short(value: float) -> str:
    """Two significant digits, or whole units, or "<0.01"."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 0.01 else "<0.01"


def save(rows: Sequence[Row], out: Path) -> None:
    """Write field.csv and field.png into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    (out / "field.csv").write_text(text.getvalue())
    figure_of(rows).savefig(out / "field.png", dpi=150)


def _round(text: str) -> tuple[str, int]:
    """Read "mlp:1000"."""
    model, _, m = text.partition(":")
    if model not in MODELS or not m.isdecimal() or int(m) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:M, MODEL one of {', '.join(MODELS)} and M at least 2")
    return model, int(m)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and save a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few clients, about a minute")
    parser.add_argument("--rounds", nargs="+", type=_round, metavar="MODEL:M", help="default: resnet20:100 mlp:1000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--max-gb", type=float, default=0.2 * machine_memory() / 2**30,
        help="skip rounds whose updates take more than this; default: a fifth of the memory",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args(argv)
    console = Console()
    rounds = args.rounds or (QUICK if args.quick else ROUNDS)
    rows = run(rounds, repeats=args.repeats, max_gb=args.max_gb, report=console.print)
    for table in tables(rows):
        console.print(table)
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
