"""Clients that lie and clients that break things: what a round may cost, and what they cannot move."""

import io
import json
import logging
import math
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common import Code, EvaluateRes, FitRes, GetPropertiesRes, Parameters, Status, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import recorddict_to_getpropertiesres
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import (
    AFL,
    CLAIR,
    CRAFT,
    ClientUpdates,
    FedAvg,
    FedFV,
    FedMGDA,
    FedNova,
    FedTrimmedAvg,
    LayerMap,
    OracleFedAvg,
    QFedAvg,
    partition_order,
)
from strategies.shares import capped_shares
from strategies.testing import CHECKS, Proxy
from strategies.updates import UnusableTensor, decode, one_line, shown

from .clair_problems import problem
from .helpers import arrays_of, every_strategy, initial, model, result, results, trained

NAMES = ["fc.weight", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "seen"]
START = [np.zeros(4), np.zeros(2), np.ones(2), np.array(100), np.array([7, 7], np.uint8)]
LAYERS = LayerMap.from_names(NAMES, [a.shape for a in START]).for_arrays(START)


# ---- max_weight_share: how much a client counts ---------------------------------------------------------------


def filled(sizes, largest):
    """Shares min(largest, s · size) that sum to one: the level s by bisection."""
    sizes = np.asarray(sizes, np.float64)
    if len(sizes) * largest <= 1:
        return np.full(len(sizes), 1 / len(sizes))
    low, high = 0.0, 2 / sizes.min()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(largest, level * sizes).sum() < 1 else (low, level)
    return np.minimum(largest, high * sizes)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 2**63 - 1) | st.integers(1, 100), min_size=1, max_size=12),
    st.floats(0.01, 1, exclude_min=True),
)
def test_shares_are_those_of_water_filling(sizes, largest):
    shares, lowered = capped_shares(sizes, largest)
    np.testing.assert_allclose(shares, filled(sizes, largest), rtol=1e-9, atol=1e-15)
    assert math.isclose(sum(shares), 1, rel_tol=1e-14)
    assert max(shares) <= max(largest, 1 / len(sizes))
    asked = np.array(sizes, np.float64) / sum(sizes) / shares
    assert set(np.flatnonzero(asked > 1 + 1e-9)) <= set(lowered) <= set(np.flatnonzero(asked > 1 - 1e-9))


def test_shares_by_hand():
    # 10^9 of 10^9 + 60 becomes .4, and .6 is dealt by 1 : 2 : 3.
    assert capped_shares([10, 20, 30, 10**9], 0.4)[0] == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-15)
    # Holding the first leaves .6, of which the second would get 9/10: it is held, too, and still counts more than it
    # asked for.
    assert capped_shares([90, 9, 1], 0.4) == (pytest.approx([0.4, 0.4, 0.2]), [0])
    assert capped_shares([5, 1, 1], 0.2) == ([1 / 3] * 3, [0])
    assert capped_shares([1, 2, 1], 0.5) == ([0.25, 0.5, 0.25], [])
    assert capped_shares([3.0, 0.0, 0.0], 0.5) == ([0.5, 0.25, 0.25], [0])
    assert capped_shares([2**63 - 1, 1, 1], 0.5) == ([0.5, 0.25, 0.25], [0])
    assert capped_shares([1e300, 1e-300, 1e-300], 0.5) == ([0.5, 0.25, 0.25], [0])
    assert capped_shares([3, 1], None) == ([0.75, 0.25], [])


def lying(i):
    """Client i of four, whose update is the i-th unit vector; the last one claims a million times the data."""
    arrays = [START[0] + np.eye(4)[i], START[1] + i, START[2] + i, START[3] + i, START[4]]
    return result(i, arrays, 10**9 if i == 3 else 10, {"train_loss": float(i), "initial_loss": 1.0})


def test_the_share_holds_in_the_step_the_buffers_and_the_losses():
    s = FedAvg(layers=LAYERS, initial_parameters=ndarrays_to_parameters(START), max_weight_share=0.4)
    theta, metrics = s.aggregate_fit(1, [lying(i) for i in range(4)], [])
    weight, mean, var, count, _ = arrays_of(theta)
    np.testing.assert_allclose(weight, [0.2, 0.2, 0.2, 0.4], rtol=1e-15)
    np.testing.assert_allclose(mean, 0.2 + 0.4 + 1.2)
    np.testing.assert_allclose(var, 1 + 1.8)
    assert count == 103
    assert metrics["train_loss"] == pytest.approx(1.8)
    assert metrics["clients_capped"] == 1


@pytest.mark.parametrize(
    ("make", "losses"),
    [
        (lambda **k: AFL(lambda_lr=1.0, **k), (1.0, 1.0, 1.0, 1e100)),
        (lambda **k: QFedAvg(q=2.0, client_lr=1e-3, **k), (1.0, 1.0, 1.0, 1e100)),
        (lambda **k: CRAFT(targets="loss", scale="mean_norm", **k), (1.0, 1.0, 1.0, 1e100)),
        (lambda **k: CRAFT(targets="loss", scale="mean_norm", **k), (0.0, 0.0, 0.0, 5.0)),
        (lambda **k: OracleFedAvg(contaminated=[0], **k), (1.0, 1.0, 1.0, 1.0)),
        (lambda **k: FedMGDA(epsilon=0.9, normalise=False, **k), (1.0, 1.0, 1.0, 1.0)),
        (lambda **k: FedNova(**k), (1.0, 1.0, 1.0, 1.0)),
    ],
    ids=["afl", "qfedavg", "craft-loss", "craft-zero-losses", "oracle", "fedmgda", "fednova"],
)
def test_no_loss_buys_a_larger_share(make, losses):
    """With orthogonal unit updates a step's parts are the clients' weights, up to its length."""
    s = make(layers=LAYERS, initial_parameters=ndarrays_to_parameters(START), max_weight_share=0.4)
    theta = ndarrays_to_parameters(START)
    for number in (1, 2):
        before = arrays_of(theta)[0]
        sent = []
        for i in range(4):
            length = 0.1 if i == 3 else 1.0  # a short update attracts FedMGDA's weights
            update = [before + np.eye(4)[i] * (length if isinstance(s, FedMGDA) else 1.0), *arrays_of(theta)[1:]]
            sent.append(result(i, update, 10, {"initial_loss": losses[i], "step_weight": 3.0}))
        theta, metrics = s.aggregate_fit(number, sent, [])
        assert metrics["failed_round"] is False
        step = arrays_of(theta)[0] - before
        if isinstance(s, FedMGDA):
            step = step / [1, 1, 1, 0.1]
        assert (step >= -1e-12).all()
        np.testing.assert_array_less(step / step.sum(), 0.4 + 1e-9)
    if not isinstance(s, OracleFedAvg | FedNova | FedMGDA):
        assert step[3] / step.sum() == pytest.approx(0.4)


def test_clairs_members_keep_to_the_share():
    made = problem(8, 1, seed=1, shuffled=False)
    start = [np.zeros((10, 20)), np.zeros(8)]
    # What is voted out claims half of the data, and of the seven others the first claims nearly everything.
    counts = (10**9, 10, 10, 10, 10, 10, 10, 10**9)
    sent = [result(i, [w, np.eye(8)[i]], n) for i, (w, n) in enumerate(zip(made.weights, counts, strict=True))]
    s = CLAIR(matrices=0, rank=2, max_weight_share=0.25, initial_parameters=ndarrays_to_parameters(start))
    theta, metrics = s.aggregate_fit(1, sent, [])
    assert json.loads(metrics["contaminated_clients"])[0]["client"] == "7"
    mean, shares = arrays_of(theta)
    np.testing.assert_allclose(shares, [0.25, *[0.125] * 6, 0], rtol=1e-12)
    np.testing.assert_allclose(mean, np.tensordot(shares, made.weights, 1), atol=1e-12)
    # A member's own matrix is its own in the subspace and the same mean outside of it.
    basis = s.memory["basis/tensor0"].numpy()
    own = arrays_of(s.sent_to("1", theta))[0]
    expected = made.weights[1] @ basis @ basis.T + mean - mean @ basis @ basis.T
    np.testing.assert_allclose(own, expected, atol=1e-12)


@pytest.mark.parametrize(("share", "expected"), [(None, 3.0 - 3e-7), (0.4, 1.8), (0.1, 1.5)])
def test_an_evaluations_loss_keeps_to_the_share(share, expected):
    seen = []
    s = FedAvg(max_weight_share=share, evaluate_metrics_aggregation_fn=lambda pairs: seen.append(pairs) or {})
    sent = [(Proxy(str(i)), EvaluateRes(Status(Code.OK, ""), float(i), 10**8 if i == 3 else 10, {})) for i in range(4)]
    loss, _ = s.aggregate_evaluate(1, sent, [])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert [n for n, _ in seen[0]] == [10, 10, 10, 10**8]  # the user's function gets what clients said


def test_options_that_do_not_bite_change_no_bit():
    plain, careful = FedAvg(initial_parameters=initial()), FedAvg(
        initial_parameters=initial(), max_weight_share=0.4, clip_to_median=50
    )  # fmt: skip
    one, without = plain.aggregate_fit(1, results(model()), [])
    two, counted = careful.aggregate_fit(1, results(model()), [])
    assert one.tensors == two.tensors
    assert (counted["clients_capped"], counted["clients_clipped"]) == (0, 0)
    assert not {"clients_capped", "clients_clipped"} & set(without)


@pytest.mark.parametrize(
    "options",
    [
        {"max_weight_share": 0},
        {"max_weight_share": 1.1},
        {"max_weight_share": True},
        {"max_weight_share": "half"},
        {"clip_to_median": 0.9},
        {"clip_to_median": math.inf},
        {"clip_to_median": "3"},
    ],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FedAvg(**options)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize(
    "make", [CRAFT, lambda **k: FedFV(tau=2, **k), FedTrimmedAvg], ids=["craft", "fedfv", "fedtrimmedavg"]
)
def test_the_contract_is_kept_with_both_options(make, check):
    check(lambda **common: make(**{"max_weight_share": 0.6, "clip_to_median": 20, **common}))


# ---- clip_to_median: how far a client goes ----------------------------------------------------------------------


def clipped(updates, multiple, start=None, layers=None):
    """What a round makes of clients with these updates of a single vector, and the strategy's metrics."""
    start = [np.zeros(len(updates[0]))] if start is None else start
    s = FedAvg(layers=layers, initial_parameters=ndarrays_to_parameters(start), clip_to_median=multiple)
    theta, metrics = s.aggregate_fit(1, [result(i, [start[0] + u, *start[1:]]) for i, u in enumerate(updates)], [])
    return arrays_of(theta)[0] - start[0], metrics


def test_an_update_is_cut_to_the_multiple_of_the_median(caplog):
    lengths = np.array([1.0, 2.0, 3.0, 4.0, 5000.0])  # median 3, so 7.5 is left of the last one
    with caplog.at_level(logging.INFO):
        step, metrics = clipped(lengths[:, None] * np.eye(5), 2.5)
    np.testing.assert_allclose(step, np.array([1, 2, 3, 4, 7.5]) / 5, rtol=1e-12)
    assert metrics["clients_clipped"] == 1
    assert [r.getMessage() for r in caplog.records if "clipped" in r.message] == [
        "round 1: clipped client 4: its update is 1.67e+03 times as long as the median"
    ]


@pytest.mark.parametrize("scale", [1e-140, 1e-12, 1.0, 1e12, 1e140])
def test_the_scale_of_numbers_does_not_matter(scale):
    updates = np.array([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0], [6e8, 8e8]])
    step, metrics = clipped(scale * updates, 2.0)
    np.testing.assert_allclose(step, scale * np.array([3 + 0 + 5 + 6, 4 + 5 + 0 + 8]) / 4, rtol=1e-12)
    assert metrics["clients_clipped"] == 1
    assert math.isfinite(metrics["direction_norm"])


def test_an_update_that_can_hardly_be_squared_is_cut():
    """10^150 in a thousand numbers: the sum of their squares is 10^303, that of a million would be beyond float64."""
    updates = np.ones((4, 300_000))
    updates[3] = 1e150 * np.array([1, -1] * 150_000)
    step, metrics = clipped(updates, 2)
    np.testing.assert_allclose(step, (3 + 2 * np.sign(updates[3])) / 4, rtol=1e-9)
    assert metrics["clients_clipped"] == 1


def test_two_clients_are_held_to_the_shorter_and_one_to_nothing():
    step, _ = clipped(np.array([[1.0, 0], [0, 100.0]]), 3)
    np.testing.assert_allclose(step, [0.5, 1.5])
    step, metrics = clipped(np.array([[100.0, 0]]), 1)
    np.testing.assert_allclose(step, [100, 0])
    assert metrics["clients_clipped"] == 0


def test_what_most_leave_as_it_is_stays():
    step, metrics = clipped(np.array([[0.0, 0], [0, 0], [0, 0], [1, 1], [1e6, 0]]), 3)
    np.testing.assert_array_equal(step, 0)
    assert metrics["clients_clipped"] == 2
    assert metrics["failed_round"] is False
    step, metrics = clipped(np.zeros((4, 2)), 3)
    np.testing.assert_array_equal(step, 0)
    assert metrics["clients_clipped"] == 0


def test_buffers_are_one_group_and_counters_rise_no_faster_than_most():
    # Distances of both buffers together: 1, 1, 5 (of 3 and 4), 0. Their lower median is 1, so of 5 are 1.5 left.
    means = np.array([[1.0, 0], [0, 1], [3, 0], [0, 0]])
    variances = np.array([[1.0, 1], [1, 1], [1, 5], [1, 1]])
    counts = [103, 105, 2**62, 90]  # rises 3, 5, a lot and none: median 3, so at most 100 + ⌈1.5 · 3⌉
    seen = [[7, 8], [9, 9], [255, 8], [8, 0]]  # rises of 0, 2, 248, 1 and 1, 2, 1, 0: medians 1 and 1
    sent = [
        result(i, [START[0] + i, m, v, np.array(c), np.array(n, np.uint8)])
        for i, (m, v, c, n) in enumerate(zip(means, variances, counts, seen, strict=True))
    ]
    s = FedAvg(layers=LAYERS, initial_parameters=ndarrays_to_parameters(START), clip_to_median=1.5)
    theta, metrics = s.aggregate_fit(1, sent, [])
    _, mean, var, count, bytes_seen = arrays_of(theta)
    factor = 1.5 / 5
    np.testing.assert_allclose(mean, np.array([1 + 3 * factor, 1]) / 4, rtol=1e-12)
    np.testing.assert_allclose(var, np.array([4, 4 + 4 * factor]) / 4, rtol=1e-12)
    assert count == 105
    assert (bytes_seen == [9, 9]).all()
    assert (count.dtype, bytes_seen.dtype) == (np.int64, np.uint8)
    assert metrics["clients_clipped"] == 2  # client 2, and client 3, whose update is 3 times the median's length


@pytest.mark.parametrize(
    ("dtype", "start", "sent", "expected"),
    [
        (np.int64, -(2**63), [-(2**63) + 1, -(2**63) + 2, 2**63 - 1], -(2**63) + 4),
        (np.int64, 2**63 - 3, [2**63 - 2, 2**63 - 1, 2**63 - 1], 2**63 - 1),
        (np.uint64, 2**64 - 9, [2**64 - 8, 2**64 - 7, 2**64 - 1], 2**64 - 5),
        (np.int8, -128, [127, 127, 127], 127),
        (np.int64, 5, [5, 5, 6], 5),
        (np.int64, 0, [2**62, 2**62, 2**63 - 1], 2**63 - 1),
    ],
)
def test_counters_are_exact_at_the_ends_of_their_dtype(dtype, start, sent, expected):
    first = [np.zeros(1), np.array(start, dtype)]
    s = FedAvg(initial_parameters=ndarrays_to_parameters(first), clip_to_median=2)
    theta, _ = s.aggregate_fit(1, [result(i, [first[0], np.array(n, dtype)]) for i, n in enumerate(sent)], [])
    assert arrays_of(theta)[1] == np.array(expected, dtype)


def test_true_and_false_are_no_counters():
    first = [np.zeros(1), np.array([False, False])]
    s = FedAvg(initial_parameters=ndarrays_to_parameters(first), clip_to_median=1)
    sent = [result(i, [first[0], np.array([i == 2, False])]) for i in range(3)]
    assert arrays_of(s.aggregate_fit(1, sent, [])[0])[1].tolist() == [True, False]


def test_everything_reads_the_clipped_update(device):
    start = model(dtype=np.float64)[:3]
    layers = LayerMap.from_arrays(start)
    models = trained(start, 5)
    lengths = [math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(x, start, strict=True))) for x in models]
    models[0] = [b + 1e5 * (a - b) for a, b in zip(models[0], start, strict=True)]
    sent = [result(i, a) for i, a in enumerate(models)]
    raw, cut = (
        ClientUpdates(sent, start, layers, device=torch.device(device), clip_to_median=multiple)
        for multiple in (None, 4.0)
    )
    factor = 4 * sorted([*lengths[1:], math.inf])[2] / (1e5 * lengths[0])
    scale = torch.tensor([factor, 1, 1, 1, 1], dtype=torch.float64, device=device)
    for layer in layers.layers:
        torch.testing.assert_close(cut.layer(layer), raw.layer(layer) * scale[:, None], rtol=1e-9, atol=0)
        expected = raw.gram(layer).matrix * scale[:, None] * scale
        torch.testing.assert_close(cut.gram(layer).matrix, expected, rtol=1e-9, atol=1e-12)
        for t in layer.tensors:
            wanted = start[t] + factor * (raw.tensors(t)[0] - start[t])
            np.testing.assert_allclose(cut.tensors(t)[0], wanted, rtol=1e-9)
            assert all(np.shares_memory(a, b) for a, b in zip(cut.tensors(t)[1:], raw.tensors(t)[1:], strict=True))
    torch.testing.assert_close(cut.squared_norms(), raw.squared_norms() * scale**2, rtol=1e-9, atol=0)
    assert cut.clipped.keys() == {"0"}


def reads_of(monkeypatch, **options):
    """How often a round of FedAvg reads the updates."""
    count = 0
    blocks = ClientUpdates.blocks

    def counted(self, layer):
        nonlocal count
        count += 1
        return blocks(self, layer)

    monkeypatch.setattr(ClientUpdates, "blocks", counted)
    FedAvg(initial_parameters=initial(), **options).aggregate_fit(1, results(model()), [])
    monkeypatch.undo()
    return count / len(LayerMap.from_arrays(model()).layers)


def test_clipping_costs_one_read_and_no_copy(monkeypatch):
    assert reads_of(monkeypatch) == 1
    assert reads_of(monkeypatch, clip_to_median=2) == 2
    start = [np.zeros(2_000_000, np.float32)]
    rng = np.random.default_rng(0)
    sent = [result(i, [rng.normal(size=2_000_000).astype(np.float32) * (1e3 if i == 0 else 1)]) for i in range(8)]
    peaks = []
    for multiple in (None, 2.0):
        s = FedAvg(initial_parameters=ndarrays_to_parameters(start), clip_to_median=multiple)
        s.aggregate_fit(1, sent, [])  # what is made once
        tracemalloc.start()
        s.aggregate_fit(2, sent, [])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 4e6  # the updates are 64 MB


# ---- what cannot be used ----------------------------------------------------------------------------------------


def fit(cid="bad", **changes) -> tuple[Proxy, FitRes]:
    """A client's usable result with some fields replaced."""
    proxy, res = result(cid, trained(model(), 1, seed=9)[0])
    for name, value in changes.items():
        setattr(res, name, value)
    return proxy, res


def tensors(*held) -> Parameters:
    return Parameters(list(held), "numpy.ndarray")


USABLE = ndarrays_to_parameters(trained(model(), 1)[0]).tensors
REJECTED = {
    "num_examples None": ({"num_examples": None}, "num_examples is None"),
    "num_examples text": ({"num_examples": "7\n" * 10**6}, "num_examples is '7\\n7"),
    "num_examples float": ({"num_examples": 7.0}, "num_examples is 7.0"),
    "num_examples numpy bool": ({"num_examples": np.True_}, "num_examples is"),
    "num_examples numpy float": ({"num_examples": np.float64(7)}, "num_examples is"),
    "num_examples numpy uint64": ({"num_examples": np.uint64(2**63)}, "num_examples is"),
    "num_examples array": ({"num_examples": np.array([7, 8])}, "num_examples is array"),
    "num_examples complex": ({"num_examples": 7j}, "num_examples is 7j"),
    "num_examples list of what cannot be printed": ({"num_examples": [10**5000]}, "a list that cannot be shown"),
    "parameters None": ({"parameters": None}, "no list of tensors"),
    "tensors None": ({"parameters": Parameters(None, "")}, "no list of tensors"),
    "tensors bytes": ({"parameters": Parameters(b"1234", "")}, "no list of tensors"),
    "tensors dict": ({"parameters": Parameters(dict.fromkeys(range(4), USABLE[0]), "")}, "no list of tensors"),
    "tensors of None": ({"parameters": tensors(None, None, None, None)}, "not a contiguous buffer"),
    "tensors of nothing": ({"parameters": tensors(b"", b"", b"", b"")}, "not a .npy array"),
    "a tensor of text": ({"parameters": tensors("text", *USABLE[1:])}, "not a contiguous buffer"),
    "a tensor of tensors": ({"parameters": tensors(list(USABLE), *USABLE[1:])}, "not a contiguous buffer"),
    "an object array": ({"parameters": tensors(np.array([{}], object), *USABLE[1:])}, "dtype object is not a number"),
    "metrics list": ({"metrics": [1, 2]}, "metrics are a list"),
    "metrics array": ({"metrics": np.zeros(3)}, "metrics are a ndarray"),
    "metrics text": ({"metrics": "train_loss"}, "metrics are a str"),
    "status of ten megabytes": ({"status": Status(Code.FIT_NOT_IMPLEMENTED, "no\n" * 3_300_000)}, "FIT_NOT"),
    "status that is no code": ({"status": Status(77, "what")}, "status 77: what"),
    "status without a message": ({"status": Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, None)}, "status GET"),
    "a float16 client of a model beyond it": (
        {"parameters": ndarrays_to_parameters([a.astype(np.float16) if a.dtype.kind == "f" else a for a in model()])},
        None,
    ),
}


@pytest.mark.parametrize(("changes", "words"), REJECTED.values(), ids=REJECTED)
def test_whatever_a_field_holds_the_round_goes_on_without_that_client(changes, words, caplog):
    good = results(model())
    expected = FedAvg(initial_parameters=initial()).aggregate_fit(1, good, [])[0]
    theta, metrics = FedAvg(initial_parameters=initial()).aggregate_fit(1, [good[0], fit(**changes), *good[1:]], [])
    if words is None:  # float16 holds this model
        assert metrics["clients_accepted"] == 5
        return
    assert theta.tensors == expected.tensors
    (reason,) = json.loads(metrics["rejection_reasons"])
    assert words in reason
    assert len(reason) <= 300
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert len(lines[0]) < 350


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        {"train_loss": math.nan},
        {"train_loss": None, "initial_loss": [1.0], "personal_loss": {"a": 1}},
        {"train_loss": 10**400},
        {"train_loss": 10**5000},
        {"train_loss": b"\x00\xff", 7: "seven", None: None},
        {"train_loss": np.float32(1), "other": np.zeros(10)},
        {"train_loss": True, "nested": {"a": [{"b": {}}]}},
        {"a\nb" * 300_000: 1.0, "\x1b[2J": "\ud800"},
        {"train_loss": 1.7e308, "initial_loss": -1.7e308},
    ],
    ids=lambda m: one_line(shown(m))[:40],
)
def test_metrics_of_any_kind_do_no_harm(metrics):
    good = results(model())
    sent = [*good, fit(metrics=metrics), fit(metrics=metrics)]  # the second of two is compared with the first
    s = FedAvg(initial_parameters=initial(), fit_metrics_aggregation_fn=lambda pairs: {"seen": len(pairs)})
    theta, found = s.aggregate_fit(1, sent, [])
    assert (found["clients_accepted"], found["clients_rejected"], found["seen"]) == (5, 1, 5)
    json.dumps(found, allow_nan=False)
    expected = FedAvg(initial_parameters=initial()).aggregate_fit(1, [*good, fit(metrics={})], [])[0]
    assert theta.tensors == expected.tensors


def test_a_required_metric_of_any_kind_costs_the_client_only():
    good = results(model())
    for value in (None, [], {}, "1", b"1", 1j, math.inf, 10**5000, np.zeros(1), [[10**5000]]):
        s = QFedAvg(initial_parameters=initial())
        _, found = s.aggregate_fit(1, [*good, fit(metrics={"initial_loss": value})], [])
        assert found["clients_rejected"] == 1
        assert "initial_loss=" in found["rejection_reasons"]


def test_a_float16_client_of_a_model_that_float16_cannot_hold_is_rejected():
    """Its update would be taken from infinity."""
    start = [np.full(3, 1e5, np.float32)]
    sent = [result(i, [start[0] + i]) for i in range(3)] + [result("half", [np.full(3, 6e4, np.float16)])]
    _, metrics = FedAvg(initial_parameters=ndarrays_to_parameters(start)).aggregate_fit(1, sent, [])
    assert metrics["failed_round"] is False
    assert "too small for the model's values" in metrics["rejection_reasons"]


def test_the_users_function_meets_odd_metrics_without_ending_the_run(caplog):
    def accuracy(pairs):
        return {"accuracy": sum(n * m["accuracy"] for n, m in pairs)}

    s = FedAvg(
        initial_parameters=initial(), fit_metrics_aggregation_fn=accuracy, evaluate_metrics_aggregation_fn=accuracy
    )
    theta, metrics = s.aggregate_fit(1, results(model()), [])
    assert metrics["failed_round"] is False
    assert theta.tensors != initial().tensors
    assert "fit_metrics_aggregation_fn failed" in caplog.text
    assert "KeyError: 'accuracy'" in caplog.text
    sent = [(Proxy("0"), EvaluateRes(Status(Code.OK, ""), 0.5, 3, {"accuracy": "high"}))]
    assert s.aggregate_evaluate(1, sent, []) == (0.5, {})


def test_evaluations_of_any_kind_are_left_out(caplog):
    ok = Status(Code.OK, "")
    odd = [
        EvaluateRes(ok, loss, n, metrics)
        for loss, n, metrics in [
            (math.nan, 5, {}),
            (math.inf, 5, {}),
            ("low", 5, {}),
            (None, 5, {}),
            (1j, 5, {}),
            (10**400, 5, {}),
            (10**5000, 5, {}),
            (np.zeros(2), 5, {}),
            (True, 5, {}),
            (1.0, 10**400, {}),
            (1.0, 2**63, {}),
            (1.0, -5, {}),
            (1.0, None, {}),
            (1.0, "many", {}),
            (1.0, 5.0, {}),
            (1.0, True, {}),
            (1.0, np.zeros(2), {}),
            (1.0, 5, [1]),
        ]
    ]
    odd.append(EvaluateRes(Status(Code.EVALUATE_NOT_IMPLEMENTED, "x\n" * 10**6), 1.0, 5, {}))
    odd.append(EvaluateRes(Status(3, None), 1.0, 5, {}))
    sent = [(Proxy(f"bad-{i}"), res) for i, res in enumerate(odd)]
    sent += [(Proxy("a"), EvaluateRes(ok, 1.0, np.int64(10), None)), (Proxy("b"), EvaluateRes(None, 2, 30, {}))]
    sent += [(Proxy("a"), EvaluateRes(ok, 100.0, 10, {})), (Proxy("c"), EvaluateRes(ok, 0.0, 0, {}))]
    loss, _ = FedAvg().aggregate_evaluate(1, sent, [])
    assert loss == pytest.approx((10 * 1 + 30 * 2) / 40)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(odd) + 1
    assert all(line.isprintable() and len(line) < 350 for line in lines)
    assert "evaluation of client bad-0 is not used: its loss is nan" in caplog.text
    assert FedAvg().aggregate_evaluate(1, sent[: len(odd)], []) == (None, {})
    largest = [(Proxy(str(i)), EvaluateRes(ok, 1.7e308, 2**62, {})) for i in range(9)]
    assert FedAvg().aggregate_evaluate(1, largest, [])[0] == 1.7e308


def test_failures_of_any_kind_are_told_on_one_line(caplog):
    proxy, res = fit(status=Status(Code.FIT_NOT_IMPLEMENTED, "\x1b[31m" + "no\n" * 10**6))
    failures = [
        (proxy, res),
        (proxy, EvaluateRes(None, 0.0, 0, {})),
        (proxy, fit(status=Status(None, None))[1]),
        RuntimeError("x\r\n" * 10**6),
        KeyError(),
    ]
    _, metrics = FedAvg(initial_parameters=initial(), min_completed=1).aggregate_fit(1, results(model()), failures)
    assert metrics["clients_failed"] == 5
    assert all(len(reason) <= 300 and reason.isprintable() for reason in json.loads(metrics["failure_reasons"]))
    assert all(r.getMessage().isprintable() for r in caplog.records)


class Answering(Proxy):
    """A client that says anything of its partition."""

    def __init__(self, cid, answer):
        super().__init__(cid)
        self.answer = answer

    def get_properties(self, ins, timeout, group_id):
        return self.answer


def test_answers_of_any_kind_name_a_partition_or_none():
    ok = Status(Code.OK, "")
    odd = [None, {}, [7], {"partition-id": None}, {"partition-id": "7"}, {"partition-id": True}, {"partition-id": 7.0}]
    clients = [Answering(str(i), GetPropertiesRes(ok, properties)) for i, properties in enumerate(odd)]
    clients += [Answering("status", GetPropertiesRes(None, {"partition-id": 7}))]
    clients += [Answering("good", GetPropertiesRes(ok, {"partition-id": 7}))]
    assert partition_order(clients) == {"good": 7}


@pytest.mark.parametrize("properties", [None, {"partition-id": [0]}, {"partition-id": "0"}])
def test_what_flower_cannot_read_as_properties_names_no_partition(properties):
    content = RecordDict()
    if properties is not None:
        content["getpropertiesres.properties"] = ConfigRecord(properties)
        content["getpropertiesres.status"] = ConfigRecord({"code": 0, "message": ""})

    class Node(Proxy):
        def get_properties(self, ins, timeout, group_id):
            return recorddict_to_getpropertiesres(content)

    assert partition_order([Node("1")]) == {}


def test_replays_count_once():
    """The same reply again, as another object and as the same, and a third one by the same client."""
    good = results(model())
    again = fit(good[0][0].cid)
    expected = {}
    for name, extra in {"none": [], "same": [good[0]] * 3, "equal": [results(model())[0]]}.items():
        theta, metrics = FedAvg(initial_parameters=initial()).aggregate_fit(1, [*good, *extra], [])
        expected[name] = theta.tensors
        assert metrics["clients_rejected"] == len(extra)
    assert expected["none"] == expected["same"] == expected["equal"]
    found = [
        CRAFT(initial_parameters=initial()).aggregate_fit(1, sent, [])[0].tensors
        for sent in ([*good, again], [again, *good])
    ]
    assert found[0] == found[1]
    alone, metrics = FedAvg(initial_parameters=initial()).aggregate_fit(1, [good[0], good[0]], [])
    assert metrics["clients_accepted"] == 1
    assert alone.tensors != initial().tensors


def test_only_one_model_of_several_clients_is_taken_for_secure_aggregation():
    """Neither clients that all send nothing, nor one reply that came twice."""
    nothing = [fit(str(i), parameters=None) for i in range(3)]
    _, metrics = CRAFT(initial_parameters=initial()).aggregate_fit(1, nothing, [])
    assert (metrics["clients_rejected"], metrics["failed_round"]) == (3, True)
    one = fit("0")
    assert CRAFT(initial_parameters=initial()).aggregate_fit(1, [one, one], [])[1]["failed_round"] is False
    shared = [fit(str(i), parameters=one[1].parameters) for i in range(3)]
    assert FedAvg(initial_parameters=initial()).aggregate_fit(1, shared, [])[1]["failed_round"] is False
    with pytest.raises(ValueError, match="clip_to_median needs each client's own update"):
        FedAvg(initial_parameters=initial(), clip_to_median=3).aggregate_fit(1, shared, [])


# ---- what it costs to say no ------------------------------------------------------------------------------------


def peak_of(action) -> int:
    """The most memory that Python and NumPy hold during `action`, beyond what they held before."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header(text, body=b"", version=b"\x01\x00"):
    text = text.encode("latin1") if isinstance(text, str) else text
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + body


def stating(shape, descr="'<f4'", order="False", body=b"\0" * 64, **how):
    return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}", body, **how)


LIES = {
    "ten terabytes": stating((2_500_000_000_000,)),
    "more than there is": stating((17,)),
    "less than there is": stating((15,)),
    "nothing": stating((0,)),
    "negative": stating((-16,)),
    "negative twice": stating((-4, -4)),
    "2^60": stating((2**60,)),
    "2^60 times nothing": stating((2**60, 0), body=b""),
    "wraps to what is there": stating((2**62, 4, 16)),
    "a number for a shape": stating(16),
    "a number in parentheses": stating("(16)"),
    "a list for a shape": stating([16]),
    "True for a number": stating("(True, 16)"),
    "a long integer of Python 2": stating("(16L,)"),
    "hexadecimal": stating("(0x10,)"),
    "leading zeros": stating("(016,)"),
    "underscores": stating("(1_6,)"),
    "a float": stating("(16.0,)"),
    "forty dimensions": stating((1,) * 39 + (16,)),
    "parentheses in parentheses": stating("(" * 1500 + "16" + ")" * 1500),
    "brackets in brackets": header("[" * 4000),
    "minus after minus": stating("(" + "-" * 3000 + "16,)"),
    "a long string": header("'" + "x" * 4000 + "'"),
    "an escape": stating((16,), descr=r"'\x3cf4'"),
    "an invalid escape": stating((16,), descr=r"'\d'"),
    "a comment": header("{'descr': '<f4', 'fortran_order': False, 'shape': (16,), } # }", b"\0" * 64),
    "code": header("__import__('os').abort()", b"\0" * 64),
    "a byte that is no UTF-8": header(b"{'descr': '<f4\xff', 'fortran_order': False, 'shape': (16,), }", b"\0" * 64),
    "NUL": header("{'descr': '<f4', 'fortran_order': False, 'shape': (16,), }\0", b"\0" * 64),
    "a further key": header("{'descr': '<f4', 'fortran_order': False, 'shape': (16,), 'x': 1}", b"\0" * 64),
    "a key twice": header("{'shape': 7, 'descr': '<f4', 'fortran_order': False, 'shape': (16,)}", b"\0" * 64),
    "a missing key": header("{'descr': '<f4', 'shape': (16,), }", b"\0" * 64),
    "empty": header("", b"\0" * 64),
    "version 0": stating((16,), version=b"\x00\x01"),
    "version 3": stating((16,), version=b"\x03\x00"),
    "version 255": stating((16,), version=b"\xff\xff"),
    "a header longer than the data": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{}",
    "a header of a megabyte": header(b" " * 2**20 + b"{}", version=b"\x02\x00"),
    "objects": stating((16,), descr="'|O'", body=b"\x80\x04K\x01." * 20),
    "fields": stating((16,), descr="[('a', '<f4')]"),
    "fields of objects": stating((16,), descr="[('a', '|O')]"),
    "a subarray": stating((8,), descr="('<f4', (2,))"),
    "a subarray in text": stating((8,), descr="'2f4'"),
    "several in text": stating((8,), descr="'f4,f4'"),
    "characters of no width": stating((16,), descr="'<U0'", body=b""),
    "characters": stating((1,), descr="'<U16'"),
    "dates": stating((8,), descr="'<M8[ns]'"),
    "complex numbers": stating((8,), descr="'<c8'"),
    "numbers of 128 bits": stating((4,), descr="'<f16'"),
    "numbers of no width": stating((16,), descr="'<f0'"),
    "numbers of three bytes": stating((16,), descr="'<i3'"),
    "an alias that warns": stating((64,), descr="'a1'"),
    "bytes": stating((16,), descr="b'<f4'"),
    "another order": stating((16,), order="1"),
    "no order": stating((16,), order="None"),
    "only the magic string": b"\x93NUMPY",
    "one byte short of a header": stating((16,))[:60],
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
@pytest.mark.filterwarnings("error")
def test_headers_that_lie_are_refused_within_what_arrived(data):
    def refused():
        with pytest.raises(UnusableTensor) as error:
            decode(data)
        assert len(one_line(str(error.value))) <= 300

    refused()  # whatever is made once
    assert peak_of(refused) < 3 * len(data) + 64_000


def test_nothing_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("executed").write_text, ("x",))

    stream = io.BytesIO()
    np.save(stream, np.array([Evil()], object), allow_pickle=True)
    good = results(model())
    _, metrics = FedAvg(initial_parameters=initial()).aggregate_fit(
        1, [*good, fit(parameters=tensors(stream.getvalue(), *USABLE[1:]))], []
    )
    assert "dtype object is not a number" in metrics["rejection_reasons"]
    assert not tmp_path.joinpath("executed").exists()


class Untouchable(list):
    """A list whose elements must not be looked at."""

    def __iter__(self):
        raise AssertionError("a tensor was looked at")

    __getitem__ = __iter__


def test_a_hundred_thousand_tensors_are_refused_by_their_number():
    many = Untouchable([b""] * 100_000)
    good = results(model())
    sent = [*good, fit(parameters=Parameters(many, "numpy.ndarray"))]
    s = FedAvg(initial_parameters=initial())

    def play():
        _, metrics = s.aggregate_fit(1, sent, [])
        assert "100000 tensors, the model has 4" in metrics["rejection_reasons"]

    play()
    assert peak_of(play) < 400_000


def test_rejecting_costs_no_more_than_what_arrived():
    """Tensors of the right sizes whose last number is NaN: they are read, and not copied."""
    start = [np.zeros(1_000_000, np.float32)]
    spoilt = np.zeros(1_000_000, np.float32)
    spoilt[-1] = np.nan
    proxy, res = result("bad", [spoilt])
    s = FedAvg(initial_parameters=ndarrays_to_parameters(start))

    def play():
        _, metrics = s.aggregate_fit(1, [(proxy, res)], [])
        assert "NaN or Inf" in metrics["rejection_reasons"]

    play()
    assert peak_of(play) < 2_000_000  # the mask of 10^6 booleans; the tensor is 4 MB


def test_texts_of_any_origin_make_one_printable_line():
    for text in ("a\nb\r\tc", "\x1b[2J\x07", "‮reversed", "\ud800", "\0", "x" * 10**7, "\n" * 10**6, ""):
        line = one_line(text)
        assert line.isprintable()
        assert len(line) <= 300
    assert one_line("ρ_i of Zürich, 東京") == "ρ_i of Zürich, 東京"


def test_fednova_gives_nobody_more_than_its_share_for_few_steps():
    start = [np.zeros(4)]
    strategy = FedNova(initial_parameters=ndarrays_to_parameters(start), max_weight_share=0.3, device="cpu")
    sent = [result(i, [np.eye(4)[i]], 10, {"step_weight": 1e-6 if i == 0 else 2.0}) for i in range(4)]
    parameters, _ = strategy.aggregate_fit(1, sent, [])
    (moved,) = arrays_of(parameters)
    assert (moved / moved.sum()).max() == pytest.approx(0.3)


@every_strategy
def test_a_model_of_counters_alone_is_no_reason_to_fail(make):
    start = [np.array(3), np.array([True, False])]
    strategy = make(initial_parameters=ndarrays_to_parameters(start), device="cpu")
    sent = [result(i, [np.array(3 + i), np.array([True, True])]) for i in range(4)]
    parameters, metrics = strategy.aggregate_fit(1, sent, [])
    assert metrics["clients_accepted"] == 4
    assert [a.dtype for a in arrays_of(parameters)] == [np.int64, np.bool_]
