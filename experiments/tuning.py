"""The end of a tuning sweep: a table of every strategy's points, points.md, and best.yaml with the one to take.

The sweep's folders are named ``STRATEGY/point<k>_seed<s>``, as craft_tune does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .headline import Headline
from .report import write_whole
from .runs import Failure, Run, find_failures, find_runs

_CAPTION = (
    "{} at the last evaluation, per point of the strategy's grid (conf/hparams). "
    "A point that failed with any seed, or lacks one that others have, loses; of equals the first is taken."
)


@dataclass(frozen=True)
class _Points:
    """One strategy's points on a benchmark."""

    strategy: str
    headline: Headline | None  # None where no run has finished
    score: Mapping[int, float]  # the headline, mean over seeds
    seeds: Mapping[int, int]  # how many have finished
    failed: frozenset[int]
    settings: Mapping[int, Mapping[str, Any]]  # what tells a point from the others

    @property
    def best(self) -> int | None:
        """The point to take, None if there is none."""
        most = max(self.seeds.values(), default=0)
        eligible = sorted(k for k in self.score.keys() - self.failed if self.seeds[k] == most)
        return max(eligible, key=self.score.__getitem__) if eligible else None  # the first of equals

    def cell(self, point: int) -> str:
        """What the table says of a point."""
        if point in self.failed:
            return "failed"
        if point not in self.score:
            return "–"
        most = max(self.seeds.values())
        return f"{100 * self.score[point]:.1f}" + (f" ({n}/{most})" if (n := self.seeds[point]) < most else "")

    def choice(self) -> str:
        """The settings of the best point, in words."""
        return "–" if self.best is None else " ".join(f"{k}={v}" for k, v in self.settings[self.best].items())


def choose(folder: Path, console: Console | None = None) -> Path | None:
    """Show the points of the runs below a folder, and write ``points.md`` and ``best.yaml`` there.

    ``best.yaml`` maps benchmark to strategy to ``{point, accuracy, settings}``, for craft_table's ``tuned``; where the
    runs are judged by another metric, its name stands for accuracy.

    Returns
    -------
    Path or None
        The best.yaml written; None if no folder is named as a point's, or none has finished.
    """
    console = console or Console()
    benchmarks = dict(sorted(_collect(folder).items()))
    best: dict[str, dict[str, Any]] = {}
    parts = ["# Points"]
    for benchmark, strategies in benchmarks.items():
        count = 1 + max(point for each in strategies for point in each.score.keys() | each.failed)
        headlines = dict.fromkeys(each.headline for each in strategies if each.headline)
        caption = _CAPTION.format(" or ".join(headline.meaning for headline in headlines) or "The metric in %")
        console.print(_rich_table(benchmark, strategies, count, console.width, caption), "")
        parts += [f"## {benchmark}", _markdown(strategies, count), caption]
        chosen = {
            each.strategy: {
                "point": each.best,
                each.headline.name: round(each.score[each.best], 4),
                "settings": dict(each.settings[each.best]),
            }
            for each in strategies
            if each.best is not None and each.headline is not None
        }
        if chosen:
            best[benchmark] = chosen
    if not best:
        return None
    write_whole(folder / "points.md", ("\n\n".join(parts) + "\n").encode())
    write_whole(folder / "best.yaml", yaml.safe_dump(best, sort_keys=False).encode())
    words = f"Wrote points.md, best.yaml to {folder}"
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    return folder / "best.yaml"


def _collect(folder: Path) -> dict[str, list[_Points]]:
    """Return the points by benchmark, the strategies in the order of their names."""
    runs: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for run in find_runs([folder])[0]:
        for key, point in _place(run):
            runs.setdefault(key, {}).setdefault(point, []).append(run)
    failed: dict[tuple[str, str], set[int]] = {}
    for failure in find_failures([folder]):
        for key, point in _place(failure):
            failed.setdefault(key, set()).add(point)
    found: dict[str, list[_Points]] = {}
    for key in sorted(runs.keys() | failed.keys()):
        points = runs.get(key, {})
        score = {point: fmean(run.score for run in seeds) for point, seeds in points.items()}
        headline = next((seeds[0].headline for seeds in points.values()), None)
        counts = {point: len(seeds) for point, seeds in points.items()}
        settings = {point: seeds[0].strategy[1] for point, seeds in points.items()}
        varied = [
            name
            for name in (next(iter(settings.values())) if settings else ())
            if len({str(of_point.get(name)) for of_point in settings.values()}) > 1
        ]
        told = {
            point: {name if name.startswith("client.") else f"strategy.{name}": of_point.get(name) for name in varied}
            for point, of_point in settings.items()
        }
        benchmark, strategy = key
        found.setdefault(benchmark, []).append(
            _Points(strategy, headline, score, counts, frozenset(failed.get(key, ())), told)
        )
    return found


def _place(run: Run | Failure) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield a run's benchmark, strategy and point, if its folder is named as a point's."""
    if match := re.fullmatch(r"point(\d+)_seed\d+", run.path.name):
        name = run.name if isinstance(run, Failure) else run.strategy[0]
        yield (str(run.config.get("benchmark_name")), name), int(match[1])


def _rich_table(benchmark: str, strategies: Sequence[_Points], count: int, width: int, caption: str) -> Table:
    table = Table(title=Text(f"Points on {benchmark}", style="bold"), caption=caption)
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column("strategy", overflow="fold")
    for point in range(count):
        table.add_column(str(point), justify="right", no_wrap=True)
    wide = width >= 100  # points.md has the settings anyway
    if wide:
        table.add_column("best")
    for each in strategies:
        cells = [Text(each.cell(point), style="bold" if point == each.best else "") for point in range(count)]
        table.add_row(Text(each.strategy), *cells, *([Text(each.choice())] if wide else []))
    return table


def _markdown(strategies: Sequence[_Points], count: int) -> str:
    lines = [["strategy", *map(str, range(count)), "best"], ["---", *["---:"] * count, "---"]]
    for each in strategies:
        cells = [f"**{each.cell(p)}**" if p == each.best else each.cell(p) for p in range(count)]
        lines.append([each.strategy, *cells, each.choice()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
