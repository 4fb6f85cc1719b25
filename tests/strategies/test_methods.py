"""CRAFT, FedAvg and FedAvgM against their formulas, worked out here or by another library."""

import flwr.server.strategy
import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters

from client_apps import models
from strategies import CRAFT, FedAvg, FedAvgM, LayerMap

from .helpers import arrays_of, initial, model, result, results


def test_fedavg_is_flowers_fedavg(device):
    sent = results(model())
    ours, metrics = FedAvg(initial_parameters=initial(), device=device).aggregate_fit(1, sent, [])
    theirs, _ = flwr.server.strategy.FedAvg(fit_metrics_aggregation_fn=lambda m: {}).aggregate_fit(1, sent, [])
    for a, b in zip(arrays_of(ours)[:3], arrays_of(theirs)[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert metrics["cosine_to_mean"] == pytest.approx(1)
    assert metrics["clients_accepted"] == 4


def test_fedavg_by_hand():
    start = [np.array([0.0, 0.0], np.float32)]
    sent = [result(0, [np.array([1, 0], np.float32)], 30), result(1, [np.array([0, 2], np.float32)], 10)]
    theta, metrics = FedAvg(initial_parameters=ndarrays_to_parameters(start), server_lr=2.0).aggregate_fit(1, sent, [])
    np.testing.assert_allclose(arrays_of(theta)[0], [1.5, 1.0], rtol=1e-7)
    assert metrics["direction_norm"] == pytest.approx(np.hypot(0.75, 0.5))
    # min over clients of ⟨u_i, ḡ⟩
    assert metrics["min_alignment"] == pytest.approx(0.5)
    assert metrics["conflict_share_before"] == metrics["conflict_share_after"] == 0


def test_fedavgm_by_hand():
    # v1 = g1 = 1, θ1 = 1; v2 = .5·1 + (3 − 1) = 2.5, θ2 = 3.5.
    s = FedAvgM(server_momentum=0.5, initial_parameters=ndarrays_to_parameters([np.zeros(1)]), min_completed=1)
    one, _ = s.aggregate_fit(1, [result(0, [np.ones(1)])], [])
    assert arrays_of(one)[0] == pytest.approx([1.0])
    two, _ = s.aggregate_fit(2, [result(0, [np.full(1, 3.0)])], [])
    assert arrays_of(two)[0] == pytest.approx([3.5])


def test_fedavgm_without_momentum_is_fedavg():
    sent = results(model())
    one, _ = FedAvgM(server_momentum=0.0, initial_parameters=initial()).aggregate_fit(1, sent, [])
    two, _ = FedAvg(initial_parameters=initial()).aggregate_fit(1, sent, [])
    assert one.tensors == two.tensors


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_craft_is_its_formula_layer_by_layer(scale, device):
    """Two rounds against float64 pseudo-inverses written out here."""
    rng = np.random.default_rng(0)
    names = ["a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight"]
    shapes = [(5, 4), (5,), (5,), (5,), (2, 5)]
    theta = [rng.normal(size=s).astype(np.float32) for s in shapes]
    groups = [[0, 1, 2, 3], [4]]
    s = CRAFT(
        layers=LayerMap.from_names(names, shapes),
        initial_parameters=ndarrays_to_parameters(theta),
        server_lr=0.5,
        server_lr_decay=0.9,
        scale=scale,
        device=device,
    )
    rho = np.array([0.2, 0.3, 0.5])
    previous = [None, None]
    for number in (1, 2):
        sent = [[(a + 0.1 * rng.normal(size=a.shape)).astype(np.float32) for a in theta] for _ in range(3)]
        parameters, metrics = s.aggregate_fit(
            number, [result(i, a, n) for i, (a, n) in enumerate(zip(sent, (20, 30, 50), strict=True))], []
        )
        expected = [a.astype(np.float64) for a in theta]
        for q, tensors in enumerate(groups):
            flat = [np.concatenate([c[t].astype(np.float64).ravel() for t in tensors]) for c in [*sent, theta]]
            G = np.stack(flat[:-1]) - flat[-1]
            norms = np.linalg.norm(G, axis=1)
            U = G / norms[:, None]
            ghat = np.zeros(G.shape[1]) if previous[q] is None else previous[q] / np.linalg.norm(previous[q])
            g = ghat + np.linalg.pinv(U) @ (rho - U @ ghat)
            if scale == "mean_norm":
                g = g / np.linalg.norm(g) * (rho @ norms)
            previous[q] = g
            offset = 0
            for t in tensors:
                part = g[offset : offset + theta[t].size].reshape(theta[t].shape)
                expected[t] = expected[t] + 0.5 * 0.9 ** (number - 1) * part
                offset += theta[t].size
        theta = arrays_of(parameters)
        for a, b in zip(theta, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert metrics["residual"] < 1e-9
        assert metrics["rank"] == 3
        assert metrics["conflict_share_after"] == 0
    if scale == "raw":
        assert metrics["min_alignment"] == pytest.approx(0.2, rel=1e-6)


def test_craft_on_a_resnet_20_is_a_float64_pseudo_inverse_per_module(device):
    """Two rounds over the 20 layers and 269,722 parameters of the authors' model."""
    torch.manual_seed(0)
    module = models.build({"name": "resnet", "depth": 20, "norm": "group"}, channels=3, side=32, num_classes=10)
    theta = [t.numpy() for t in module.state_dict().values()]
    layers, m, rng = LayerMap.from_module(module), 8, np.random.default_rng(0)
    sizes = rng.integers(5, 50, size=m)
    rho = sizes / sizes.sum()
    s = CRAFT(layers=layers, initial_parameters=ndarrays_to_parameters(theta), device=device)
    previous: dict[str, np.ndarray] = {}
    for number in (1, 2):
        sent = [[a + rng.normal(scale=0.01, size=a.shape).astype(np.float32) for a in theta] for _ in range(m)]
        results_ = [result(i, a, int(n)) for i, (a, n) in enumerate(zip(sent, sizes, strict=True))]
        after = arrays_of(s.aggregate_fit(number, results_, [])[0])
        for layer in layers.layers:
            rows = [np.concatenate([c[t].ravel().astype(np.float64) for t in layer.tensors]) for c in [*sent, theta]]
            U = np.stack(rows[:-1]) - rows[-1]
            U /= np.linalg.norm(U, axis=1, keepdims=True)
            ghat = previous.get(layer.name, np.zeros(layer.size))
            g = ghat + np.linalg.pinv(U, rcond=1e-10) @ (rho - U @ ghat)
            previous[layer.name] = g / np.linalg.norm(g)
            moved = np.concatenate([after[t].ravel() for t in layer.tensors])
            np.testing.assert_allclose(moved, rows[-1] + 0.1 * g, rtol=1e-5, atol=1e-7)
        theta = after


def test_craft_resolves_a_conflict_that_the_mean_leaves():
    # Client 1 has a tenth of the data and pulls the other way; the mean hurts it, CRAFT does not.
    start = ndarrays_to_parameters([np.zeros(2, np.float32)])
    sent = [result(0, [np.array([1.0, 0.1], np.float32)], 90), result(1, [np.array([-1.0, 0.1], np.float32)], 10)]
    _, mean = FedAvg(initial_parameters=start).aggregate_fit(1, sent, [])
    _, ours = CRAFT(initial_parameters=start).aggregate_fit(1, sent, [])
    assert mean["conflict_share_before"] == mean["conflict_share_after"] == 0.5
    assert ours["conflict_share_before"] == 0.5
    assert ours["conflict_share_after"] == 0
    assert ours["min_alignment"] == pytest.approx(0.1, rel=1e-6)


def test_one_client_is_solved_like_any_other():
    # The formula, not the client's raw update: length ρ = 1 along it.
    start = [np.zeros(3, np.float32)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), server_lr=1.0)
    theta, _ = s.aggregate_fit(1, [result(0, [np.array([0, 30, 40], np.float32)])], [])
    np.testing.assert_allclose(arrays_of(theta)[0], [0, 0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_opposite_clients_with_equal_shares_do_not_move_the_model_by_rounding(scale, device):
    rng = np.random.default_rng(3)
    v, w = rng.normal(size=(2, 50))
    start = ndarrays_to_parameters([np.zeros(50)])
    s = CRAFT(initial_parameters=start, scale=scale, server_lr=1.0, device=device)
    theta, _ = s.aggregate_fit(1, [result(i, [g]) for i, g in enumerate((v, -1.1 * v, 1.2 * w, -1.3 * w))], [])
    np.testing.assert_array_equal(arrays_of(theta)[0], 0)
    # Nothing was learnt, so the next round starts without a reference: one client alone gives its unit update.
    theta, _ = s.aggregate_fit(2, [result(0, [v])], [])
    expected = v / np.linalg.norm(v) if scale == "raw" else v
    np.testing.assert_allclose(arrays_of(theta)[0], expected, rtol=1e-9)


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_a_layer_that_nobody_changed_stays_and_keeps_its_reference(scale):
    start = [np.zeros(3), np.zeros(2)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), scale=scale, server_lr=1.0)
    one, _ = s.aggregate_fit(1, [result(0, [np.ones(3), np.ones(2)])], [])
    kept = s.memory["reference/tensor1"].clone()
    now = arrays_of(one)
    two, metrics = s.aggregate_fit(2, [result(0, [now[0] + 1, now[1]])], [])
    np.testing.assert_array_equal(arrays_of(two)[1], now[1])
    assert torch.equal(s.memory["reference/tensor1"], kept)
    assert metrics["rank"] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_clients_with_narrower_numbers_do_not_move_what_they_leave(dtype):
    """A float64 model that float32 clients return untouched has updates of zero, not of rounding errors."""
    start = [np.random.default_rng(0).normal(size=20), np.random.default_rng(1).normal(size=5)]
    s = CRAFT(initial_parameters=ndarrays_to_parameters(start), server_lr=1.0)
    sent = [[(start[0] + i + 1).astype(dtype), start[1].astype(dtype)] for i in range(2)]
    sent.append([start[0] - 1, start[1]])  # and one in full
    theta = arrays_of(s.aggregate_fit(1, [result(i, a) for i, a in enumerate(sent)], [])[0])
    np.testing.assert_array_equal(theta[1], start[1])
    assert theta[0].dtype == np.float64
    assert not np.array_equal(theta[0], start[0])
