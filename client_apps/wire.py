"""Arrays as the `.npy` bytes (NEP 1) that Flower's Parameters carry, with as few copies as there can be."""

from __future__ import annotations

import io
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# An entry of a header (NEP 1), and its values. NumPy's own parser takes any Python literal, recurses on it and warns;
# no array of numbers needs that.
_VALUE = r"""'[^'"\\]*'|"[^'"\\]*"|True|False|\([0-9, ]*\)"""
_ENTRY = re.compile(rf""" *(["'])(descr|fortran_order|shape)\1 *: *({_VALUE}) *(?:,|(?=\}}))""")
_DTYPE = re.compile(r"[<>|=]?[fiubc?][0-9]{0,2}")
_SHAPE = re.compile(r"\((?: *(?:0|[1-9][0-9]{0,14}) *,)*(?: *(?:0|[1-9][0-9]{0,14}))? *\)")
_LONGEST_HEADER = 4096
_MAX_DIMENSIONS = 32


def encode(array: NDArray[Any]) -> bytes:
    """Return what `numpy.save` writes for a C-contiguous array, copying its memory once."""
    return b"".join((_header(array.dtype, array.shape), array.data))


def decode(data: bytes) -> NDArray[Any]:
    """Return the array written in `.npy` bytes: a read-only view of them.

    Raises
    ------
    ValueError
        These are no `.npy` bytes, too few or too many, or they hold no numbers. Python objects are never unpickled.
    """
    # Behind the magic string and two bytes of version: the length of what follows, in 2 bytes, from version 2 in 4.
    width = {b"\1\0": 2, b"\2\0": 4}.get(data[6:8], 0)
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    if data[:6] != b"\x93NUMPY" or not width or not 8 + width < start <= min(len(data), _LONGEST_HEADER):
        raise _no_array()
    dtype, shape, order = _layout(data[8 + width : start])
    size = dtype.itemsize * math.prod(shape)
    if len(data) - start != size:
        raise ValueError(
            f"Received {len(data) - start} bytes of data for an array of shape {shape}, which takes {size}; "
            "the message is damaged, send it again."
        )
    try:
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)
    except ValueError as error:  # an empty array may have dimensions beyond what NumPy can count
        raise _no_array() from error


def _no_array() -> ValueError:
    return ValueError("Received bytes that are no .npy array; server and clients must both send arrays.")


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


@lru_cache(maxsize=1024)
def _layout(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Read dtype, shape and order from a header."""
    text = header.decode("latin1")
    entries: dict[str, str] = {}
    end = 1
    while found := _ENTRY.match(text, end):
        if found[2] in entries:
            break
        entries[found[2]] = found[3]
        end = found.end()
    if text[:1] != "{" or len(entries) != 3 or not re.fullmatch(r" *\} *\n?", text[end:]):
        raise _no_array()
    descr, order, lengths = entries["descr"], entries["fortran_order"], entries["shape"]
    shape = tuple(int(n) for n in re.findall("[0-9]+", lengths))
    if order not in ("True", "False") or not _SHAPE.fullmatch(lengths) or (len(shape) == 1 and "," not in lengths):
        raise _no_array()
    if len(shape) > _MAX_DIMENSIONS or descr[0] not in "'\"":
        raise _no_array()
    if re.fullmatch("[|]?O[0-9]*", descr[1:-1]):
        raise ValueError("Received an array of Python objects, which are never unpickled; send numbers.")
    if not _DTYPE.fullmatch(descr[1:-1]):
        raise ValueError(f"Received an array of dtype {descr[:50]}; send numbers.")
    try:
        return np.dtype(descr[1:-1]), shape, "F" if order == "True" else "C"
    except TypeError as error:
        raise _no_array() from error
