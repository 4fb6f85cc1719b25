"""Arrays as the `.npy` bytes (NEP 1) that Flower's Parameters carry, with as few copies as there can be."""

from __future__ import annotations

import io
import math
import tokenize
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What NumPy's header parser (ast and tokenize underneath) raises on text that is no header.
_UNREADABLE = (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError,
               MemoryError, tokenize.TokenError)  # fmt: skip


def encode(array: NDArray[Any]) -> bytes:
    """Return what `numpy.save` writes for a C-contiguous array, copying its memory once."""
    return b"".join((_header(array.dtype, array.shape), array.data))


def decode(data: bytes) -> NDArray[Any]:
    """Return the array written in `.npy` bytes: a read-only view of them.

    Raises
    ------
    ValueError
        These are no `.npy` bytes, too few or too many, or they hold Python objects, which are never unpickled.
    """
    # Behind the magic string and two bytes of version: the length of what follows, in 2 bytes, from version 2 in 4.
    width = 2 if data[6:7] == b"\x01" else 4
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    dtype, shape, order = _layout(data[:start])
    size = dtype.itemsize * math.prod(shape)
    if len(data) - start != size:
        raise ValueError(
            f"Received {len(data) - start} bytes of data for an array of shape {shape}, which takes {size}; "
            "the message is damaged, send it again."
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


@lru_cache(maxsize=1024)
def _layout(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    file = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except _UNREADABLE as error:
        raise ValueError("Received bytes that are no .npy array; server and clients must both send arrays.") from error
    if dtype.hasobject:
        raise ValueError("Received an array of Python objects, which are never unpickled; send numbers.")
    return dtype, shape, "F" if fortran else "C"
