"""`.npy` files for fuzzing: valid ones, valid ones damaged somewhere, headers of every kind, and anything at all."""

import io
import warnings

import numpy as np
from hypothesis import strategies as st

NUMBERS = ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "|b1", "|i1", "|u1", "<i2", ">u2", "<i4", ">i4", "<u8", "<i8"]
OTHERS = [
    "|O",
    "<U3",
    "|S5",
    "|V4",
    "<c8",
    "<M8[s]",
    "<f16",
    "f4,i4",
    "2i4",
    "a3",
    "<f3",
    "",
    "<",
    "float32",
    "\\x3cf4",
]


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    """Return what NumPy writes."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=False)
    return stream.getvalue()


def loaded(data: bytes) -> np.ndarray:
    """Return what NumPy reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.load(io.BytesIO(data), allow_pickle=False)


def require_as_numpy_reads(array: np.ndarray, data: bytes) -> None:
    """Raise AssertionError unless this is the array that NumPy reads, and no larger than what there is."""
    expected = loaded(data)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()
    assert array.nbytes <= len(data)
    assert not array.flags.writeable


@st.composite
def valid(draw: st.DrawFn) -> tuple[np.ndarray, bytes]:
    """An array of numbers, and its file."""
    dtype = np.dtype(draw(st.sampled_from(NUMBERS)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    body = draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(body, np.uint8).view(dtype) if dtype.kind != "b" else np.frombuffer(body, np.uint8) % 2 == 1
    array = array.reshape(shape, order=draw(st.sampled_from("CF")))
    return array, saved(array, draw(st.sampled_from([None, (1, 0), (2, 0)])))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file with bytes replaced, cut out, put in, or taken from another file."""
    data = bytearray(draw(valid())[1])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0 if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(0, 40))]
            case 2:
                data[at:at] = draw(st.binary(max_size=40))
            case 3:
                other = draw(valid())[1]
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case _:
                word = draw(
                    st.sampled_from([b"-", b"0", b"L", b",", b"(", b")", b" ", b"'", b"\n", b"True", b"}", b"#"])
                )
                data[at:at] = word
    return bytes(data)


@st.composite
def stated(draw: st.DrawFn) -> bytes:
    """A header of one's own making, and a body that fits it or does not."""
    descr = repr(draw(st.sampled_from([*NUMBERS, *OTHERS])))
    if draw(st.integers(0, 9)) == 0:
        descr = draw(st.sampled_from(["None", "1", "()", "[]", "('<f4', (2,))", "[('a', '<f4')]", "b'<f4'", "u'<f4'"]))
    lengths = draw(st.lists(st.integers(0, 5) | st.integers(-3, 2**70), max_size=4))
    inside = draw(st.sampled_from([", ", ",", " , ", ",,"])).join(map(str, lengths)) + draw(st.sampled_from([",", ""]))
    shape = draw(st.sampled_from(["({})", "({})", "({})", "[{}]", "-({})", "(({}))"])).format(inside)
    order = draw(st.sampled_from(["False", "True", "False", "True", "1", "None", "'x'"]))
    entries = [f"'descr': {descr}", f"'fortran_order': {order}", f"'shape': {shape}"]
    entries = draw(st.permutations(entries))[: draw(st.sampled_from([3, 3, 3, 2]))]
    if draw(st.integers(0, 5)) == 0:
        entries.append(draw(st.sampled_from(["'x': 1", "'shape': (2,)", "'shape': (1,), 'descr': '<i2'", "**{}"])))
    gap = draw(st.sampled_from([", ", ",", " , ", " ", ",\n"]))
    ending = draw(st.sampled_from([", }", "}", ",}", " }", "", "}#", ",, }"])) + " " * draw(st.integers(0, 20))
    text = ("{" + gap.join(entries) + ending + draw(st.sampled_from(["\n", "", "\n\n", "\0"]))).encode("latin1")
    version = draw(st.sampled_from([1, 1, 1, 2, 3]))
    size = draw(st.integers(0, 64)) * draw(st.sampled_from([1, 2, 4, 8]))
    return (
        b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + bytes(size)
    )


@st.composite
def fitting(draw: st.DrawFn) -> bytes:
    """A header as others than NumPy may write it, and as many bytes as it states."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    dtype = draw(st.sampled_from(NUMBERS))
    quote = draw(st.sampled_from("'\""))
    space = draw(st.sampled_from(["", " ", "  "]))
    written = "(" + "".join(f"{n}{space},{space}" for n in shape) + ")"
    if len(shape) > 1 and draw(st.booleans()):
        written = "(" + f"{space},".join(map(str, shape)) + ")"
    values = {"descr": f"'{dtype}'", "fortran_order": str(draw(st.booleans())), "shape": written}
    parts = [f"{quote}{key}{quote}{space}:{space}{values[key]}" for key in draw(st.permutations(list(values)))]
    text = "{" + f"{space},".join(parts) + draw(st.sampled_from(["", ",", " , "])) + "}" + " " * draw(st.integers(0, 9))
    size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    body = draw(st.binary(min_size=size, max_size=size))
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + body


anything = st.one_of(damaged(), stated(), fitting(), st.binary(max_size=300))
"""Bytes of which some are a `.npy` file and most are not."""
