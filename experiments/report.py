"""Compare finished runs: one table per setting, report.md, report.csv and curves.png.

``python -m experiments.report DIR... [--target 0.8] [--out DIR]``
"""

import argparse
import csv
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .curves import draw_curves
from .runs import SIZES, Group, Row, find_runs, group_runs

# Per column of the tables: its title, its decimals, the factor to its unit, and which value is the best.
_COLUMNS: dict[str, tuple[str, int, float, Any]] = {
    "accuracy": ("accuracy", 1, 100, max),
    "accuracy_std": ("std over\nclients", 1, 100, None),  # small where all do badly, so no best
    "worst10": ("worst\n10 %", 1, 100, max),
    "best10": ("best\n10 %", 1, 100, max),
    "rounds_to_target": ("rounds\nto target", 0, 1, min),
    "seconds": ("time (s)", 1, 1, min),
}
_WITH_SPREAD = {"accuracy", "worst10"}  # the others' spread over seeds is in report.csv only
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


def _table(group: Group) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return the titles and the rows of cells, each cell with whether it is its column's best."""
    titles = ["strategy", "seeds"]
    columns = [[(row.label, False) for row in group.rows], [(str(len(row.runs)), False) for row in group.rows]]
    for name, (title, _, _, best_of) in _COLUMNS.items():
        cells = [_cell(name, row) for row in group.rows]
        means = [mean for _, mean in cells if mean is not None]
        best = best_of(means) if best_of and len(set(means)) > 1 else None
        titles.append(title)
        columns.append([(text, mean is not None and mean == best) for text, mean in cells])
    for name, title in _COUNTS.items():
        if any(row.counted(name) for row in group.rows):
            titles.append(title)
            columns.append([(str(row.counted(name)), False) for row in group.rows])
    return titles, [list(cells) for cells in zip(*columns, strict=True)]


def _rich_table(group: Group, width: int) -> Table:
    titles, rows = _table(group)
    table = Table(title=Text.assemble((group.title, "bold"), "\n", group.facts), caption=group.caption)
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=not index)
    for (label, _), *cells in rows:
        # in a narrow terminal each setting of a label goes on a line of its own
        name = label if width >= 100 else label.replace(" ", "\n  ")
        table.add_row(Text(name), *(Text(text, style="bold" if best else "") for text, best in cells))
    return table


def _markdown(groups: Sequence[Group], left_out: Sequence[str], command: str) -> str:
    parts = ["# Report", f"`{command}`", "![Accuracy and conflict over rounds](curves.png)"]
    for group in groups:
        titles, rows = _table(group)
        lines = [[title.replace("\n", " ") for title in titles], ["---", *["---:"] * (len(titles) - 1)]]
        for cells in rows:
            lines.append([f"**{text}**" if best else text for text, best in cells])
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts += [f"## {group.title}", f"{group.facts[0].upper()}{group.facts[1:]}.", table, group.caption]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {sentence}" for sentence in left_out)]
    return "\n\n".join(parts) + "\n"


def _csv(groups: Sequence[Group]) -> str:
    """One line per setting and strategy: shares in [0, 1], empty where unknown, one seed has no std."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for row in group.rows:
            config = row.runs[0].config
            line = {"setting": group.title, "dataset": config["dataset"]["name"], "model": config["model"]["name"]}
            line |= {"partition": config["dataset"]["partition"]["kind"]} | {name: config[name] for name in SIZES}
            line |= {"strategy": row.label, "seeds": len(row.runs), "target": group.target}
            line["seeds_reaching_target"] = len(row.values["rounds_to_target"])
            for name in _COLUMNS:
                values = row.values[name]
                line[f"{name}_seed_mean"] = fmean(values) if values else None
                line[f"{name}_seed_std"] = stdev(values) if len(values) > 1 else None
            line |= {title.replace("\n", "_"): row.counted(name) for name, title in _COUNTS.items()}
            lines.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def report(
    dirs: Sequence[Path],
    *,
    target: float | None = None,
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
    for group in groups:
        console.print(_rich_table(group, console.width), "")
    for sentence in left_out:
        console.print(f"Left out: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not groups:
        names = ", ".join(map(str, folders))
        console.print(f"No finished run found below {names}.", markup=False, highlight=False, soft_wrap=True)
        return None
    out = Path(out) if out else folders[0]
    out.mkdir(parents=True, exist_ok=True)
    options = [*map(str, folders), *([] if target is None else ["--target", str(target)])]
    command = shlex.join(["python", "-m", "experiments.report", *options])
    files = {
        "curves.png": draw_curves(groups),
        "report.csv": _csv(groups).encode(),
        "report.md": _markdown(groups, left_out, command).encode(),
    }
    for name, content in files.items():
        temporary = out / f".{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(out / name)
    console.print(f"Wrote {', '.join(files)} to {out}", markup=False, highlight=False, soft_wrap=True)
    return out / "report.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2 if there is nothing to report."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description="Compare finished runs.")
    parser.add_argument("dirs", nargs="+", type=Path, metavar="DIR", help="folders to search for runs")
    parser.add_argument("--target", type=float, help="accuracy between 0 and 1 that counts as reached")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go (default: the first DIR)")
    options = parser.parse_args(arguments)
    if missing := [str(folder) for folder in options.dirs if not folder.is_dir()]:
        parser.error(f"no such folder: {', '.join(missing)}")
    try:
        return 0 if report(options.dirs, target=options.target, out=options.out) else 2
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
