"""Which clients agreed in a run's last vote, read back from its records, for the report's picture of pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runs import Group

# As `strategies.CLAIR` reports them.
_TABLE, _MARGINS = "pair_distances", "vote_margins"
# Clients of a table; more are no run's.
_MOST = 200


@dataclass(frozen=True)
class Vote:
    """A vote of K clients.

    Attributes
    ----------
    distances : ndarray of float64, (K, K)
        Relative to the threshold from which two clients disagree.
    members : ndarray of bool, (K,)
        Who was not voted out.
    labels : list of str
        The clients.
    """

    distances: NDArray[np.float64]
    members: NDArray[np.bool_]
    labels: list[str]


def last_vote(groups: Sequence[Group], left_out: list[str]) -> Vote | None:
    """Return the last vote of the first run that has one; a sentence for each that cannot be read joins `left_out`."""
    for group in groups:
        for row in group.rows:
            for run in sorted(row.runs, key=lambda run: str(run.path)):
                rounds = [each for each in run.rounds if each.get(_TABLE) is not None]
                if not rounds:
                    continue
                try:
                    return _read(rounds[-1])
                except (TypeError, ValueError, RecursionError) as error:
                    left_out.append(f"the vote of {run.path} cannot be read: {' '.join(str(error).split())}")
    return None


def _read(record: Mapping[str, Any]) -> Vote:
    table, margins = (json.loads(str(record.get(key))) for key in (_TABLE, _MARGINS))
    distances = np.array(table, dtype=np.float64)
    if not isinstance(margins, dict) or len(margins) > _MOST or distances.shape != (len(margins), len(margins)):
        raise ValueError(f"{_TABLE} and {_MARGINS} do not fit each other")
    if not np.isfinite(distances).all():
        raise ValueError(f"{_TABLE} holds numbers that are not finite")
    members = np.array([float(margin) >= 0 for margin in margins.values()])
    labels = [name.removeprefix("partition ")[:20] for name in margins]
    return Vote(distances, members, labels)
