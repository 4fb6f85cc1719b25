"""Compare finished runs: one table per setting, report.md, report.csv and curves.png.

``python -m experiments.report DIR... [--target 0.8] [--out DIR]``
"""

import argparse
import csv
import io
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.metrics import rounds_to_target

# What says which repetition or which machine, not which experiment.
_ELSEWHERE = {"seed", "device", "data_dir"}
_SIZES = ("num_clients", "clients_per_round", "num_rounds")
# Per column of the tables: its title, its decimals, the factor to its unit, and which value is the best.
_COLUMNS: dict[str, tuple[str, int, float, Any]] = {
    "accuracy": ("accuracy", 1, 100, max),
    "accuracy_std": ("std over\nclients", 1, 100, min),
    "worst10": ("worst\n10 %", 1, 100, max),
    "best10": ("best\n10 %", 1, 100, max),
    "rounds_to_target": ("rounds\nto target", 0, 1, min),
    "seconds": ("time (s)", 1, 1, min),
}
_WITH_SPREAD = {"accuracy", "worst10"}  # the others' spread over seeds is in report.csv only
_COUNTS = {"failed_round": "failed\nrounds", "clients_rejected": "rejected\nclients"}
# Okabe and Ito's colour-blind safe palette without its yellow, which white swallows; then again with markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("", "o", "s", "^")


class _UnusableError(Exception):
    """Why a run cannot be compared, to follow the name of its folder."""


@dataclass(frozen=True)
class _Run:
    """A finished run; ``setting`` and ``strategy`` are each a label and all that could tell it from another."""

    path: Path
    config: Mapping[str, Any]
    setting: tuple[str, Mapping[str, Any]]
    strategy: tuple[str, Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]

    def series(self, name: str) -> dict[int, float]:
        return {row["round"]: row[name] for row in self.rounds if row.get(name) is not None}

    def result(self, name: str) -> float | None:
        return self.series(name).get(max(self.series("accuracy")))


@dataclass(frozen=True)
class _Row:
    """One strategy in one setting: its runs, one per seed, and per column the values of those that have one."""

    label: str
    runs: Sequence[_Run]
    values: Mapping[str, Sequence[float]]

    def counted(self, name: str) -> int:
        return sum(int(value) for run in self.runs for value in run.series(name).values())


@dataclass(frozen=True)
class _Group:
    """The strategies of one setting, best first."""

    title: str
    rows: Sequence[_Row]
    target: float
    target_source: str

    @property
    def facts(self) -> str:
        config = self.rows[0].runs[0].config
        clients, sample, rounds = (config[name] for name in _SIZES)
        return f"{clients} clients, {sample} per round, {rounds} rounds"

    @property
    def caption(self) -> str:
        return (
            "Test accuracy in % at the last evaluation, every client counting equally; "
            "± is the sample standard deviation over seeds, (n/m) a value that only n of m seeds have. "
            f"Target: {100 * self.target:.1f} % ({self.target_source})."
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` for a nested mapping."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key not in _ELSEWHERE:
            flat[prefix + key] = value
    return flat


def _distinguish(items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Append to each label the settings in which the items of that label differ."""
    labels = []
    for label, settings in items:
        peers = [other for name, other in items if name == label]
        differing = [key for key in settings if any(peer.get(key) != settings[key] for peer in peers)]
        labels.append(" ".join([label, *(f"{key}={settings[key]}" for key in differing)]))
    return labels


def _load(folder: Path) -> _Run:
    for name in ("config.yaml", "status.json"):
        if not (folder / name).is_file():
            raise _UnusableError(f"has no {name}: still running, or killed")
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    if status["status"] != "finished":
        raise _UnusableError(f"{status['status']}: {status['error']}")
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    if status["rounds"] < config["num_rounds"]:
        raise _UnusableError(f"stopped after round {status['rounds']} of {config['num_rounds']}")
    dataset, model, strategy = config["dataset"], config["model"], config["strategy"]
    partition = _flat(dataset["partition"])
    kind = " ".join([partition.pop("kind"), *(f"{key} {value}" for key, value in partition.items())])
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    run = _Run(
        path=folder,
        config=config,
        setting=(
            f"{dataset['name']}, {model['name']}, {kind}",
            _flat(dataset, "dataset.") | _flat(model, "model.") | {name: config[name] for name in _SIZES},
        ),
        strategy=(
            strategy.get("name") or strategy["_target_"].rpartition(".")[2],
            _flat(strategy) | _flat(config["client"], "client."),
        ),
        rounds=[json.loads(line) for line in lines],
    )
    if not run.series("accuracy"):
        raise _UnusableError("reports no accuracy")
    return run


def _find(folders: Iterable[Path]) -> tuple[list[_Run], list[str]]:
    """Return the runs below the folders, and a sentence for each that cannot be used."""
    runs, left_out = [], []
    for path in sorted({path.resolve().parent for folder in folders for path in folder.rglob("metrics.jsonl")}):
        try:
            runs.append(_load(path))
        except _UnusableError as error:
            left_out.append(f"{path} {error}")
        except (AttributeError, LookupError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            left_out.append(f"{path} cannot be read: " + " ".join(f"{type(error).__name__}: {error}".split()))
    return runs, left_out


def _groups(runs: Sequence[_Run], target: float | None, left_out: list[str]) -> list[_Group]:
    """Sort the runs into settings and strategies; a repeated seed joins those left out."""
    settings: dict[str, list[_Run]] = {}
    for title, run in zip(_distinguish([run.setting for run in runs]), runs, strict=True):
        settings.setdefault(title, []).append(run)
    groups = []
    for title, members in settings.items():
        seeds: dict[str, dict[Any, _Run]] = {}
        for label, run in zip(_distinguish([run.strategy for run in members]), members, strict=True):
            of_label, seed = seeds.setdefault(label, {}), run.config.get("seed")
            if seed in of_label:
                left_out.append(f"{of_label[seed].path} has the settings and the seed of {run.path}, used instead")
            of_label[seed] = run
        kept = {label: list(of_label.values()) for label, of_label in seeds.items()}
        goal, source = _target(kept, target)
        rows = [_Row(label, of_label, _values(of_label, goal)) for label, of_label in kept.items()]
        rows.sort(key=lambda row: -fmean(row.values["accuracy"]))
        groups.append(_Group(title, rows, goal, source))
    return groups


def _target(runs: Mapping[str, Sequence[_Run]], target: float | None) -> tuple[float, str]:
    if target is not None:
        return target, "as asked for"
    configured: set[Any] = {run.config.get("target_accuracy") for of_label in runs.values() for run in of_label}
    if len(configured) == 1 and None not in configured:
        return configured.pop(), "target_accuracy of the runs"
    best = max(fmean(run.result("accuracy") or 0 for run in of_label) for of_label in runs.values())
    return 0.9 * best, "90 % of the best result, as the runs share no target_accuracy"


def _values(runs: Sequence[_Run], target: float) -> dict[str, list[float]]:
    values: dict[str, list[float | None]] = {
        name: [run.result(name) for run in runs] for name in ("accuracy", "accuracy_std", "worst10", "best10")
    }
    accuracies = [run.series("accuracy") for run in runs]
    values["rounds_to_target"] = [rounds_to_target(list(a), list(a.values()), target) for a in accuracies]
    values["seconds"] = [run.rounds[-1].get("seconds") for run in runs]
    return {name: [value for value in column if value is not None] for name, column in values.items()}


def _cell(name: str, row: _Row) -> tuple[str, float | None]:
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


def _table(group: _Group) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Return the titles and the rows of cells, each cell with whether it is its column's best."""
    titles = ["strategy", "seeds"]
    columns = [[(row.label, False) for row in group.rows], [(str(len(row.runs)), False) for row in group.rows]]
    for name, (title, _, _, best_of) in _COLUMNS.items():
        cells = [_cell(name, row) for row in group.rows]
        means = [mean for _, mean in cells if mean is not None]
        best = best_of(means) if means and len(cells) > 1 else None
        titles.append(title)
        columns.append([(text, mean is not None and mean == best) for text, mean in cells])
    for name, title in _COUNTS.items():
        if any(row.counted(name) for row in group.rows):
            titles.append(title)
            columns.append([(str(row.counted(name)), False) for row in group.rows])
    return titles, [list(cells) for cells in zip(*columns, strict=True)]


def _rich_table(group: _Group, width: int) -> Table:
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


def _markdown(groups: Sequence[_Group], left_out: Sequence[str], command: str) -> str:
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


def _csv(groups: Sequence[_Group]) -> str:
    """One line per setting and strategy: shares in [0, 1], empty where unknown, one seed has no std."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for row in group.rows:
            config = row.runs[0].config
            line = {"setting": group.title, "dataset": config["dataset"]["name"], "model": config["model"]["name"]}
            line |= {"partition": config["dataset"]["partition"]["kind"]} | {name: config[name] for name in _SIZES}
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


def _curves(groups: Sequence[_Group]) -> bytes:
    """Draw one line of panels per setting and return the PNG."""
    figure = Figure(figsize=(10, 3.1 * len(groups) + 0.6), layout="constrained")
    labels = list(dict.fromkeys(row.label for group in groups for row in group.rows))
    styles: dict[str, dict[str, Any]] = {
        label: {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index // len(_COLOURS) % len(_MARKERS)],
            "markersize": 4,
            "markevery": 0.1,
        }
        for index, label in enumerate(labels)
    }
    panels = figure.subplots(len(groups), 3, squeeze=False)
    for group, (mean, worst, conflict) in zip(groups, panels, strict=True):
        mean.annotate(group.title, (0, 1), (0, 24), "axes fraction", "offset points", weight="bold")
        _panel(mean, group, styles, "accuracy")
        mean.set(title="Accuracy, mean over clients", ylabel="accuracy (%)")
        _panel(worst, group, styles, "worst10")
        worst.set(title="Accuracy, worst 10 % of clients", ylabel="accuracy (%)")
        # one round's sample is small, so this share jumps: averaged, and the panel says so
        window = max(1, len(group.rows[0].runs[0].rounds) // 20)
        before = [_draw(conflict, row, styles[row.label], "conflict_share_before", "--", window) for row in group.rows]
        _panel(conflict, group, styles, "conflict_share_after", window)
        averaged = f", average of {window} rounds" if window > 1 else ""
        conflict.set(title=f"Clients in conflict{averaged}", ylabel="sampled clients (%)")
        if any(before):
            key = [Line2D([], [], color="0.4", linestyle=style, linewidth=1) for style in ("--", "-")]
            conflict.legend(key, ["before the solve", "after"], frameon=False, fontsize=8)
        for axes in (mean, worst, conflict):
            axes.title.set(fontsize=10)
    handles = [Line2D([], [], linewidth=2, **styles[label]) for label in labels]
    several = any(len(row.runs) > 1 for group in groups for row in group.rows)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 5),
        frameon=False,
        title="line: mean over seeds, band: lowest to highest seed" if several else None,
        title_fontsize=8,
    )
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200)
    return png.getvalue()


def _panel(axes: Axes, group: _Group, styles: Mapping[str, Any], name: str, window: int = 1) -> None:
    missing = [row.label for row in group.rows if not _draw(axes, row, styles[row.label], name, window=window)]
    if len(missing) == len(group.rows):
        axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color="0.5")
        axes.set(xticks=[], yticks=[])
    elif missing:
        note = f"not reported: {', '.join(missing)}"
        axes.text(0.02, 0.05, note, transform=axes.transAxes, fontsize=7, color="0.5")
    axes.set_xlabel("round")
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, row: _Row, style: Mapping[str, Any], name: str, line: str = "-", window: int = 1) -> bool:
    """Draw the mean over seeds, in rounds that all seeds report, and a band; False if there is no such round."""
    series = [run.series(name) for run in row.runs]
    rounds = sorted(set.intersection(*(set(of_run) for of_run in series)))
    if not rounds:
        return False
    window = min(window, len(rounds))
    seeds = np.array([[100 * of_run[number] for number in rounds] for of_run in series])
    seeds = np.lib.stride_tricks.sliding_window_view(seeds, window, axis=1).mean(axis=2)
    rounds = rounds[window - 1 :]
    width = 1.6 if line == "-" else 0.9
    style = style if len(rounds) > 1 else {**style, "marker": "o"}  # a single point needs one to be seen
    axes.plot(rounds, seeds.mean(axis=0), line, linewidth=width, zorder=3, clip_on=False, **style)
    if line == "-" and len(series) > 1:
        low, high = seeds.min(axis=0), seeds.max(axis=0)
        axes.fill_between(rounds, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return True


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
    runs, left_out = _find(folders)
    groups = _groups(runs, target, left_out)
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
        "curves.png": _curves(groups),
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
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
