"""Wire: record dicts as plain values and buffers, so that arrays cross process boundaries without being pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common import FitIns, FitRes, Parameters

from . import internals
from .internals import Buffer, SharedArray

PackedArray = tuple[str, str, tuple[int, ...], str, Buffer]
"""(name, dtype, shape, serialization type, serialized array as uint8)"""
StoredArray = tuple[str, str, tuple[int, ...], str, bytes]
"""The same with bytes that many messages share."""
PackedRecord = tuple[str, str, Any]
"""(name, kind, payload): kind "a" with a list of `PackedArray`, "m" or "c" with a dict, "r" with a content's number."""


class SharedBytes(np.ndarray):
    """A one-dimensional uint8 array in shared memory.

    `lease` lives as long as a view of it made by slicing or `numpy.frombuffer` does.
    """

    lease: object = None


def pack_arrays(record: ArrayRecord) -> list[PackedArray]:
    """Take an array record apart; the bytes are not copied."""
    return [(key, a.dtype, a.shape, a.stype, view(a)) for key, a in record.items()]


def view(array: Array) -> Buffer:
    """View an array's serialized form as uint8, without a copy."""
    found = source(array)
    return found if isinstance(found, np.ndarray) else np.frombuffer(found, np.uint8)


def source(array: Array) -> bytes | Buffer:
    """Return what holds an array's serialized form."""
    return array.buffer if isinstance(array, SharedArray) else array.data


def pack(content: RecordDict) -> list[PackedRecord]:
    """Take a record dict apart; array bytes are not copied."""
    packed: list[PackedRecord] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            packed.append((name, "a", pack_arrays(record)))
        else:
            packed.append((name, "m" if isinstance(record, MetricRecord) else "c", internals.plain(record)))
    return packed


def pack_fit(result: FitRes) -> list[PackedRecord]:
    """Take a fit result apart, as if Flower had made a record dict of it before."""
    parameters = result.parameters
    arrays = [
        (str(i), "", (), parameters.tensor_type, np.frombuffer(data, np.uint8))
        for i, data in enumerate(parameters.tensors)
    ]
    status = {"code": result.status.code.value, "message": result.status.message}
    return [
        ("fitres.metrics", "c", result.metrics),
        ("fitres.num_examples", "m", {"num_examples": result.num_examples}),
        ("fitres.parameters", "a", arrays),
        ("fitres.status", "c", status),
    ]


def unpack_fit(
    packed: Sequence[PackedRecord], contents: Mapping[int, Sequence[StoredArray]]
) -> tuple[int, FitIns] | None:
    """Return a legacy fit instruction and the number of the content its model is in; None if it is something else."""
    records = {name: (kind, payload) for name, kind, payload in packed}
    kind, number = records.get("fitins.parameters", ("", 0))
    if len(records) != 2 or kind != "r" or "fitins.config" not in records:
        return None
    arrays = contents[number]
    tensors = [a[4] for a in arrays if a[0] != internals.EMPTY]
    return number, FitIns(Parameters(tensors, arrays[0][3] if arrays else ""), records["fitins.config"][1])


def unpack(
    packed: Sequence[PackedRecord],
    contents: Mapping[int, Sequence[StoredArray]] | None = None,
    lease: object = None,
) -> RecordDict:
    """Put a record dict together again.

    Parameters
    ----------
    contents : mapping, optional
        Array records that other messages share, with bytes that are not copied either.
    lease : object, optional
        If given, arrays stay views of the memory they came in, and keep `lease` alive; else they become bytes.
    """
    return internals.record_dict(
        (name, _record(kind, payload, contents or {}, lease)) for name, kind, payload in packed
    )


def _record(kind: str, payload: Any, contents: Mapping[int, Sequence[StoredArray]], lease: object) -> Any:
    if kind == "a":
        return internals.array_record((a[0], _array(a, lease)) for a in payload)
    if kind == "r":
        return internals.array_record((a[0], internals.array(*a[1:])) for a in contents[payload])
    return internals.metric_record(payload) if kind == "m" else internals.config_record(payload)


def _array(packed: PackedArray, lease: object) -> Array:
    _, dtype, shape, stype, data = packed
    if lease is None:
        return internals.array(dtype, shape, stype, data.tobytes())
    shared = data.view(SharedBytes)
    shared.lease = lease
    return SharedArray(dtype, shape, stype, shared)


def size(packed: Sequence[PackedRecord]) -> int:
    """Bytes of all arrays."""
    return sum(a[4].nbytes for _, kind, payload in packed if kind == "a" for a in payload)


def own(packed: Sequence[PackedRecord]) -> list[PackedRecord]:
    """Copy arrays into this process's own memory."""
    return [
        (name, kind, [(*a[:4], np.frombuffer(a[4].tobytes(), np.uint8)) for a in payload] if kind == "a" else payload)
        for name, kind, payload in packed
    ]
