"""The personal model that a client keeps: Ditto's v_k, from round to round."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from flwr.common import RecordDict
from torch import Tensor

from client_apps import kept

logger = logging.getLogger(__name__)

KEY = "fedconcord.ditto"
"""Name of the record in the state."""


def load(state: RecordDict, like: Mapping[str, Tensor], cid: int) -> list[Tensor] | None:
    """Read a client's personal model; as `kept.load`, and None, too, where it has diverged."""
    tensors = kept.load(state, KEY, like, cid, what="personal model", remedy="client.ditto_lambda=null")
    if tensors is not None and not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        logger.warning("client %d: its personal model has diverged; it begins anew from the global one", cid)
        return None
    return tensors
