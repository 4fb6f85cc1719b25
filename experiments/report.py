"""Compare finished runs: one table per setting, report.md, report.csv and curves.png.

``python -m experiments.report DIR... [--target 0.8] [--against craft] [--out DIR]``
"""

import argparse
import csv
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison import Against, Comparison, compare
from .curves import draw_curves
from .runs import SIZES, Group, Row, find_failures, find_runs, group_runs

# Per column of the tables: its title, its decimals, the factor to its unit, and which value is the best.
_COLUMNS: dict[str, tuple[str, int, float, Any]] = {
    "accuracy": ("accuracy", 1, 100, max),
    "accuracy_std": ("std over\nclients", 1, 100, None),  # small where all do badly, so no best
    "worst10": ("worst\n10 %", 1, 100, max),
    "best10": ("best\n10 %", 1, 100, max),
    "personal_accuracy": ("personal\naccuracy", 1, 100, max),
    "personal_accuracy_std": ("personal\nstd", 1, 100, None),
    "personal_worst10": ("personal\nworst 10 %", 1, 100, max),
    "personal_best10": ("personal\nbest 10 %", 1, 100, max),
    "rounds_to_target": ("rounds\nto target", 0, 1, min),
    "seconds": ("time (s)", 1, 1, None),  # with the start of the engine, so no best
}
# Of personal models, if there are any.
_OPTIONAL = {"personal_accuracy", "personal_accuracy_std", "personal_worst10", "personal_best10"}
_WITH_SPREAD = {
    "accuracy",
    "worst10",
    "personal_accuracy",
    "personal_worst10",
}  # the others' spread over seeds is in report.csv only
_AGAINST = ("p\n(Holm)", "n")
_COUNTS = {"failed_round": "failed\nrounds", "clients_rejected": "rejected\nclients"}


def _cell(name: str, row: Row) -> tuple[str, float | None]:
    """Return a cell's text and, if every seed has a value, their mean as rounded there."""
    _, digits, factor, _ = _COLUMNS[name]
    values = [factor * value for value in row.values[name]]
    if not values:
        return "–", None
    mean = f"{fmean(values):.{digits}f}"
    spread = f" ± {stdev(values):.{digits}f}" if name in _WITH_SPREAD and len(values) > 1 else ""
    if len(values) < len(row.runs):
        return f"{mean}{spread} ({len(values)}/{len(row.runs)})", None
    return mean + spread, float(mean)


def _compared(against: Against, label: str) -> list[str]:
    """Return a row's cells of `_AGAINST`."""
    found = against.comparisons.get(label, Comparison())
    return [
        "–" if found.gain is None else f"{100 * found.gain:+.1f}",
        "–" if found.p_holm is None else f"{found.p_holm:.3f}" if found.p_holm >= 0.0005 else "< 0.001",
        "–" if found.pairs is None else str(found.pairs),
    ]


def _table(group: Group, against: Against | None) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return the titles and the rows of cells, each cell with whether it is its column's best."""
    titles = ["strategy", "seeds"]
    columns = [[(row.label, False) for row in group.rows], [(str(len(row.runs)), False) for row in group.rows]]
    for name, (title, _, _, best_of) in _COLUMNS.items():
        if name in _OPTIONAL and not any(row.values[name] for row in group.rows):
            continue
        cells = [_cell(name, row) for row in group.rows]
        means = [mean for _, mean in cells if mean is not None]
        best = best_of(means) if best_of and len(set(means)) > 1 else None
        titles.append(title)
        columns.append([(text, mean is not None and mean == best) for text, mean in cells])
    for name, title in _COUNTS.items():
        if any(row.counted(name) for row in group.rows):
            titles.append(title)
            columns.append([(str(row.counted(name)), False) for row in group.rows])
    rows = [list(cells) for cells in zip(*columns, strict=True)]
    if against is None:
        return titles, rows
    for cells in rows:
        cells += [(text, False) for text in _compared(against, cells[0][0])]
    titles += [f"gain of\n{against.name} (%)", *_AGAINST]
    if against.failed:
        dashes = ["–"] * (len(titles) - 2)
        rows += [[(text, False) for text in (name, "0", *dashes)] for name in _without_row(group, against)]
        for cells in rows:
            seeds = against.failed.get(cells[0][0], ())
            cells.append((", ".join(map(str, seeds)) or "–", False))
        titles.append("failed\nseeds")
    return titles, rows


def _without_row(group: Group, against: Against) -> list[str]:
    """Return the strategies that failed and have no row of that very name."""
    return sorted(against.failed.keys() - {row.label for row in group.rows})


def _caption(group: Group, against: Against | None) -> str:
    return group.caption if against is None else f"{group.caption} {against.caption}"


def _rich_tables(group: Group, against: Against | None, width: int) -> list[Table]:
    """Return what the terminal shows: one table, or in a narrow terminal the comparison in a second one."""
    titles, rows = _table(group, against)
    title, narrow = Text.assemble((group.title, "bold"), "\n", group.facts), width < 100
    if against is None or not narrow:
        return [_rich_table(title, titles, rows, _caption(group, against), narrow)]
    usual = _table(group, None)
    own = [[cells[0], *cells[len(usual[0]) :]] for cells in rows]
    return [
        _rich_table(title, *usual, group.caption, narrow),
        _rich_table(Text(), [titles[0], *titles[len(usual[0]) :]], own, against.caption, narrow),
    ]


def _rich_table(
    heading: Text, titles: Sequence[str], rows: Sequence[Sequence[tuple[str, bool]]], caption: str, narrow: bool
) -> Table:
    table = Table(title=heading, caption=caption)
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=not index)
    for (label, _), *cells in rows:
        # in a narrow terminal each setting of a label goes on a line of its own, and long names are broken
        name = re.sub(r"\b(?=\w{19})(\w{9,17}_)", r"\1\n  ", label.replace(" ", "\n  ")) if narrow else label
        table.add_row(Text(name), *(Text(text, style="bold" if best else "") for text, best in cells))
    return table


def _markdown(
    groups: Sequence[Group], compared: Sequence[Against | None], left_out: Sequence[str], command: str
) -> str:
    parts = ["# Report", f"`{command}`", "![Accuracy and conflict over rounds](curves.png)"]
    for group, against in zip(groups, compared, strict=True):
        titles, rows = _table(group, against)
        lines = [[title.replace("\n", " ") for title in titles], ["---", *["---:"] * (len(titles) - 1)]]
        for cells in rows:
            lines.append([f"**{text}**" if best else text for text, best in cells])
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts += [f"## {group.title}", f"{group.facts[0].upper()}{group.facts[1:]}.", table]
        parts.append(_caption(group, against))
    if left_out:
        parts += ["## Left out", "\n".join(f"- {sentence}" for sentence in left_out)]
    return "\n\n".join(parts) + "\n"


def _csv(groups: Sequence[Group], compared: Sequence[Against | None]) -> str:
    """One line per setting and strategy: shares in [0, 1], empty where unknown, one seed has no std."""
    lines: list[dict[str, Any]] = []
    for group, against in zip(groups, compared, strict=True):
        config = group.rows[0].runs[0].config
        setting = {"setting": group.title, "dataset": config["dataset"]["name"], "model": config["model"]["name"]}
        setting |= {"partition": config["dataset"]["partition"]["kind"]} | {name: config[name] for name in SIZES}
        for row in group.rows:
            line = setting | {"strategy": row.label, "seeds": len(row.runs), "target": group.target}
            line["seeds_reaching_target"] = len(row.values["rounds_to_target"])
            for name in _COLUMNS:
                values = row.values[name]
                line[f"{name}_seed_mean"] = fmean(values) if values else None
                line[f"{name}_seed_std"] = stdev(values) if len(values) > 1 else None
            line |= {title.replace("\n", "_"): row.counted(name) for name, title in _COUNTS.items()}
            if against:
                line |= {"against": against.reference} | asdict(against.comparisons.get(row.label, Comparison()))
                line["failed_seeds"] = len(against.failed.get(row.label, ()))
            lines.append(line)
        if against:
            for name in _without_row(group, against):
                lines.append(setting | {"strategy": name, "seeds": 0, "failed_seeds": len(against.failed[name])})
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def report(
    dirs: Sequence[Path],
    *,
    target: float | None = None,
    against: str | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> Path | None:
    """Compare the runs below some folders, and write ``report.md``, ``report.csv`` and ``curves.png``.

    Runs are compared within a setting: data set, partition, model, number of clients, clients per round and
    rounds. Within it they belong together when they differ only by seed. Runs that did not finish are named,
    never counted.

    Parameters
    ----------
    dirs : sequence of Path
        Folders to search, at any depth, for what `experiments.tracking.RunTracker` leaves behind.
    target : float, optional
        The accuracy in (0, 1] for "rounds to target". By default the runs' ``target_accuracy``; where they
        share none, 90 % of the best result of the setting.
    against : str, optional
        The name of a strategy to hold against the others of each setting, seed by seed, see
        `experiments.comparison`; strategies that failed then have a row, too.
    out : Path, optional
        Where the files go; the first of ``dirs`` by default. Each is replaced in one step.
    console : rich.console.Console, optional
        Where the tables are shown; standard output by default.

    Returns
    -------
    Path or None
        The report.md written, or None if there is no finished run.

    Raises
    ------
    ValueError
        If ``target`` is not in (0, 1].
    """
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"The target accuracy must lie between 0 and 1 (0.8 for 80 %), but is {target}.")
    console = console or Console()
    folders = [Path(folder) for folder in dirs]
    runs, left_out = find_runs(folders)
    groups = group_runs(runs, target, left_out)
    failures = find_failures(folders) if against else []
    compared = [compare(group, against, failures) if against else None for group in groups]
    for group, comparison in zip(groups, compared, strict=True):
        for table in _rich_tables(group, comparison, console.width):
            console.print(table, "")
    for sentence in left_out:
        console.print(f"Left out: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not groups:
        names = ", ".join(map(str, folders))
        console.print(f"No finished run found below {names}.", markup=False, highlight=False, soft_wrap=True)
        return None
    out = Path(out) if out else folders[0]
    out.mkdir(parents=True, exist_ok=True)
    options = [*map(str, folders), *([] if target is None else ["--target", str(target)])]
    options += ["--against", against] if against else []
    command = shlex.join(["python", "-m", "experiments.report", *options])
    files = {
        "curves.png": draw_curves(groups),
        "report.csv": _csv(groups, compared).encode(),
        "report.md": _markdown(groups, compared, left_out, command).encode(),
    }
    for name, content in files.items():
        write_whole(out / name, content)
    console.print(f"Wrote {', '.join(files)} to {out}", markup=False, highlight=False, soft_wrap=True)
    return out / "report.md"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, whoever else writes it at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2 if there is nothing to report."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description="Compare finished runs.")
    parser.add_argument("dirs", nargs="+", type=Path, metavar="DIR", help="folders to search for runs")
    parser.add_argument("--target", type=float, help="accuracy between 0 and 1 that counts as reached")
    parser.add_argument("--against", metavar="NAME", help="strategy to compare the others with, over common seeds")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go (default: the first DIR)")
    options = parser.parse_args(arguments)
    if missing := [str(folder) for folder in options.dirs if not folder.is_dir()]:
        parser.error(f"no such folder: {', '.join(missing)}")
    try:
        return 0 if report(options.dirs, target=options.target, against=options.against, out=options.out) else 2
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
