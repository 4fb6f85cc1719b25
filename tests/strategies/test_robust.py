"""FedMedian, FedTrimmedAvg and Krum against NumPy, SciPy, Flower and literal loops, and against a hostile minority."""

import flwr.server.strategy as theirs
import numpy as np
import pytest
import scipy.stats
from flwr.common import ndarrays_to_parameters

from strategies import FedAvg, FedMedian, FedTrimmedAvg, Krum, LayerMap

from .helpers import arrays_of, result
from .layered import LAYERS, SIZE, Client, clients, matrix, parameters, play, start


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_fedmedian_is_the_median_of_each_number(m, device):
    # Yin et al., ICML 2018, definition 1; numbers of examples play no role.
    s = FedMedian(server_lr=0.5, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta = start()
    for number in (1, 2):
        sent = clients(m, number)
        theta, step, _ = play(s, number, theta, sent)
        np.testing.assert_allclose(step, 0.5 * np.median(matrix(sent), axis=0), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("m", [4, 7])
def test_fedmedian_is_flowers(m):
    rng = np.random.default_rng(m)
    shapes = [(4, 3), (5,), ()]
    theta = ndarrays_to_parameters([np.asarray(rng.normal(size=shape)) for shape in shapes])
    sent = [result(i, [np.asarray(rng.normal(size=shape)) for shape in shapes], 5 + i) for i in range(m)]
    ours, _ = FedMedian(initial_parameters=theta).aggregate_fit(1, sent, [])
    flowers, _ = theirs.FedMedian(fit_metrics_aggregation_fn=lambda _: {}).aggregate_fit(1, sent, [])
    for a, b in zip(arrays_of(ours), arrays_of(flowers), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("m", [1, 3, 5, 10, 11])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.2, 0.3, 0.45])
def test_fedtrimmedavg_is_scipys_trimmed_mean(m, beta):
    # Yin et al., definition 2.
    sent = clients(m, 7)
    s = FedTrimmedAvg(beta=beta, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), sent)
    np.testing.assert_allclose(step, scipy.stats.trim_mean(matrix(sent), beta, axis=0), rtol=1e-9, atol=1e-13)


def krum(G, f, k):
    """Blanchard et al., NeurIPS 2017, section 4: the k lowest sums of squared distances to the m − f − 2 nearest."""
    m = len(G)
    scores = []
    for i in range(m):
        distances = sorted(np.sum((G[i] - G[j]) ** 2) for j in range(m) if j != i)
        scores.append(sum(distances[: m - f - 2]))
    return G[np.argsort(scores, kind="stable")[:k]].mean(axis=0)


@pytest.mark.parametrize(("m", "f", "k"), [(7, 2, 1), (9, 0, 1), (9, 3, 1), (10, 2, 4), (5, 1, 1)])
def test_krum_is_the_literal_one(m, f, k, device):
    s = Krum(
        num_malicious_clients=f, num_clients_to_keep=k, layers=LAYERS, initial_parameters=parameters(), device=device
    )
    theta = start()
    for number in (1, 2, 3):
        sent = clients(m, number)
        theta, step, _ = play(s, number, theta, sent)
        np.testing.assert_allclose(step, krum(matrix(sent), f, k), rtol=1e-9, atol=1e-13)


def test_krum_tells_clients_apart_that_share_a_large_offset(device):
    """Updates near 10⁴ that differ by .1, in float32: from inner products of the raw rows in float32 the squared
    distances, of the order 1, are off by more than that, and another client would be chosen.
    """
    rng = np.random.default_rng(0)
    G = (1e4 + 0.1 * rng.normal(size=(8, 400))).astype(np.float32)
    spread = 1 + 0.1 * np.arange(8)[rng.permutation(8), None]
    G = (1e4 + (G - np.float32(1e4)) * spread).astype(np.float32)
    raw = (G**2).sum(axis=1)[:, None] + (G**2).sum(axis=1) - 2 * G @ G.T
    expected = krum(G.astype(np.float64), 1, 1)
    naive = np.sort(raw + np.diag(np.full(8, -np.inf, np.float32)), axis=1)[:, 1:6].sum(axis=1)
    assert not np.array_equal(G[np.argmin(naive)], expected)
    first = ndarrays_to_parameters([np.zeros(400, np.float32)])
    s = Krum(num_malicious_clients=1, initial_parameters=first, device=device)
    theta, _ = s.aggregate_fit(1, [result(i, [g]) for i, g in enumerate(G)], [])
    np.testing.assert_array_equal(arrays_of(theta)[0], expected.astype(np.float32))


@pytest.mark.parametrize("attack", [1e3, -50.0, 1e9])
@pytest.mark.parametrize(
    "make",
    [
        FedMedian,
        lambda **k: FedTrimmedAvg(beta=0.24, **k),
        lambda **k: Krum(num_malicious_clients=3, **k),
        lambda **k: Krum(num_malicious_clients=3, num_clients_to_keep=5, **k),
    ],
    ids=["median", "trimmed", "krum", "multi-krum"],
)
def test_a_hostile_minority_cannot_move_the_model_out_of_the_honest_range(make, attack):
    """Three of thirteen clients send anything, with huge numbers of examples; FedAvg follows them."""
    rng = np.random.default_rng(5)
    sent = clients(13, 5, common=1.0)
    honest = matrix({cid: sent[cid] for cid in sent if cid not in ("2", "6", "11")})
    for cid in ("2", "6", "11"):
        sent[cid] = Client(attack * (1 + 0.01 * rng.normal(size=SIZE)), 100_000)
    _, step, _ = play(make(layers=LAYERS, initial_parameters=parameters()), 1, start(), sent)
    low, high = honest.min(axis=0), honest.max(axis=0)
    slack = 1e-9 + 1e-12 * abs(attack)
    assert (step >= low - slack).all()
    assert (step <= high + slack).all()
    _, followed, _ = play(FedAvg(layers=LAYERS, initial_parameters=parameters()), 1, start(), sent)
    assert np.abs(followed).max() > 0.9 * abs(attack)


@pytest.mark.parametrize(
    "make",
    [FedMedian, lambda **k: FedTrimmedAvg(beta=0.25, **k), lambda **k: Krum(num_malicious_clients=3, **k)],
    ids=["fedmedian", "fedtrimmedavg", "krum"],
)
def test_a_hostile_minority_reaches_no_running_statistics_and_no_counter(make):
    names = ["fc.weight", "bn.running_var", "bn.num_batches_tracked"]
    start = [np.zeros((3, 2)), np.ones(3), np.array(0)]
    layers = LayerMap.from_names(names, [a.shape for a in start])
    rng = np.random.default_rng(0)
    sent = [result(i, [rng.normal(size=(3, 2)), np.full(3, 1 + i / 10), np.array(5 + i)], 10) for i in range(10)]
    sent += [result(10 + i, [np.full((3, 2), 1e6), np.full(3, 1e9), np.array(2**60)], 10**9) for i in range(3)]
    s = make(layers=layers, initial_parameters=ndarrays_to_parameters(start))
    _, var, count = arrays_of(s.aggregate_fit(1, sent, [])[0])
    assert ((var >= 1) & (var <= 1.9)).all()
    assert 5 <= count <= 14


def test_krum_refuses_a_round_that_its_malicious_clients_could_win():
    s = Krum(num_malicious_clients=2, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    _, metrics = s.aggregate_fit(1, [result(i, [np.full(2, i + 1.0)]) for i in range(6)], [])
    assert metrics["failed_round"] is True
    assert "needs 7 clients" in metrics["failed_reason"]
    _, metrics = s.aggregate_fit(2, [result(i, [np.full(2, i + 1.0)]) for i in range(7)], [])
    assert metrics["failed_round"] is False


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (FedTrimmedAvg, {"beta": 0.5}, "beta"),
        (FedTrimmedAvg, {"beta": -0.1}, "beta"),
        (Krum, {"num_malicious_clients": -1}, "num_malicious_clients"),
        (Krum, {"num_clients_to_keep": 0}, "num_clients_to_keep"),
    ],
)
def test_options_out_of_range_are_named(make, options, name):
    with pytest.raises(ValueError, match=name):
        make(**options)


@pytest.mark.parametrize("shift", [1e6, 1e8, 1e12])
def test_krum_is_not_blinded_by_one_that_is_far_off(shift):
    rng = np.random.default_rng(int(np.log10(shift)))
    G = rng.normal(0, 1e-2, (9, 40))
    G[4] += shift
    s = Krum(num_malicious_clients=1, initial_parameters=ndarrays_to_parameters([np.zeros(40)]))
    theta, _ = s.aggregate_fit(1, [result(i, [g]) for i, g in enumerate(G)], [])
    np.testing.assert_allclose(arrays_of(theta)[0], krum(G, 1, 1), rtol=1e-12)


@pytest.mark.parametrize("m", [1, 2, 4, 6, 20])
def test_almost_half_cut_off_at_each_end_is_the_median(m):
    start = ndarrays_to_parameters([np.zeros(3)])
    sent = [result(i, [g]) for i, g in enumerate(np.random.default_rng(m).normal(size=(m, 3)))]
    one, _ = FedTrimmedAvg(beta=0.49999999999999, initial_parameters=start).aggregate_fit(1, sent, [])
    two, _ = FedMedian(initial_parameters=start).aggregate_fit(1, sent, [])
    assert one.tensors == two.tensors
