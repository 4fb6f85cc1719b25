"""Compare finished runs: tables per setting, report.md, report.csv, curves.png and, with examples, segmentation.png.

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

from rich.console import Console

from .clair_pictures import draw_pairs
from .comparison import Against, Comparison, compare
from .curves import draw_curves
from .pairs import last_vote
from .pictures import draw_pictures, gather
from .runs import SIZES, Group, find_failures, find_runs, group_runs, partition_kind
from .tables import all_columns, counts, sheets, show, without_row

_PICTURES = {
    "curves.png": "Curves over rounds",
    "pairs.png": "Pairs of clients in the last vote of a run, relative to the distance from which two disagree",
    "segmentation.png": "Slices of test subjects: the image, the truth, and what each strategy predicts",
}


def _markdown(
    groups: Sequence[Group],
    compared: Sequence[Against | None],
    left_out: Sequence[str],
    command: str,
    pictures: Sequence[str],
) -> str:
    parts = ["# Report", f"`{command}`", *(f"![{_PICTURES[name]}]({name})" for name in pictures)]
    for group, against in zip(groups, compared, strict=True):
        parts += [f"## {_plain(group.title)}", f"{group.facts[0].upper()}{group.facts[1:]}."]
        for sheet in sheets(group, against):
            parts += [f"### {sheet.heading}"] if sheet.heading else []
            lines = [[_plain(title.replace("-\n", "")) for title in sheet.titles]]
            lines.append(["---", *["---:"] * (len(sheet.titles) - 1)])
            for cells in sheet.rows:
                lines.append([f"**{_plain(cell.text)}**" if cell.best else _plain(cell.text) for cell in cells])
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
            parts.append(_plain(sheet.caption))
    if left_out:
        parts += ["## Left out", "\n".join(f"- {_plain(sentence)}" for sentence in left_out)]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Return Markdown that shows the text as it is, on one line: it may be a name or an error of anybody's."""
    return re.sub(r"([\\|<*`&])", r"\\\1", " ".join(text.split()))


def _csv(groups: Sequence[Group], compared: Sequence[Against | None]) -> str:
    """One line per setting and strategy: shares in [0, 1], empty where unknown, one seed has no std."""
    lines: list[dict[str, Any]] = []
    reported = {name for group in groups for row in group.rows for name, values in row.values.items() if values}
    for group, against in zip(groups, compared, strict=True):
        config = group.rows[0].runs[0].config
        setting = {"setting": group.title, "dataset": config["dataset"]["name"], "model": config["model"]["name"]}
        setting |= {"partition": partition_kind(config)} | {name: config[name] for name in SIZES}
        for row in group.rows:
            line = setting | {"strategy": row.label, "seeds": len(row.runs), "target": group.target}
            line["seeds_reaching_target"] = len(row.values["rounds_to_target"])
            for column in all_columns(group.headline):
                if column.optional and column.name not in reported:
                    continue
                values = row.values[column.name]
                line[f"{column.name}_seed_mean"] = fmean(values) if values else None
                line[f"{column.name}_seed_std"] = stdev(values) if len(values) > 1 else None
            line |= {title.replace("\n", "_"): count for title, count in counts(row).items()}
            if against:
                line |= {"against": against.reference} | asdict(against.comparisons.get(row.label, Comparison()))
                line["failed_seeds"] = len(against.failed.get(row.label, ()))
            lines.append(line)
        if against:
            for name in without_row(group, against):
                lines.append(setting | {"strategy": name, "seeds": 0, "failed_seeds": len(against.failed[name])})
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
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

    Where runs have left examples there is also ``segmentation.png``, and where clients voted (CLAIR) ``pairs.png``.

    Runs are compared within a setting: data set, partition, model, number of clients, clients per round, rounds,
    and who evaluates how often. Within it they belong together when they differ only by seed. Runs that did not
    finish, or are damaged, are named, never counted.

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
    vote = last_vote(groups, left_out)
    galleries = [gallery for group in groups if (gallery := gather(group, left_out))]
    for group, comparison in zip(groups, compared, strict=True):
        show(console, group, comparison)
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
    files = {"curves.png": draw_curves(groups)}
    if galleries:
        files["segmentation.png"] = draw_pictures(galleries)
    pictures = list(files)
    if vote is not None:
        draw_pairs(vote.distances, vote.members, 1.0, vote.labels, out / "pairs.png")
        pictures.append("pairs.png")
    files["report.csv"] = _csv(groups, compared).encode()
    files["report.md"] = _markdown(groups, compared, left_out, command, pictures).encode()
    for name, content in files.items():
        write_whole(out / name, content)
    console.print(
        f"Wrote {', '.join(dict.fromkeys([*pictures, *files]))} to {out}", markup=False, highlight=False, soft_wrap=True
    )
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
