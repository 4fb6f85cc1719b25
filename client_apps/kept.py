"""Models that a client keeps in Flower's client state from round to round: as `.npy` arrays, never pickled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from flwr.common import Array, ArrayRecord, RecordDict
from torch import Tensor

from client_apps.errors import ConfigError
from client_apps.wire import decode, encode

_NUMPY = "numpy.ndarray"


def load(
    state: RecordDict, key: str, like: Mapping[str, Tensor], cid: int, *, what: str, remedy: str
) -> list[Tensor] | None:
    """Read a model that a client keeps.

    Parameters
    ----------
    state : RecordDict
        The client's state; not changed.
    key : str
        Name of the record in the state.
    like : Mapping[str, Tensor]
        State_dict of the model configured, whose names, shapes and dtypes are expected.
    cid : int
        The client, for the message.
    what, remedy : str
        What the model is, such as "personal model", and which setting does without it, for the message.

    Returns
    -------
    list of Tensor, or None
        Copies on the CPU in the order of `like`; None where the client keeps none yet.

    Raises
    ------
    ConfigError
        What is kept is no such model.
    """
    if key not in state:
        return None
    try:
        return _read(state[key], like)
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".").replace("; ", ", ")
        raise ConfigError(
            f"The {what} kept by client {cid} under {key} cannot be used ({reason}); "
            f"start a new run, whose clients begin without one, or set {remedy}."
        ) from error


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


def record(names: Iterable[str], tensors: Sequence[Tensor], received: Sequence[bytes] | None = None) -> ArrayRecord:
    """Make the record that `load` reads, of copies, so that what was kept before stays as it was.

    Parameters
    ----------
    names : iterable of str
    tensors : sequence of Tensor
        On any device.
    received : sequence of bytes, optional
        The same tensors as they came, which are kept themselves where they are what would be written: all clients of
        a process then share one copy.
    """
    data = [encode(tensor.detach().cpu().contiguous().numpy()) for tensor in tensors]
    if received is not None:
        data = [theirs if theirs == ours else ours for ours, theirs in zip(data, received, strict=True)]
    arrays = {}
    for name, tensor, each in zip(names, tensors, data, strict=True):
        arrays[name] = Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _NUMPY, each)
    return ArrayRecord(arrays)
