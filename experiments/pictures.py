"""Pictures of segmentation: test subjects' slices, what is true, and what the model of each strategy makes of them."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from client_apps.tasks.base import Example

from .examples import FILE, load_examples
from .runs import Group, Run

_CLASSES = ("WT", "TC", "ET")
_NAMES = ("WT: whole tumour", "TC: tumour core", "ET: enhancing tumour")
# Of Okabe and Ito's palette: apart for the colour-blind, and apart from a grey image.
_COLOURS = ("#56B4E9", "#F0E442", "#D55E00")
_FILL = 0.3
_WIDTHS = (1.2, 2.4, 1.0)  # of the outlines: where core and enhancing tumour share one, both are seen
# More would be too small to see.
_SUBJECTS = 4
_STRATEGIES = 6
_MARGIN = 4  # pixels around the brain

Key = tuple[str, str, int]


@dataclass(frozen=True)
class Gallery:
    """The examples of one setting, from runs with the same seed, so with the same test subjects.

    ``predictions`` are by strategy, best first, then by subject, modality and plane, as are ``examples``: of the best
    strategy, for image and truth. ``hidden`` is how many strategies more there are.
    """

    title: str
    seed: Any
    examples: dict[Key, Example]
    predictions: dict[str, dict[Key, Example]]
    hidden: int


def gather(group: Group, left_out: list[str]) -> Gallery | None:
    """Collect the examples of a setting's strategies; a sentence for each file that cannot be read joins `left_out`.

    Of the seeds the one with the examples of the most strategies is taken, of equals the one that the best strategy
    has, the lowest. None if there is nothing to show.
    """
    of_label: dict[str, dict[Any, Run]] = {}
    for row in group.rows:
        runs = {run.config["seed"]: run for run in row.runs if (run.path / FILE).is_file()}
        if runs:
            of_label[row.label] = runs
    seeds = Counter(seed for runs in of_label.values() for seed in sorted(runs))
    if not seeds:
        return None
    seed = max(seeds, key=seeds.__getitem__)
    found: dict[str, dict[Key, Example]] = {}
    hidden = 0
    for label, runs in of_label.items():
        if seed not in runs:
            continue
        if len(found) == _STRATEGIES:
            hidden += 1
            continue
        try:
            examples = load_examples(runs[seed].path / FILE)
        except (OSError, ValueError) as error:
            left_out.append(str(error))
            continue
        if examples:
            found[label] = {(e.subject, e.modality, e.plane): e for e in examples}
    if not found:
        return None
    first = next(iter(found.values()))
    return Gallery(group.title, seed, dict(list(first.items())[:_SUBJECTS]), found, hidden)


def draw_pictures(galleries: Sequence[Gallery]) -> bytes:
    """Draw a line per subject and a column per strategy, one setting below the other, and return the PNG."""
    png = io.BytesIO()
    figure_of(galleries).savefig(png, format="png", dpi=150)
    return png.getvalue()


@matplotlib.rc_context({"text.parse_math": False})  # names are anybody's, and a $ among them no formula
def figure_of(galleries: Sequence[Gallery]) -> Figure:
    """Draw the galleries; in each the image, the truth, then the strategies."""
    columns = 2 + max(len(gallery.predictions) for gallery in galleries)
    heights = [*(0.7 + 2.1 * len(gallery.examples) for gallery in galleries), 0.6]
    figure = Figure(figsize=(0.4 + 1.75 * columns, sum(heights)), layout="constrained")
    *parts, foot = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    for gallery, part in zip(galleries, parts, strict=True):
        _gallery(part, gallery, columns)
    key = [Patch(facecolor=(*to_rgb(c), _FILL), edgecolor=c, linewidth=1.5) for c in _COLOURS]
    legend = foot.legend(
        key,
        _NAMES,
        loc="center",
        ncols=3,
        frameon=False,
        fontsize=9,
        title="Below each prediction: Dice of the slice in %, the mean and each class",
    )
    legend.get_title().set(fontsize=8)
    return figure


def _gallery(part: SubFigure, gallery: Gallery, columns: int) -> None:
    shown = f"seed {gallery.seed}"
    if gallery.hidden:
        shown += f", the best {len(gallery.predictions)} of {len(gallery.predictions) + gallery.hidden} strategies"
    title = textwrap.fill(f"{gallery.title}; {shown}", 14 * columns)
    part.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10)
    panels = part.subplots(len(gallery.examples), columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[], anchor="N")
        axes.spines[:].set_visible(False)
    for line, (key, example) in zip(panels, gallery.examples.items(), strict=True):
        window = _window(example)
        _show(line[0], example, None, window)
        line[0].set_ylabel(f"{example.subject}\ninstitution {example.client}, plane {example.plane}", fontsize=8)
        _show(line[1], example, example.truth, window)
        for axes in line:
            axes.set_xlabel("\n", fontsize=8)  # the same height everywhere
        for axes, of_strategy in zip(line[2:], gallery.predictions.values(), strict=False):
            other = of_strategy.get(key)
            if other is None or other.prediction.shape != example.truth.shape:
                axes.text(0.5, 0.5, "no example", transform=axes.transAxes, ha="center", color="0.5", fontsize=8)
                continue
            _show(axes, example, other.prediction, window)
            dice = [100 * _dice(*masks) for masks in zip(other.prediction, example.truth, strict=True)]
            classes = "  ".join(f"{name} {value:.0f}" for name, value in zip(_CLASSES, dice, strict=True))
            axes.set_xlabel(f"Dice {np.mean(dice):.1f}\n{classes}", fontsize=8)
    modality = next(iter(gallery.examples.values())).modality
    titles = [f"image ({modality})", "truth", *gallery.predictions]
    for axes, title in zip(panels[0], titles, strict=False):
        axes.set_title("\n".join(textwrap.wrap(title, 18)), fontsize=9)


def _window(example: Example) -> tuple[slice, slice]:
    """Return the rows and columns of the square around what is not background."""
    inside = (example.image > example.image.min()) | example.truth.any(axis=0) | example.prediction.any(axis=0)
    if not inside.any():
        return slice(None), slice(None)
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    side = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 + 2 * _MARGIN
    starts = (max(0, (places[0] + places[-1] + 1 - side) // 2) for places in (rows, columns))
    down, right = (slice(start, start + side) for start in starts)
    return down, right


def _show(axes: Axes, example: Example, masks: NDArray[np.bool_] | None, window: tuple[slice, slice]) -> None:
    """Show the image and on it, in each pixel, the innermost class; every class has an outline."""
    image = example.image[window]
    inside = example.image[example.image > example.image.min()]
    top = float(np.percentile(inside, 99.5)) if inside.size else None
    axes.imshow(image, cmap="gray", vmin=float(example.image.min()), vmax=top, interpolation="nearest")
    if masks is None:
        return
    overlay = np.zeros((*image.shape, 4))
    for colour, mask in zip(_COLOURS, masks, strict=True):
        overlay[mask[window]] = (*to_rgb(colour), _FILL)
    axes.imshow(overlay, interpolation="nearest")
    for colour, width, mask in zip(_COLOURS, _WIDTHS, masks, strict=True):
        # an outline runs between inside and outside, so a frame of outside closes those at the edge
        padded = np.pad(mask[window], 1).astype(float)
        if padded.any():
            down, right = (np.arange(size) - 1 for size in padded.shape)
            axes.contour(right, down, padded, levels=[0.5], colors=[colour], linewidths=width)


def _dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Return the Dice coefficient of two masks, 1 where both are empty."""
    total = int(one.sum()) + int(other.sum())
    return 2 * int((one & other).sum()) / total if total else 1.0
