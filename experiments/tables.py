"""The tables of a report: which columns there are, what their cells say, and how a terminal shows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strategies.options import is_real

from .comparison import Against, Comparison
from .headline import Headline
from .runs import Group, Row


@dataclass(frozen=True)
class Column:
    """One measure of the runs.

    Attributes
    ----------
    name : str
        In `Row.values`.
    title : str
        With its line breaks.
    best : callable or None
        Returns the best of several values; None where that cannot be said.
    spread : bool
        Whether cells show the standard deviation over seeds.
    factor : float
        From what the runs record to the unit shown.
    digits : int
        Decimals shown.
    optional : bool
        Whether the column is left out where no run has a value.
    """

    name: str
    title: str
    best: Callable[[Sequence[float]], float] | None = None
    spread: bool = True
    factor: float = 100.0
    digits: int = 1
    optional: bool = True


class Cell(NamedTuple):
    """What stands in a cell, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table as text: the first cell of each row is a strategy's name."""

    heading: str
    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str


_COUNTS = {"failed_round": "failed\nrounds", "clients_rejected": "rejected\nclients"}
_MISSING = "–"


def main_columns(headline: Headline) -> list[Column]:
    """Return the columns of the first table."""
    title = headline.title
    return [
        Column(headline.name, title, max, optional=False),
        # small where all do badly, so no best
        Column(f"{headline.name}_std", f"std over\n{headline.client}s", spread=False, optional=False),
        Column("worst10", "worst\n10 %", max, optional=False),
        Column("best10", "best\n10 %", max, spread=False, optional=False),
        Column(headline.benign, f"benign\n{title}", max),
        Column("benign_worst10", "benign\nworst 10 %", max),
        Column("estimation_error", "estimation\nerror", min, factor=1, digits=2),
        Column("benign_estimation_error", "benign\nestimation\nerror", min, factor=1, digits=2),
        Column("macro_f1", "macro\nF1", max),
        Column(headline.personal, f"personal\n{title}", max),
        Column(headline.benign_personal, f"benign\npersonal\n{title}", max),
        Column(f"{headline.personal}_std", "personal\nstd", spread=False),
        Column("personal_worst10", "personal\nworst 10 %", max),
        Column("personal_best10", "personal\nbest 10 %", max, spread=False),
        Column("rounds_to_target", "rounds\nto target", min, spread=False, factor=1, digits=0, optional=False),
        # with the start of the engine, so no best
        Column("seconds", "time (s)", spread=False, factor=1, optional=False),
    ]


# Slow learning makes ζ and its other part small, and a model that hardly moves goes straight: none of these has a best.
STABILITY_COLUMNS = [
    Column("forgetting", "forgetting", min),
    Column("updatable", "updatable"),
    Column("zeta", "ζ"),
    Column("share_fell", "fell\n(%)", min),
    Column("total_variation", "total\nvariation", min),
    Column("udp_loss", "UDP\nloss (%)", min),
    Column("udp_norm", "UDP\nnorm (%)", min),
    Column("straightness", "straight-\nness", factor=1, digits=2),
]
"""The columns of the second table."""

CLASS_COLUMNS = [
    Column("dice_wt", "Dice\nWT", max),
    Column("dice_tc", "Dice\nTC", max),
    Column("dice_et", "Dice\nET", max),
    Column("hd95_wt", "HD95\nWT", min, factor=1),
    Column("hd95_tc", "HD95\nTC", min, factor=1),
    Column("hd95_et", "HD95\nET", min, factor=1),
    Column("hd95", "HD95\nmean", min, factor=1),
]
"""The columns of the third table, of segmentation only."""


def all_columns(headline: Headline) -> list[Column]:
    """Return the columns of all tables."""
    return [*main_columns(headline), *STABILITY_COLUMNS, *CLASS_COLUMNS]


def counts(row: Row) -> dict[str, int]:
    """Return what a row counts over all rounds and seeds, by the title of its column."""
    return {title: row.counted(name) for name, title in _COUNTS.items()}


def without_row(group: Group, against: Against) -> list[str]:
    """Return the strategies that failed and have no row of that very name."""
    return sorted(against.failed.keys() - {row.label for row in group.rows})


def sheets(group: Group, against: Against | None, apart: bool = False) -> list[Sheet]:
    """Return the tables of a setting; the comparison joins the first, or with `apart` follows it."""
    first = _main(group)
    found = [first]
    if against is not None:
        compared = _comparison(group, against)
        found = [first, compared] if apart else [_beside(first, compared)]
    stability = _sheet(group, "Forgetting and stability", STABILITY_COLUMNS, _stability_caption(group))
    classes = _sheet(group, "Per class", CLASS_COLUMNS, _CLASS_CAPTION)
    return found + [sheet for sheet in (stability, classes) if len(sheet.titles) > 1]


def _main(group: Group) -> Sheet:
    headline = group.headline
    caption = (
        f"{headline.meaning} at the last evaluation, every {headline.client} counting equally; "
        "± is the sample standard deviation over seeds, (n/m) a value that only n of m seeds have. "
        f"Target: {100 * group.target:.1f} % ({group.target_source}), counted to the first evaluation to reach it."
    )
    if any(row.values["macro_f1"] for row in group.rows):
        caption += " Macro F1 is that of all test samples together."
    if any(row.values[headline.benign] for row in group.rows):
        caption += f" Benign: over the {headline.client}s that are not contaminated alone."
    if any(row.values["estimation_error"] for row in group.rows):
        caption += f" Estimation error: the squared distance from the true matrix, mean over {headline.client}s."
    sheet = _sheet(group, "", main_columns(headline), caption)
    titles, rows = [sheet.titles[0], "seeds", *sheet.titles[1:]], []
    counted = [title for title in _COUNTS.values() if any(counts(row)[title] for row in group.rows)]
    for row, cells in zip(group.rows, sheet.rows, strict=True):
        rows.append([cells[0], Cell(str(len(row.runs))), *cells[1:], *(Cell(str(counts(row)[t])) for t in counted)])
    return replace(sheet, titles=[*titles, *counted], rows=rows)


def _sheet(group: Group, heading: str, columns: Sequence[Column], caption: str) -> Sheet:
    """Return a table of these columns, but for the optional ones without a value."""
    titles, cells = ["strategy"], [[Cell(row.label) for row in group.rows]]
    for column in columns:
        if column.optional and not any(row.values[column.name] for row in group.rows):
            continue
        texts = [_cell(column, row) for row in group.rows]
        means = [mean for _, mean in texts if mean is not None]
        best = column.best(means) if column.best and len(set(means)) > 1 else None
        titles.append(column.title)
        cells.append([Cell(text, mean is not None and mean == best) for text, mean in texts])
    return Sheet(heading, titles, [list(row) for row in zip(*cells, strict=True)], caption)


def _cell(column: Column, row: Row) -> tuple[str, float | None]:
    """Return a cell's text and, if every seed has a value, their mean as rounded there."""
    values = [column.factor * value for value in row.values[column.name]]
    if not values:
        return _MISSING, None
    mean = f"{fmean(values):.{column.digits}f}"
    spread = f" ± {stdev(values):.{column.digits}f}" if column.spread and len(values) > 1 else ""
    if len(values) < len(row.runs):
        return f"{mean}{spread} ({len(values)}/{len(row.runs)})", None
    return mean + spread, float(mean)


def _comparison(group: Group, against: Against) -> Sheet:
    titles = ["strategy", f"gain of\n{against.name} (%)", "p\n(Holm)", "n"]
    names = [row.label for row in group.rows] + (without_row(group, against) if against.failed else [])
    rows = []
    for name in names:
        found = against.comparisons.get(name, Comparison())
        p_value = found.p_holm
        cells = [
            name,
            _MISSING if found.gain is None else f"{100 * found.gain:+.1f}",
            _MISSING if p_value is None else f"{p_value:.3f}" if p_value >= 0.0005 else "< 0.001",
            _MISSING if found.pairs is None else str(found.pairs),
        ]
        if against.failed:
            cells.append(", ".join(map(str, against.failed.get(name, ()))) or _MISSING)
        rows.append([Cell(text) for text in cells])
    return Sheet("", titles + (["failed\nseeds"] if against.failed else []), rows, against.caption)


def _beside(left: Sheet, right: Sheet) -> Sheet:
    """Put two tables side by side; a row that the left one lacks has no seeds there and no values."""
    known = {cells[0].text: cells for cells in left.rows}
    dashes = [Cell("0"), *[Cell(_MISSING)] * (len(left.titles) - 2)]
    rows = [[*known.get(cells[0].text, [cells[0], *dashes]), *cells[1:]] for cells in right.rows]
    return Sheet(left.heading, [*left.titles, *right.titles[1:]], rows, f"{left.caption} {right.caption}")


def _stability_caption(group: Group) -> str:
    title = group.headline.title
    return (
        f"Of the global model, from the start to the last evaluation. With ψ the {title} of an evaluated round less "
        "that of the last one, forgetting is the sum of the positive ψ, updatable that of the others, and ζ that of "
        "all: slow early learning lowers ζ, so its positive part is shown alone. Total variation is the sum of all "
        f"rises and falls. These four are in percentage points of the {title}, summed over the evaluated rounds, round "
        "0 (the untrained model) included where it was evaluated: runs with another number of evaluations are not "
        "comparable. Fell: evaluated rounds below the one before. UDP: rounds whose training loss rose by more than δ "
        f"over the one before (loss, {_delta(group, 'udp_loss_delta')}), failed rounds left out, or that moved the "
        "model by more than δ (norm, "
        f"{_delta(group, 'udp_norm_delta')}). Straightness: the distance from the first model to the last over the "
        "length of the path, 1 if that is straight."
    )


def _delta(group: Group, key: str) -> str:
    """Return the δ that the runs share, in words."""
    tracking = [run.config.get("tracking") for row in group.rows for run in row.runs]
    found = {of_run.get(key) for of_run in tracking if isinstance(of_run, Mapping)} - {None}
    value = found.pop() if len(found) == 1 else None
    return f"δ = {value:g}" if is_real(value) else "δ as configured"


_CLASS_CAPTION = (
    "Dice in % and the 95 % Hausdorff distance (HD95) in mm, where lower is better, of whole tumour (WT), tumour core "
    "(TC) and enhancing tumour (ET) at the last evaluation, every subject counting equally. A class missed, or found "
    "where there is none, has the Dice 0 and the diagonal of the volume as its distance."
)


def show(console: Console, group: Group, against: Against | None) -> None:
    """Print the tables of a setting; what is too wide for the terminal goes on in a further table."""
    narrow = console.width < 100
    for index, sheet in enumerate(sheets(group, against, apart=narrow)):
        title = Text(sheet.heading, "bold") if index else Text.assemble((group.title, "bold"), "\n", group.facts)
        for table in _rich_tables(console, title, sheet, narrow):
            console.print(table)
        console.print(Text(sheet.caption, "dim italic"), end="\n\n")


def _rich_tables(console: Console, title: Text, sheet: Sheet, narrow: bool) -> list[Table]:
    everything = list(range(1, len(sheet.titles)))
    whole = _rich_table(title, sheet, everything, narrow, broken=False)
    if _width(console, whole) <= console.width:
        return [whole]

    def fit(columns: Sequence[int]) -> bool:
        return _width(console, _rich_table(Text(), sheet, columns, narrow, broken=True)) <= console.width

    parts: list[list[int]] = [[]]
    for column in everything:
        if parts[-1] and not fit([*parts[-1], column]):
            parts.append([])
        parts[-1].append(column)
    size = -(-len(everything) // len(parts))  # no last table of one column, if they can be shared out
    even = [everything[start : start + size] for start in range(0, len(everything), size)]
    if all(map(fit, even)):
        parts = even
    titles = [title, *[Text()] * (len(parts) - 1)]
    return [_rich_table(t, sheet, part, narrow, broken=True) for t, part in zip(titles, parts, strict=True)]


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _rich_table(title: Text, sheet: Sheet, columns: Sequence[int], narrow: bool, broken: bool) -> Table:
    """Lay out some columns beside the strategies' names; `broken` cells have spread and count on lines of their own."""
    table = Table(title=title or None, title_justify="left")
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column(sheet.titles[0], no_wrap=True)
    for column in columns:
        table.add_column(sheet.titles[column], justify="right")
    for cells in sheet.rows:
        label = cells[0].text
        # in a narrow terminal each setting of a label goes on a line of its own, and long names are broken
        name = re.sub(r"\b(?=\w{19})(\w{9,17}_)", r"\1\n  ", label.replace(" ", "\n  ")) if narrow else label
        texts = [
            (re.sub(r" (?=[±(])", "\n", cells[column].text) if broken else cells[column].text, cells[column].best)
            for column in columns
        ]
        table.add_row(Text(name), *(Text(text, style="bold" if best else "") for text, best in texts))
    return table
