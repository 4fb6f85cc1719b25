"""Curves of finished runs: accuracy, its worst tenth, and conflict over rounds, one line of panels a setting."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from .runs import Group, Row

# Okabe and Ito's colour-blind safe palette without its yellow, which white swallows; then again with markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("", "o", "s", "^")


# With more lines than this in a panel, bands and dashed lines would hide them.
_CROWD = 8


def draw_curves(groups: Sequence[Group]) -> bytes:
    """Draw one line of panels per setting and return the PNG; of more rows than lines have styles, the best."""
    png = io.BytesIO()
    figure_of([drawable(group) for group in groups]).savefig(png, format="png", dpi=200)
    return png.getvalue()


def drawable(group: Group) -> Group:
    """Return the group with no more rows than there are styles: the best few settings of each strategy."""
    styles = len(_COLOURS) * len(_MARKERS)
    if len(group.rows) <= styles:
        return group
    names = [row.runs[0].strategy[0] for row in group.rows]  # best first
    most = max(1, styles // len(set(names)))
    rows = [row for index, row in enumerate(group.rows) if names[:index].count(names[index]) < most]
    title = f"{group.title}, {f'the best {most} settings' if most > 1 else 'the best setting'} of each strategy"
    return replace(group, title=title, rows=rows)


def figure_of(groups: Sequence[Group]) -> Figure:
    """Draw one line of panels per setting."""
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
    # The legend gets as many columns as its longest label allows, and the height that its lines take.
    columns = max(1, min(5, len(labels), 120 // (max(map(len, labels)) + 8)))
    heights = [*[3.3] * len(groups), 0.35 + 0.22 * -(-len(labels) // columns)]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    *parts, foot = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    for group, part in zip(groups, parts, strict=True):
        part.suptitle(textwrap.fill(group.title, 110), x=0.01, ha="left", weight="bold", fontsize=10)
        mean, worst, conflict = part.subplots(1, 3)
        _panel(mean, group, styles, "accuracy")
        mean.set(title="Accuracy, mean over clients", ylabel="accuracy (%)")
        _panel(worst, group, styles, "worst10")
        worst.set(title="Accuracy, worst 10 % of clients", ylabel="accuracy (%)")
        # one round's sample is small, so this share jumps: averaged, and the panel says so
        window = max(1, len(group.rows[0].runs[0].rounds) // 20)
        before = [
            _draw(conflict, row, styles[row.label], "conflict_share_before", "--", window)
            for row in group.rows
            if not _crowded(group)
        ]
        _panel(conflict, group, styles, "conflict_share_after", window)
        averaged = f", average of {window} rounds" if window > 1 else ""
        which = " after the solve" if _crowded(group) else ""
        conflict.set(title=f"Clients in conflict{which}{averaged}", ylabel="sampled clients (%)")
        if any(before):
            key = [Line2D([], [], color="0.4", linestyle=style, linewidth=1) for style in ("--", "-")]
            conflict.legend(key, ["before the solve", "after"], frameon=False, fontsize=8)
        for axes in (mean, worst, conflict):
            axes.title.set(fontsize=10)
    handles = [Line2D([], [], linewidth=2, **styles[label]) for label in labels]
    several = any(len(row.runs) > 1 for group in groups for row in group.rows)
    bands = "" if all(map(_crowded, groups)) else ", band: lowest to highest seed"
    foot.legend(
        handles,
        labels,
        loc="center",
        ncols=columns,
        frameon=False,
        title=f"line: mean over seeds{bands}" if several else None,
        title_fontsize=8,
    )
    return figure


def _crowded(group: Group) -> bool:
    return len(group.rows) > _CROWD


def _panel(axes: Axes, group: Group, styles: Mapping[str, Any], name: str, window: int = 1) -> None:
    missing = [
        row.label
        for row in group.rows
        if not _draw(axes, row, styles[row.label], name, window=window, band=not _crowded(group))
    ]
    if len(missing) == len(group.rows):
        axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color="0.5")
        axes.set(xticks=[], yticks=[])
    elif missing:
        note = textwrap.fill(f"not reported: {', '.join(missing)}", 40)
        axes.text(0.02, 0.05, note, transform=axes.transAxes, fontsize=7, color="0.5", in_layout=False)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0, top=max(5.0, axes.get_ylim()[1]))  # a curve at 0 % must not fill the panel
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(
    axes: Axes, row: Row, style: Mapping[str, Any], name: str, line: str = "-", window: int = 1, band: bool = True
) -> bool:
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
    if band and line == "-" and len(series) > 1:
        low, high = seeds.min(axis=0), seeds.max(axis=0)
        axes.fill_between(rounds, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return True
