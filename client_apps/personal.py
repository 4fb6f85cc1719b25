"""The personal model that a client keeps in Flower's client state: Ditto's v_k, from round to round."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from flwr.common import Array, ArrayRecord, RecordDict
from torch import Tensor

from client_apps.errors import ConfigError
from client_apps.wire import decode, encode

logger = logging.getLogger(__name__)

KEY = "fedconcord.ditto"
"""Name of the record in the state."""

_NUMPY = "numpy.ndarray"


def load(state: RecordDict, like: Mapping[str, Tensor], cid: int) -> list[Tensor] | None:
    """Read a client's personal model.

    Parameters
    ----------
    state : RecordDict
        The client's state; not changed.
    like : Mapping[str, Tensor]
        State_dict of the model configured, whose names, shapes and dtypes are expected.
    cid : int
        The client, for the message.

    Returns
    -------
    list of Tensor, or None
        Copies on the CPU in the order of `like`; None where the client has not trained one yet, or only one that
        has diverged.

    Raises
    ------
    ConfigError
        What is kept is no such model.
    """
    if KEY not in state:
        return None
    try:
        tensors = _read(state[KEY], like)
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".").replace("; ", ", ")
        raise ConfigError(
            f"The personal model kept by client {cid} under {KEY} cannot be used ({reason}); "
            "start a new run, whose clients begin without one, or set client.ditto_lambda=null."
        ) from error
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        logger.warning("client %d: its personal model has diverged; it begins anew from the global one", cid)
        return None
    return tensors


def _read(record: object, like: Mapping[str, Tensor]) -> list[Tensor]:
    if not isinstance(record, ArrayRecord):
        raise TypeError(f"it is a {type(record).__name__}, not an ArrayRecord")
    if record.keys() != like.keys():
        unlike = sorted(record.keys() ^ like.keys())
        raise ValueError(f"its tensors are not the configured model's: {unlike[0]} is in one of them only")
    tensors = []
    for name, expected in like.items():
        array = record[name]
        if array.stype != _NUMPY:
            raise ValueError(f"{name} is serialized as {array.stype!r}, not {_NUMPY!r}")
        tensor = torch.tensor(decode(array.data))  # a copy: read-only bytes cannot be shared with torch
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(
                f"{name} is of shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"and the configured model's of {tuple(expected.shape)} and {expected.dtype}"
            )
        tensors.append(tensor)
    return tensors


def record(names: Iterable[str], tensors: Sequence[Tensor]) -> ArrayRecord:
    """Make the record that `load` reads, of copies, so that what was kept before stays as it was."""
    arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]
    return ArrayRecord(
        {name: Array(str(a.dtype), a.shape, _NUMPY, encode(a)) for name, a in zip(names, arrays, strict=True)}
    )
