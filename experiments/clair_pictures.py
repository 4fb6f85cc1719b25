"""Pictures of CLAIR: distances of client pairs, and how its errors, gain and cost go over what a study varies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator, ScalarFormatter
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Okabe and Ito's colour-blind safe palette without its yellow, which white swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_OUT = "#D55E00"
_KINDS = {"estimated": (_COLOURS[0], "o"), "true": (_COLOURS[2], "s")}
# With more clients than this, not every one has its name at the axes.
_NAMED = 40


def square(count: int, pairs: ArrayLike, distances: ArrayLike) -> Array:
    """Return distances of pairs as a symmetric matrix.

    Parameters
    ----------
    count : int
        K.
    pairs : (G, 2) integers
    distances : (G,)

    Returns
    -------
    ndarray of float64, (K, K)
        0 on the diagonal, NaN where a pair was not compared.
    """
    found = np.full((count, count), np.nan)
    j, k = np.asarray(pairs).reshape(-1, 2).T
    found[j, k] = found[k, j] = np.asarray(distances)
    np.fill_diagonal(found, 0.0)
    return found


def draw_pairs(distances: ArrayLike, members: ArrayLike, threshold: float, labels: Sequence[str], path: Path) -> None:
    """Draw ‖S_(j,k)(I − P̂)‖_F over client pairs as a heat map, framing clients that were voted out.

    Parameters
    ----------
    distances : (K, K)
        Symmetric; NaN where a pair was not compared.
    members : (K,) bool
        The set found.
    threshold : float
        τ, marked in the colour bar.
    labels : sequence of str
        Of the K clients.
    path : Path
        Of the PNG, replaced in one step.
    """
    _save(_pairs_figure(np.asarray(distances, float), np.asarray(members, bool), threshold, labels), path)


def draw_subspace_error(clients: ArrayLike, lines: Mapping[str, tuple[ArrayLike, ArrayLike]], path: Path) -> None:
    """Draw ‖P̂ − P‖_F over K on log axes, with the theory's K^(−1/2) through each line's first point.

    Parameters
    ----------
    clients : (n,)
        K.
    lines : mapping of str to ((n,), (n,))
        Means and their standard errors; points of mean 0 or NaN are left out.
    path : Path
        Of the PNG, replaced in one step.
    """
    _save(_subspace_figure(np.asarray(clients, float), lines), path)


def draw_gain_cost(levels: ArrayLike, curves: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]], path: Path) -> None:
    """Draw gain and cost of collaboration over heterogeneity, two curves a panel: estimated, then true.

    Parameters
    ----------
    levels : (n,)
        Of heterogeneity.
    curves : mapping of str to ((n,), (n,), (n,))
        Costs, gains, and the share of solves that warned; "PANEL, estimated" and "PANEL, true" share a panel.
    path : Path
        Of the PNG, replaced in one step.
    """
    _save(_gain_cost_figure(np.asarray(levels, float), curves), path)


def draw_lines(
    x: ArrayLike,
    lines: Mapping[str, tuple[ArrayLike, ArrayLike]],
    path: Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log: str = "",
) -> None:
    """Draw means with bars of their standard errors.

    Parameters
    ----------
    x : (n,)
    lines : mapping of str to ((n,), (n,))
        Means and standard errors; NaN is left out.
    path : Path
        Of the PNG, replaced in one step.
    title, xlabel, ylabel : str
    log : str
        Which axes are logarithmic: "", "x", "y" or "xy".
    """
    _save(_lines_figure(np.asarray(x, float), lines, title, xlabel, ylabel, log), path)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(path)


# ---- pairs -----------------------------------------------------------------------------------------------------------


@matplotlib.rc_context({"text.parse_math": False})  # names are anybody's, and a $ among them no formula
def _pairs_figure(distances: Array, members: NDArray[np.bool_], threshold: float, labels: Sequence[str]) -> Figure:
    count = len(distances)
    if distances.shape != (count, count) or members.shape != (count,) or len(labels) != count:
        raise ValueError(
            f"distances of shape {distances.shape}, {len(members)} members and {len(labels)} labels do not fit."
        )
    shown = distances.copy()
    np.fill_diagonal(shown, np.nan)
    figure = Figure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.subplots()
    known = shown[np.isfinite(shown)]
    top = max(float(known.max(initial=0.0)), 1.25 * threshold) or 1.0
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="0.85")
    image = axes.imshow(np.ma.masked_invalid(shown), cmap=colours, vmin=0, vmax=top, interpolation="nearest")
    for k in np.flatnonzero(~members):  # a frame around the row and the column of each client voted out
        for corner, width, height in (((-0.5, k - 0.5), count, 1), ((k - 0.5, -0.5), 1, count)):
            axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=_OUT, linewidth=1.2))
    places = np.arange(0, count, -(-count // _NAMED))
    size = 8 if len(places) <= 24 else 6
    names = [labels[int(k)] for k in places]
    upright = max(map(len, names), default=0) > 2
    axes.set_xticks(places, names, fontsize=size, rotation=90 if upright else 0)
    axes.set_yticks(places, names, fontsize=size)
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        for place, text in zip(places, ticks, strict=True):
            if not members[place]:
                text.set(color=_OUT, weight="bold")
    axes.set(xlabel="client", ylabel="client")
    number = int((~members).sum())
    axes.set_title(f"Sparse part of each pair outside of the subspace, {count} clients", fontsize=10)
    if number:
        key = Rectangle((0, 0), 1, 1, fill=False, edgecolor=_OUT, linewidth=1.5)
        figure.legend([key], [f"voted out: {number} of {count}"], loc="outside lower center", frameon=False, fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label("‖S (I − P̂)‖ of a pair (j, k)")
    bar.ax.axhline(threshold, color=_OUT, linewidth=2)
    bar.ax.text(-0.15, threshold, "τ", color=_OUT, ha="right", va="center", transform=bar.ax.get_yaxis_transform())
    return figure


# ---- subspace error --------------------------------------------------------------------------------------------------


def _subspace_figure(clients: Array, lines: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, line), style in zip(lines.items(), _styles(lines), strict=True):
        mean, spread = (np.asarray(values, float) for values in line)
        fine = (mean > 0) & np.isfinite(mean)
        x, y, bars = clients[fine], mean[fine], np.nan_to_num(spread[fine])
        label = name
        if len(x) > 1:
            slope = float(np.polyfit(np.log(x), np.log(y), 1)[0])
            label += f": fitted slope {slope:.2f}".replace("-", "−")
        axes.errorbar(x, y, bars, label=label, capsize=2, zorder=3, **style)
        if len(x):
            theory = y[0] * np.sqrt(x[0] / clients)
            axes.plot(clients, theory, ":", color=style["color"], linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="clients K", ylabel="subspace error ‖P̂ − P‖")
    axes.set_title("Subspace error, a fifth of the clients contaminated", fontsize=10)
    _plain(axes.xaxis, clients)
    _decades(axes.yaxis)
    _grid(axes)
    handles, labels = axes.get_legend_handles_labels()
    theory = Line2D([], [], color="0.3", linestyle=":", linewidth=1.2)
    axes.legend([*handles, theory], [*labels, "slope −1/2 from the first point"], frameon=False, fontsize=8)
    return figure


# ---- gain and cost -------------------------------------------------------------------------------------------------


def _gain_cost_figure(levels: Array, curves: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]]) -> Figure:
    names = list(dict.fromkeys(name.rpartition(", ")[0] for name in curves))
    figure = Figure(figsize=(1 + 4.2 * len(names), 4.8), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharex=True, sharey=True)[0]
    seen, heights = [0.1, 1.0], [0.5, 1.0]
    for axes, panel in zip(panels, names, strict=True):
        kinds = {kind: [np.asarray(values, float) for values in curves[f"{panel}, {kind}"]] for kind in _KINDS}
        for kind, (colour, marker) in _KINDS.items():
            costs, gains, warned = kinds[kind]
            fine = (costs > 0) & (gains > 0)  # not NaN, and without members there is neither
            axes.plot(costs[fine], gains[fine], "-", marker=marker, color=colour, markersize=5, linewidth=1.4, zorder=3)
            seen += [*costs[fine], *gains[fine]]
            heights += [*gains[fine]]
            other = kinds["true" if kind == "estimated" else "estimated"][1]
            for index in np.flatnonzero(fine):  # the upper of two points has its number above
                place = (0, 8) if not gains[index] < other[index] else (0, -14)
                axes.annotate(f"{levels[index]:g}", (costs[index], gains[index]), place, textcoords="offset points",
                              ha="center", fontsize=7, color=colour, zorder=5,
                              path_effects=[withStroke(linewidth=2, foreground="white")])  # fmt: skip
            if kind == "estimated":
                warns = fine & (warned >= 0.5)
                axes.plot(costs[warns], gains[warns], "o", markersize=11, color=_OUT, fillstyle="none", zorder=4)
        axes.set_title(panel, fontsize=10)
        axes.set(xscale="log", yscale="log", xlabel="cost of collaboration")
        _grid(axes)
    low, high = 0.7 * min(seen), 1.4 * max(seen)
    panels[0].set(xlim=(low, high), ylim=(0.5 * min(heights), 1.8 * max(heights)), ylabel="gain of collaboration")
    for axes in panels:
        axes.plot([low, high], [low, high], ":", color="0.3", linewidth=1.2)
        axes.fill_between([low, high], [low, high], low, color="0.95", zorder=0)
        _decades(axes.yaxis)
        _decades(axes.xaxis)
    key = [
        Line2D([], [], color=_COLOURS[0], marker="o", markersize=5),
        Line2D([], [], color=_COLOURS[2], marker="s", markersize=5),
        Line2D([], [], color=_OUT, marker="o", markersize=11, fillstyle="none", linestyle=""),
        Line2D([], [], color="0.3", linestyle=":"),
    ]
    titles = ["estimated by the solve", "true", "most solves warn", "gain = cost; below it collaboration harms"]
    figure.legend(key, titles, loc="outside lower center", ncols=min(4, 2 * len(names)), frameon=False, fontsize=9,
                  title="numbers: heterogeneity", title_fontsize=8)  # fmt: skip
    return figure


# ---- anything else -----------------------------------------------------------------------------------------------


def _lines_figure(
    x: Array, lines: Mapping[str, tuple[ArrayLike, ArrayLike]], title: str, xlabel: str, ylabel: str, log: str
) -> Figure:
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    axes = figure.subplots()
    for (name, line), style in zip(lines.items(), _styles(lines), strict=True):
        mean, spread = (np.asarray(values, float) for values in line)
        axes.errorbar(x, mean, np.nan_to_num(spread), label=name, capsize=2, zorder=3, clip_on=False, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, fontsize=10)
    if "x" in log:
        axes.set_xscale("log")
        _plain(axes.xaxis, x)
    if "y" in log:
        axes.set_yscale("log")
        _decades(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    _grid(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


# ---- common ----------------------------------------------------------------------------------------------------------


def _styles(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a style for each line; later ones are smaller, so that one upon another hides none."""
    return [
        {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": max(3.5, 7.5 - 0.7 * i),
            "linewidth": max(1.0, 2.2 - 0.2 * i),
        }
        for i in range(len(names))
    ]


def _grid(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _plain(axis: Any, places: Array) -> None:
    """Put the places themselves at a logarithmic axis."""
    axis.set_major_locator(FixedLocator(places.tolist()))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(ScalarFormatter())


def _decades(axis: Any) -> None:
    """Plain numbers at a logarithmic axis, 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
