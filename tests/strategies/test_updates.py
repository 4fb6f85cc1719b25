"""Vetting, decoding and block-wise reading of what clients sent."""

import io
import re

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import ClientUpdates, LayerMap
from strategies.updates import UnusableTensor, client_order, decode

from .helpers import Proxy, model, result, trained


def npy(array, **kwargs):
    stream = io.BytesIO()
    np.save(stream, array, **kwargs)
    return stream.getvalue()


def updates(results, start=None, device="cpu", layers=None):
    start = model() if start is None else start
    return ClientUpdates(results, start, layers or LayerMap.from_arrays(start), device=torch.device(device))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        np.array(5, dtype=np.int64),
        np.array([True, False]),
        np.zeros((0, 3), np.float16),
        np.arange(3, dtype=">f4"),
    ],
)
def test_decoding_is_what_numpy_loads_without_a_copy(array):
    data = npy(array)
    view = decode(data)
    np.testing.assert_array_equal(view, array)
    assert view.dtype == array.dtype
    assert view.shape == array.shape
    if view.size:
        assert np.shares_memory(view, np.frombuffer(data, np.uint8))


def held(data, form):
    """A `.npy` byte string as an engine may hold it."""
    if form == "bytes":
        return data
    if form == "memoryview":
        return memoryview(data)
    if form == "uint8":
        return np.frombuffer(data, np.uint8)
    return np.load(io.BytesIO(data))


forms = pytest.mark.parametrize("form", ["memoryview", "uint8", "decoded"])


@forms
@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(5), np.zeros((0, 3))])
def test_lent_memory_is_viewed_without_a_copy_and_cannot_be_written(form, array):
    data = held(npy(array), form)
    view = decode(data)
    np.testing.assert_array_equal(view, array)
    assert (view.dtype, view.shape) == (array.dtype, array.shape)
    assert not view.flags.writeable
    if view.size:
        assert np.shares_memory(view, np.frombuffer(data, np.uint8) if form != "decoded" else data)


def test_a_writable_buffer_gives_a_read_only_view():
    data = bytearray(npy(np.ones(3)))
    with pytest.raises(ValueError, match="read-only"):
        decode(data)[0] = 2


def test_a_vector_of_uint8_is_a_buffer_only_with_the_magic_string():
    np.testing.assert_array_equal(decode(np.arange(200, dtype=np.uint8)), np.arange(200))
    assert decode(np.frombuffer(npy(np.ones(3)), np.uint8)).shape == (3,)
    assert decode(np.frombuffer(npy(np.ones(3)), np.uint8)[None]).shape == (1, 152)


@pytest.mark.parametrize(
    "data",
    [
        np.array([1, "a"], dtype=object),
        np.zeros(2, dtype=[("a", "f4")]),
        np.array(["text"]),
        np.array([1j]),
        np.zeros(2, np.longdouble),
        np.array(["2020-01-01"], "M8[D]"),
        np.repeat(np.frombuffer(npy(np.zeros(3)), np.uint8), 2)[::2],
        memoryview(npy(np.zeros(3)))[::-1],
        [1.0, 2.0],
        "text",
        None,
    ],
)
def test_what_is_neither_numbers_nor_a_buffer_is_refused(data):
    with pytest.raises(UnusableTensor):
        decode(data)


@forms
@pytest.mark.parametrize("seed", range(4))
def test_of_two_results_by_one_client_the_same_is_used_however_they_are_held(form, seed):
    one, two = trained(model(), 2, seed)

    def used(hold):
        sent = []
        for arrays, n in ((one, 5), (two, 5)):
            tensors = [hold(data) for data in ndarrays_to_parameters(arrays).tensors]
            sent.append(result("a", Parameters(tensors, "numpy.ndarray"), n))
        return [updates(order).tensors(0)[0].tolist() for order in (sent, sent[::-1])]

    expected = used(bytes)
    assert expected[0] == expected[1]
    assert used(lambda data: held(data, form)) == expected


def header(text, body=b""):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1") + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"not an array at all",
        npy(np.array([1, "a"], dtype=object), allow_pickle=True),
        npy(np.array(["text"])),
        npy(np.array([1j])),
        npy(np.zeros(2, dtype=[("a", "f4")])),
        npy(np.zeros(4, np.float32))[:-1],
        npy(np.zeros(4, np.float32)) + b"\0",
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", b"\0" * 8),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}", b""),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (2"),
        header("__import__('os').system('true')"),
        header("[" * 3000),
        header("{'descr': (), 'fortran_order': False, 'shape': (5,)}"),
        header("{'descr': ('<f4',), 'fortran_order': False, 'shape': (5,)}"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 1" + "0" * 30 + ")}"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904, 4611686018427387904)}"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + ")}", b"\0" * 4),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (True, True)}", b"\0" * 4),
        header("{'descr': '<f16', 'fortran_order': False, 'shape': (1,)}", b"\0" * 16),
        b"\x93NUMPY\x09\x00" + b"\0" * 20,
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{}",
    ],
)
def test_bytes_that_are_not_a_plain_array_are_refused(data):
    with pytest.raises(UnusableTensor):
        decode(data)


def bad(change):
    """A client's result, spoilt by `change(arrays)`."""
    arrays = trained(model(), 1)[0]
    changed = change(arrays)
    return result("bad", arrays if changed is None else changed)


def nan(value):
    def change(arrays):
        arrays[0][1, 2] = value

    return change


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (bad(nan(np.nan)), "'tensor0' holds NaN or Inf"),
        (bad(nan(-np.inf)), "'tensor0' holds NaN or Inf"),
        (bad(lambda a: a[:-1]), "3 tensors, the model has 4"),
        (bad(lambda a: [*a, a[0]]), "5 tensors, the model has 4"),
        (bad(lambda a: []), "0 tensors"),
        (bad(lambda a: [a[0].T, *a[1:]]), r"shape \(3, 4\), the model's is \(4, 3\)"),
        (bad(lambda a: [a[0], a[1], a[2].reshape(1), a[3]]), "shape"),
        (bad(lambda a: [a[0].astype(np.int32), *a[1:]]), "dtype int32"),
        (bad(lambda a: [*a[:3], a[3].astype(np.float32)]), "dtype float32"),
        (bad(lambda a: [a[0] + 1j, *a[1:]]), "complex64 is not a number"),
        (bad(lambda a: [np.full((4, 3), 1e39), *a[1:]]), "too large for the model's float32"),
        (bad(lambda a: [*a[:3], np.array(2**64 - 1, np.uint64)]), "too large for the model's int64"),
        (result("bad", Parameters([b"junk"] * 4, "numpy.ndarray")), "tensor 'tensor0': not a .npy array"),
        (result("bad", trained(model(), 1)[0], 0), "num_examples is 0"),
        (result("bad", trained(model(), 1)[0], -1), "num_examples is -1"),
        (result("bad", trained(model(), 1)[0], float("nan")), "num_examples is nan"),
        (result("bad", trained(model(), 1)[0], True), "num_examples is True"),
        (result("bad", trained(model(), 1)[0], 10**5000), "num_examples is beyond 64 bits"),
        (
            (
                Proxy("bad"),
                FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no fit"), ndarrays_to_parameters(model()), 3, {}),
            ),
            "FIT_NOT_IMPLEMENTED: no fit",
        ),
    ],
)
def test_an_unusable_result_is_rejected_with_its_reason(spoilt, words):
    good = [result(i, a) for i, a in enumerate(trained(model(), 2))]
    found = updates([good[0], spoilt, good[1]])
    assert found.clients == ["0", "1"]
    assert [r.client for r in found.rejected] == ["bad"]
    assert re.search(words, found.rejected[0].reason)
    assert found.weights.tolist() == [0.5, 0.5]


def test_finite_values_whose_sum_overflows_are_accepted():
    start = [np.zeros(4, np.float32)]
    found = updates([result(0, [np.full(4, 3e38, np.float32)])], start)
    assert len(found) == 1


def test_of_two_results_by_one_client_the_same_is_used_in_any_order_of_arrival():
    one, two = trained(model(), 2)
    first = updates([result("a", one, 5), result("a", two, 7), result("b", one)])
    second = updates([result("b", one), result("a", two, 7), result("a", one, 5)])
    assert first.clients == second.clients == ["a", "b"]
    assert first.num_examples == second.num_examples
    assert len(first.rejected) == len(second.rejected) == 1
    assert "more than one result" in first.rejected[0].reason


def test_canonical_order_is_numeric_where_ids_are_numbers():
    assert sorted(["b", "10", "9", "-3", "a", "007"], key=client_order) == ["-3", "007", "9", "10", "a", "b"]
    odd = ["--3", "²", "", "-", "9" * 5000]
    assert sorted(odd, key=client_order) == sorted(odd[2:] + odd[:2], key=client_order)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_layer_is_the_difference_to_the_global_model_in_float64(dtype, device):
    start = [a.astype(dtype) if a.dtype.kind == "f" else a for a in model()]
    clients = trained(start, 3)
    layers = LayerMap.from_names(["fc.weight", "fc.bias", "scale", "steps"], [a.shape for a in start])
    found = updates([result(i, a) for i, a in enumerate(clients)], start, device, layers.for_arrays(start))
    expected = [
        np.concatenate([(a[t].astype(np.float64) - start[t].astype(np.float64)).ravel() for t in (0, 1)])
        for a in clients
    ]
    np.testing.assert_array_equal(found.layer("fc").cpu(), np.stack(expected))
    assert found.layer("fc").device.type == device
    with pytest.raises(KeyError, match="fc, scale"):
        found.layer("conv")


def test_a_layer_wider_than_a_block_comes_in_pieces(monkeypatch):
    monkeypatch.setattr("strategies.gram.BLOCK_BYTES", 1)
    monkeypatch.setattr("strategies.gram._MIN_COLUMNS", 64)
    monkeypatch.setattr("strategies.gram._PANEL", 2)
    rng = np.random.default_rng(0)
    start = [rng.normal(size=(20, 7)), rng.normal(size=150)]
    clients = [[a + rng.normal(size=a.shape) for a in start] for _ in range(3)]
    layers = LayerMap.from_names(["fc.weight", "fc.bias"], [a.shape for a in start])
    found = updates([result(i, a) for i, a in enumerate(clients)], start, layers=layers)
    pieces = [(columns, block.clone()) for columns, block in found.blocks(layers.layers[0])]
    assert [b.shape[1] for _, b in pieces] == [64, 64, 64, 64, 34]
    G = np.stack([np.concatenate([(x - y).ravel() for x, y in zip(a, start, strict=True)]) for a in clients])
    np.testing.assert_array_equal(torch.cat([b for _, b in pieces], 1), G)
    reference = torch.tensor(rng.normal(size=290))
    inner = found.gram(layers.layers[0], reference)
    np.testing.assert_allclose(inner.matrix, G @ G.T, rtol=1e-12)
    assert torch.equal(inner.matrix[:2, 2:], inner.matrix[2:, :2].T)
    np.testing.assert_allclose(inner.cross, G @ reference.numpy(), rtol=1e-10)
    alpha = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    out = found.combine(layers.layers[0], alpha, reference, 0.3)
    expected = 0.3 * reference.numpy() + alpha.numpy() @ G
    np.testing.assert_allclose(out.vector, expected, rtol=1e-12)
    np.testing.assert_allclose(out.products, G @ expected, rtol=1e-10)
    np.testing.assert_allclose(out.mean_products, G @ G.mean(0), rtol=1e-10)
    np.testing.assert_allclose(out.squared_norms, (G**2).sum(1), rtol=1e-12)


def test_a_float64_global_model_keeps_its_digits_with_float32_clients():
    start = [np.array([1 + 1e-12])]
    found = updates([result(0, [np.array([1], np.float32)])], start)
    assert found.layer(0).item() == pytest.approx(-1e-12, rel=1e-3)


def test_of_two_results_that_differ_in_metrics_only_the_same_is_used():
    arrays = trained(model(), 1)[0]
    one, two = (result("a", arrays, metrics={"train_loss": x}) for x in (1.0, 5.0))
    assert updates([one, two]).metrics == updates([two, one]).metrics


def test_a_reason_has_a_bounded_length():
    spoilt = (Proxy("bad"), FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "x\n" * 10**6), ndarrays_to_parameters([]), 3, {}))
    text = str(updates([spoilt]).rejected[0])
    assert len(text) <= 300
    assert "\n" not in text


hostile = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda descr, order, shape, body: header(
            f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}", body
        ),
        st.sampled_from(["'<f4'", "'|O'", "'<M8'", "()", "None", "[('a','<f4')]", "'<f4,'", "1", "'>i8'"]),
        st.sampled_from(["False", "True", "1", "None", "'x'"]),
        st.one_of(
            st.lists(st.integers(-3, 2**70), max_size=5).map(lambda x: repr(tuple(x))),
            st.text(st.characters(max_codepoint=255), max_size=8),
        ),
        st.binary(max_size=32),
    ),
)


@settings(max_examples=400, deadline=None)
@given(hostile)
def test_no_bytes_do_anything_but_decode_or_be_refused(data):
    try:
        array = decode(data)
    except UnusableTensor:
        return
    assert array.nbytes <= len(data)
