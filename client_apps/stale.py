"""Stale answers, for drift studies: now and then a client sends the global model of the last time it was sampled.

The stale update attack of FedRef's experiments (Yoon et al., arXiv 2506.23210). It is simulated: the client trains all
the same, and only the arrays of its answer are others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.common import RecordDict
from torch import Tensor

from client_apps import kept

KEY = "fedconcord.stale"
"""Name of the record in the state."""

METRIC = "stale"
"""Name under which a client reports whether its answer is stale, 1 or 0."""

# Sets this stream apart from those of training, which a task tells apart by small numbers.
_STREAM = 0x57A1E


def drawn(probability: float | None, seed: int, cid: int, server_round: int) -> bool:
    """Draw whether a client's answer is to be stale, from (seed, cid, server_round) alone.

    Whoever is stale with one probability is with any larger one: runs that differ in it only have most in common.
    """
    if not probability:  # a generator takes as long as a small step
        return False
    return bool(np.random.default_rng([seed, cid, server_round, _STREAM]).random() < probability)


def load(state: RecordDict, like: Mapping[str, Tensor], cid: int) -> list[Tensor] | None:
    """Read the global model of the last time, as `kept.load`."""
    return kept.load(state, KEY, like, cid, what="stale model", remedy="client.stale_update=null")
