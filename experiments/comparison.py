"""One strategy held against the others of its setting: gain, significance over seeds, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from .runs import Failure, Group, Row

# Differences in the metric that are equal but for rounding: a test would take them for certainty.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Comparison:
    """What the reference has over one row; None where it cannot be said.

    ``gain`` is the reference's mean of the metric over the row's, less 1; ``p_value`` that of a two-sided t-test of its
    values paired by seed, ``p_holm`` the same corrected by Holm's method over the comparisons of the setting, and
    ``pairs`` the number of seeds both have.
    """

    gain: float | None = None
    p_value: float | None = None
    p_holm: float | None = None
    pairs: int | None = None


@dataclass(frozen=True)
class Against:
    """The comparisons of one setting by the rows' labels, and the seeds that failed by strategy.

    ``metric`` is what they compare, in words.
    """

    name: str
    metric: str
    reference: str | None
    comparisons: Mapping[str, Comparison]
    failed: Mapping[str, Sequence[Any]]

    @property
    def caption(self) -> str:
        """What the columns mean, and what is missing."""
        if self.reference is None:
            return f"No finished run of {self.name} to compare with."
        return (
            f"Gain: mean {self.metric} of {self.reference} over the row's, less 1. p: two-sided "
            "t-test of it paired by seed (n pairs), corrected by Holm's method over the rows that have one."
        )


def compare(group: Group, name: str, failures: Sequence[Failure]) -> Against:
    """Hold the strategy `name`, at its best settings where it has several, against the other rows of a group.

    Where all rows have personal models, those are compared, else the global ones; where there are contaminated clients,
    those of the others.
    """
    headline = group.headline
    possible = (headline.benign_personal, headline.personal, headline.benign, headline.name)
    metric = next(name for name in possible if all(row.values[name] for row in group.rows))
    row = next((row for row in group.rows if row.runs[0].strategy[0] == name), None)  # rows are sorted, best first
    comparisons = {} if row is None else {o.label: _compare(row, o, metric) for o in group.rows if o is not row}
    tested = {label: found.p_value for label, found in comparisons.items() if found.p_value is not None}
    for label, adjusted in holm(tested).items():
        found = comparisons[label]
        comparisons[label] = Comparison(found.gain, found.p_value, adjusted, found.pairs)
    failed: dict[str, list[Any]] = {}
    for failure in failures:
        if failure.setting == group.rows[0].runs[0].setting:
            failed.setdefault(failure.name, []).append(failure.config.get("seed"))
    words = "".join(f"{word} " for word in ("benign", "personal") if word in metric.split("_")) + headline.title
    return Against(name, words, row.label if row else None, comparisons, failed)


def _compare(reference: Row, other: Row, metric: str) -> Comparison:
    ours, theirs = ({run.config["seed"]: run.result(metric) or 0.0 for run in row.runs} for row in (reference, other))
    mean = fmean(theirs.values())
    gain = fmean(ours.values()) / mean - 1 if mean else None
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = np.array([[ours[seed], theirs[seed]] for seed in seeds]).reshape(-1, 2)
    if len(seeds) < 2 or np.ptp(pairs[:, 0] - pairs[:, 1]) <= _EQUAL:
        return Comparison(gain, pairs=len(seeds))
    return Comparison(gain, float(ttest_rel(pairs[:, 0], pairs[:, 1]).pvalue), pairs=len(seeds))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number: Holm, Scandinavian Journal of Statistics 6 (1979), 65-70."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, label in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[label]))
        corrected[label] = largest
    return corrected
