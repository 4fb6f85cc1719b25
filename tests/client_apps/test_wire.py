"""Arrays as bytes: exactly what NumPy writes, and nothing else read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from client_apps.wire import decode, encode
from tests import npy_files

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(7, dtype=np.int64),
    np.array([True, False]),
    np.array(True),
    np.zeros((0, 3), np.float64),
    np.ones((1, 1, 1, 1), np.float16),
    np.arange(4, dtype=np.uint8),
]


def saved(array: np.ndarray, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_bytes_are_those_of_numpy_and_come_back(array: np.ndarray) -> None:
    data = encode(array)
    assert data == saved(array)
    back = decode(data)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert not back.flags.writeable


@pytest.mark.parametrize(
    "array", [np.asfortranarray(ARRAYS[0]), ARRAYS[0].astype(">f4")], ids=["fortran", "big-endian"]
)
def test_what_others_may_send_is_read(array: np.ndarray) -> None:
    np.testing.assert_array_equal(decode(saved(array)), array)


def test_a_header_of_version_2_is_read() -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, ARRAYS[0], version=(2, 0))
    np.testing.assert_array_equal(decode(file.getvalue()), ARRAYS[0])


def test_objects_are_never_unpickled() -> None:
    with pytest.raises(ValueError, match="Python objects, which are never unpickled"):
        decode(saved(np.array([{}], dtype=object), allow_pickle=True))


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY", b"no array at all", saved(ARRAYS[0])[:40], b"\x93NUMPY\x09\x00" + bytes(80)]
)
def test_what_is_no_array_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no \.npy array"):
        decode(data)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_damaged_data_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes of data for an array of shape \(2, 3\), which takes 24; the message"):
        decode(change(saved(ARRAYS[0])))


def stating(shape: object, descr: str = "'<f4'", body: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        stating((0, 2**70)),
        stating((-2, -3), body=bytes(24)),
        stating("(True, 2)", body=bytes(8)),
        stating("(2L,)", body=bytes(8)),
        stating((1,) * 64, body=bytes(4)),
        stating("(" * 1500 + ")" * 1500),
        stating((2,), "'<U0'"),
        stating((2,), "[('a', '|O')]", bytes(16)),
        stating((2,), "'a4'", bytes(8)),
        stating((2,), r"'\d'", bytes(8)),
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{}",
        b"\x93NUMPY\x03\x00" + stating((2,))[8:],
    ],
)
@pytest.mark.filterwarnings("error")
def test_headers_that_no_sender_of_numbers_writes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^Received ") as error:
        decode(data)
    assert "\n" not in str(error.value)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(npy_files.anything)
@pytest.mark.filterwarnings("error")
def test_bytes_are_refused_or_read_as_numpy_reads_them(data: bytes) -> None:
    try:
        array = decode(data)
    except ValueError:
        return
    npy_files.require_as_numpy_reads(array, data)
