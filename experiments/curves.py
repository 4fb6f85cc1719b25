"""Curves of finished runs, up to three lines of panels a setting.

First the headline metric, its worst tenth, and conflict over rounds. Then, where a run has recorded these: what is
forgotten, the trajectory of the global model, and the training loss. Last how it does class by class and how unsteady
it is: of a classifier macro F1, UDP and total variation, of segmentation the Dice of each class, HD95 and UDP, of a
regression with a known truth the estimation error, UDP and total variation.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from .headline import CLASSES, ESTIMATION
from .runs import Group, Row

# Okabe and Ito's colour-blind safe palette without its yellow, which white swallows; then again with markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("", "o", "s", "^")


# With more lines than this in a panel, bands and dashed lines would hide them.
_CROWD = 8
# With more rows than this, the lines of three classes each could not be told apart.
_FEW = 4
_BENIGN = {"all clients": "-", "benign only": "--"}
_CLASS_LINES = {"dice_wt": ("WT", "-"), "dice_tc": ("TC", "--"), "dice_et": ("ET", ":")}

_Line = Callable[[Sequence[Axes], Group, Mapping[str, Any]], None]


def draw_curves(groups: Sequence[Group]) -> bytes:
    """Draw the panels of each setting and return the PNG; of more rows than lines have styles, the best."""
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


@matplotlib.rc_context({"text.parse_math": False})  # names are anybody's, and a $ among them no formula
def figure_of(groups: Sequence[Group]) -> Figure:
    """Draw the panels of each setting."""
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
    lines = [_lines(group) for group in groups]
    heights = [*(0.3 + 3.0 * len(of_group) for of_group in lines), 0.35 + 0.22 * -(-len(labels) // columns)]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    *parts, foot = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    for group, part, of_group in zip(groups, parts, lines, strict=True):
        part.suptitle(textwrap.fill(group.title, 110), x=0.01, ha="left", weight="bold", fontsize=10)
        panels = part.subplots(len(of_group), 3, squeeze=False)
        for draw, of_line in zip(of_group, panels, strict=True):
            draw(of_line, group, styles)
        for axes in panels.flat:
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


def _lines(group: Group) -> list[_Line]:
    """Return what draws each line of panels that the runs have something for."""
    lines: list[_Line] = [_basic_line]
    if _reports(group, "forgetting", "path_length"):
        lines.append(_stability_line)
    if _reports(group, *CLASSES):
        lines.append(_segmentation_line)
    elif _reports(group, "macro_f1", "udp_loss", "total_variation"):
        lines.append(_regression_line if _reports(group, *ESTIMATION) else _classification_line)
    return lines


def _reports(group: Group, *names: str) -> bool:
    return any(run.series(name) for name in names for row in group.rows for run in row.runs)


def _basic_line(panels: Sequence[Axes], group: Group, styles: Mapping[str, Any]) -> None:
    mean, worst, conflict = panels
    headline, window = group.headline, _window(group)
    title = headline.title[0].upper() + headline.title[1:]
    _panel(mean, group, styles, headline.name)
    mean.set(title=f"{title}, mean over {headline.client}s", ylabel=f"{headline.title} (%)")
    _panel(worst, group, styles, "worst10")
    worst.set(title=f"{title}, worst 10 % of {headline.client}s", ylabel=f"{headline.title} (%)")
    for axes, name in ((mean, headline.benign), (worst, "benign_worst10")):
        if _dash(axes, group, styles, name):
            _key(axes, _BENIGN)
    before = _dash(conflict, group, styles, "conflict_share_before", window)
    _panel(conflict, group, styles, "conflict_share_after", window)
    which = " after the solve" if _crowded(group) else ""
    conflict.set(title=f"Clients in conflict{which}", xlabel=_rounds(window), ylabel="sampled clients (%)")
    if before:
        _key(conflict, {"before the solve": "--", "after": "-"})
    for axes in panels:
        _from_zero(axes)


def _stability_line(panels: Sequence[Axes], group: Group, styles: Mapping[str, Any]) -> None:
    forgetting, path, loss = panels
    zeta = _dash(forgetting, group, styles, "zeta")
    _panel(forgetting, group, styles, "forgetting")
    if forgetting.get_ylim()[0] < -100:  # ζ is far below what is forgotten; on this scale both can be seen
        forgetting.set_yscale("symlog", linthresh=10)
        forgetting.yaxis.set_major_formatter(ScalarFormatter())
    forgetting.axhline(0, color="0.6", linewidth=0.8)
    forgetting.set(title=f"Forgetting of {group.headline.title} so far", ylabel="percentage points, summed")
    if zeta:
        _key(forgetting, {"ζ": "--", "its positive part": "-"})
    _panel(path, group, styles, "distance_from_start", factor=1, over="path_length", band=False)
    path.set(title="Trajectory of the global model", xlabel="path length", ylabel="distance from the start")
    if path.lines:
        path.set(xlim=(0, None), ylim=(0, None))
        straight = path.axline((0, 0), slope=1, color="0.4", linestyle=":", linewidth=1)
        path.legend([straight], ["straight"], frameon=False, fontsize=8)
    window = _window(group)
    _panel(loss, group, styles, "train_loss", window, factor=1)
    loss.set(title="Clients' training loss", xlabel=_rounds(window), ylabel="loss")


def _classification_line(panels: Sequence[Axes], group: Group, styles: Mapping[str, Any]) -> None:
    macro_f1, udp, variation = panels
    _panel(macro_f1, group, styles, "macro_f1")
    macro_f1.set(title="Macro F1 of all test samples", ylabel="macro F1 (%)")
    _from_zero(macro_f1)
    _udp(udp, group, styles)
    _variation(variation, group, styles)


def _regression_line(panels: Sequence[Axes], group: Group, styles: Mapping[str, Any]) -> None:
    error, udp, variation = panels
    benign = _dash(error, group, styles, "benign_estimation_error", factor=1)
    _panel(error, group, styles, "estimation_error", factor=1)
    error.set(title="Estimation error", ylabel="squared distance from the truth")
    error.set_ylim(bottom=0)
    if benign:
        _key(error, _BENIGN)
    _udp(udp, group, styles)
    _variation(variation, group, styles)


def _variation(axes: Axes, group: Group, styles: Mapping[str, Any]) -> None:
    _panel(axes, group, styles, "total_variation")
    axes.set(title=f"Total variation of {group.headline.title} so far", ylabel="percentage points, summed")
    _from_zero(axes)


def _segmentation_line(panels: Sequence[Axes], group: Group, styles: Mapping[str, Any]) -> None:
    dice, hd95, udp = panels
    few = len(group.rows) <= _FEW
    _panel(dice, group, styles, "dice_wt", band=not few)
    if few:
        for row in group.rows:
            for name in ("dice_tc", "dice_et"):
                _draw(dice, row, styles[row.label], name, _CLASS_LINES[name][1])
        dice.set_ylim(top=1.15 * dice.get_ylim()[1])  # room for the key
        _key(dice, dict(_CLASS_LINES.values()), loc="upper left", ncols=len(_CLASS_LINES))
    dice.set(title=f"Dice of {'each class' if few else 'WT'}, mean over subjects", ylabel="Dice (%)")
    _from_zero(dice)
    _hd95(hd95, group, styles)
    _udp(udp, group, styles)


def _hd95(axes: Axes, group: Group, styles: Mapping[str, Any]) -> None:
    _panel(axes, group, styles, "hd95", factor=1)
    axes.set(title="HD95, mean of the classes", ylabel="HD95 (mm)")
    drawn = [height for line in axes.lines for height in np.asarray(line.get_ydata()).tolist()]
    if drawn and 0 < 10 * min(drawn) < max(drawn):  # an untrained model would flatten all that follows
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        _from_zero(axes)


def _udp(axes: Axes, group: Group, styles: Mapping[str, Any]) -> None:
    _panel(axes, group, styles, "udp_loss")
    axes.set(title="UDP (loss) so far", ylabel="rounds (%)")
    _from_zero(axes)


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0, top=max(5.0, axes.get_ylim()[1]))  # a curve at 0 must not fill the panel


def _window(group: Group) -> int:
    """Return over how many rounds to average what jumps, as one round's sample of clients is small; panels say so."""
    return max(1, len(group.rows[0].runs[0].rounds) // 20)


def _rounds(window: int) -> str:
    return f"round (average of {window})" if window > 1 else "round"


def _key(axes: Axes, names: Mapping[str, str], **where: Any) -> None:
    """Explain a panel's line styles."""
    handles = [Line2D([], [], color="0.4", linestyle=style, linewidth=1) for style in names.values()]
    axes.legend(handles, list(names), frameon=False, fontsize=8, **where)


def _crowded(group: Group) -> bool:
    return len(group.rows) > _CROWD


def _dash(axes: Axes, group: Group, styles: Mapping[str, Any], name: str, window: int = 1, factor: float = 100) -> bool:
    """Draw dashed lines, unless they would crowd the panel; False if there are none."""
    rows = [] if _crowded(group) else group.rows
    drawn = [_draw(axes, row, styles[row.label], name, "--", window, factor=factor) for row in rows]
    return any(drawn)


def _panel(
    axes: Axes,
    group: Group,
    styles: Mapping[str, Any],
    name: str,
    window: int = 1,
    factor: float = 100,
    over: str | None = None,
    band: bool = True,
) -> None:
    band = band and not _crowded(group)
    missing = [
        row.label
        for row in group.rows
        if not _draw(axes, row, styles[row.label], name, "-", window, factor=factor, over=over, band=band)
    ]
    axes.set_xlabel("round")
    if over is None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(missing) == len(group.rows):
        axes.text(0.5, 0.5, "not reported", transform=axes.transAxes, ha="center", color="0.5")
        axes.set(xticks=[], yticks=[])
    elif missing:
        note = textwrap.fill(f"not reported: {', '.join(missing)}", 40)
        axes.text(0.02, 0.05, note, transform=axes.transAxes, fontsize=7, color="0.5", in_layout=False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(
    axes: Axes,
    row: Row,
    style: Mapping[str, Any],
    name: str,
    line: str = "-",
    window: int = 1,
    *,
    factor: float = 100,
    over: str | None = None,
    band: bool = True,
) -> bool:
    """Draw the mean over seeds, in rounds that all seeds report, and a band; False if there is no such round.

    With `over` it is drawn over the mean of that metric, else over rounds.
    """
    names = [name] if over is None else [name, over]
    series = [[run.series(which) for run in row.runs] for which in names]
    rounds = sorted(set.intersection(*(set(of_run) for of_name in series for of_run in of_name)))
    if not rounds:
        return False
    window = min(window, len(rounds))
    seeds, *others = [np.array([[of_run[r] for r in rounds] for of_run in of_name]) for of_name in series]
    seeds = factor * np.lib.stride_tricks.sliding_window_view(seeds, window, axis=1).mean(axis=2)
    x = others[0].mean(axis=0) if others else np.array(rounds[window - 1 :])
    width = 1.6 if line == "-" else 0.9
    if len(x) == 1:  # a single point needs a marker to be seen, and of that of a dashed line only the edge
        style = {**style, "marker": style["marker"] or "o", "markevery": 1}
        style |= {} if line == "-" else {"markerfacecolor": "none", "markersize": 8}
    axes.plot(x, seeds.mean(axis=0), line, linewidth=width, zorder=3, clip_on=False, **style)
    if band and line == "-" and len(seeds) > 1:
        low, high = seeds.min(axis=0), seeds.max(axis=0)
        if len(x) == 1:
            axes.vlines(x, low, high, color=style["color"], alpha=0.3, linewidth=4)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return True
