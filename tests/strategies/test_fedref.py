"""FedRef against float64 NumPy, work by hand, and its limits; schedule, gate, window, proxy data, resumption."""

import json
import math
import re

import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import FedAvg, FedRef, LayerMap
from strategies.solvers import fedref

from .helpers import arrays_of, manager, model, result, trained

KINDS = ["closed", "gradient"]


def strategy(start, *, cls=FedRef, **options):
    return cls(initial_parameters=ndarrays_to_parameters(start), min_completed=1, **options)


def rounds(s, start, count, *, first=1, clients=3, losses=None, seed=1):
    """Run rounds of clients that move from whatever model they get; return every model and every round's metrics."""
    models, told, current = [], [], start
    for number in range(first, first + count):
        sent = trained(current, clients, seed=[seed, number])
        metrics = None if losses is None else {"train_loss": losses[number - 1]}
        parameters, of_round = s.aggregate_fit(
            number, [result(i, a, 10 * (i + 1), metrics) for i, a in enumerate(sent)], []
        )
        current = arrays_of(parameters)
        models.append(current)
        told.append(of_round)
    return models, told


def simulated(start, count, *, window, lambda_global, lambda_of, eta=1.0, clients=3, seed=1):
    """FedRef of the trainable tensors in float64 NumPy, written from the formula; models rounded as they are kept."""
    past, current = [], [np.asarray(a) for a in start]
    out = []
    for number in range(1, count + 1):
        sent = trained(current, clients, seed=[seed, number])
        rho = np.array([10.0 * (i + 1) for i in range(clients)])
        rho /= rho.sum()
        lam = lambda_of(number)
        new = []
        for t, a in enumerate(current):
            if a.dtype.kind != "f":
                new.append(np.maximum.reduce([s[t] for s in sent]))
                continue
            mean = sum(r * s[t].astype(np.float64) for r, s in zip(rho, sent, strict=True))
            if len(past) >= window:
                recent = past[-window:][::-1]  # newest first
                w = np.array([window - i for i in range(window)], dtype=np.float64)
                reference = sum(x * m[t].astype(np.float64) for x, m in zip(w / w.sum(), recent, strict=True))
                mean = (mean / eta + lambda_global * a.astype(np.float64) + lam * reference) / (
                    1 / eta + lambda_global + lam
                )
            new.append(np.asarray(mean).astype(a.dtype))
        current = new
        past.append(new)
        out.append(new)
    return out


def assert_close(found, expected, rtol=1e-6, atol=1e-7):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# ---- the solver --------------------------------------------------------------------------------------------


def test_the_newest_model_weighs_most():
    assert fedref.reference_weights(3) == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    newest, middle, oldest = torch.tensor([6.0]), torch.tensor([12.0]), torch.tensor([18.0])
    assert fedref.reference([newest, middle, oldest]).tolist() == pytest.approx([3 + 4 + 3])
    assert fedref.reference([newest]).dtype == torch.float64


def test_without_a_model_there_is_no_reference():
    with pytest.raises(ValueError, match="one past model or more, not 0"):
        fedref.reference_weights(0)


def test_map_estimate_by_hand(device):
    # (10/.5 + 1 * 4 + 2 * 1) / (1/.5 + 1 + 2) = 26 / 5
    found = fedref.map_estimate(
        *(torch.tensor([x], device=device) for x in (10.0, 4.0, 1.0)), eta=0.5, lambda_global=1, lambda_ref=2
    )
    assert found.tolist() == pytest.approx([5.2])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form_is_the_gradient_solution_and_where_the_gradient_vanishes(seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    a, p, r = (torch.randn(50, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3))
    options = {"eta": 0.3 + seed, "lambda_global": 0.2 * seed, "lambda_ref": 1.5}
    closed = fedref.map_estimate(a, p, r, **options)
    # The objective's gradient in float64 NumPy is zero there ...
    x, a64, p64, r64 = (t.double().cpu().numpy() for t in (closed, a, p, r))
    gradient = (x - a64) / options["eta"] + options["lambda_global"] * (x - p64) + options["lambda_ref"] * (x - r64)
    np.testing.assert_allclose(gradient, 0, atol=1e-13 * (1 + np.abs(x).max()))
    # ... and gradient steps, of any length that converges, end there.
    limit = fedref.largest_step(**options)
    for share in (0.1, 0.5, 0.9):
        found = fedref.descend(a, p, r, steps=400, lr=share * limit, **options)
        torch.testing.assert_close(found, closed, rtol=1e-10, atol=1e-12)
    # Half the limit is Newton's step: one is enough.
    torch.testing.assert_close(fedref.descend(a, p, r, steps=1, lr=limit / 2, **options), closed)


def test_gradient_steps_beyond_the_limit_leave():
    a, p, r = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.0, 0.0))
    options = {"eta": 1.0, "lambda_global": 0.5, "lambda_ref": 0.5}
    found = fedref.descend(a, p, r, steps=100, lr=1.05 * fedref.largest_step(**options), **options)
    assert abs(float(found)) > 1e3


def test_gradient_steps_close_in_by_the_factor_stated():
    a, p, r = (torch.tensor([x], dtype=torch.float64) for x in (3.0, 1.0, -2.0))
    options = {"eta": 2.0, "lambda_global": 0.25, "lambda_ref": 0.75}
    goal = fedref.map_estimate(a, p, r, **options)
    factor = abs(1 - 0.4 * (1 / 2 + 0.25 + 0.75))
    for steps in (1, 2, 5):
        found = fedref.descend(a, p, r, steps=steps, lr=0.4, **options)
        assert float(abs(found - goal)) == pytest.approx(factor**steps * float(abs(a - goal)))


def test_without_priors_the_estimate_is_the_aggregate_bit_for_bit():
    a = torch.randn(1000, dtype=torch.float64)
    far = torch.full_like(a, 1e300)
    for eta in (1e-9, 0.3, 1.0, 7e8):
        assert torch.equal(fedref.map_estimate(a, far, far, eta=eta, lambda_global=0, lambda_ref=0), a)


def test_an_infinite_pull_gives_the_reference():
    a, p, r = (torch.randn(100, dtype=torch.float64) for _ in range(3))
    found = fedref.map_estimate(a, p, r, eta=1.0, lambda_global=0.5, lambda_ref=1e300)
    torch.testing.assert_close(found, r, rtol=0, atol=1e-12)
    assert torch.equal(fedref.map_estimate(a, p, r, eta=1.0, lambda_global=0.5, lambda_ref=math.inf), r)
    assert torch.equal(fedref.map_estimate(a, p, r, eta=1.0, lambda_global=math.inf, lambda_ref=0.5), p)
    found = fedref.map_estimate(a, p, r, eta=1e-300, lambda_global=1e-5, lambda_ref=0)  # no overflow of 1/eta + ...
    torch.testing.assert_close(found, a)


def test_models_of_two_shapes_are_refused():
    one, other = torch.ones(3), torch.ones(1)
    options = {"eta": 1.0, "lambda_global": 0.1, "lambda_ref": 0.1}
    with pytest.raises(ValueError, match=r"one shape, not \(3,\) and \(1,\)"):
        fedref.reference([one, other])
    with pytest.raises(ValueError, match="one shape"):
        fedref.map_estimate(one, other, one, **options)
    with pytest.raises(ValueError, match="one shape"):
        fedref.descend(one, one, other, steps=1, lr=0.1, **options)


def test_a_reference_of_many_blocks_and_of_any_layout(monkeypatch):
    monkeypatch.setattr(fedref, "_BLOCK", 7)
    models = [torch.randn(10, 5, dtype=torch.float64).T for _ in range(3)]
    found = fedref.reference([m.float() for m in models])
    torch.testing.assert_close(found, (3 * models[0] + 2 * models[1] + models[2]) / 6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"eta": 0.0}, "eta"), ({"eta": math.inf}, "eta"), ({"eta": math.nan}, "eta"),
        ({"lambda_global": -1.0}, "lambda_global"), ({"lambda_ref": math.nan}, "lambda_ref"),
    ],
)  # fmt: skip
def test_the_solver_names_a_bad_option(options, named):
    x = torch.ones(2)
    with pytest.raises(ValueError, match=f"^{named}="):
        fedref.map_estimate(x, x, x, **{"eta": 1.0, "lambda_global": 0.1, "lambda_ref": 0.1, **options})


# ---- whole rounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_rounds_follow_the_formula(window, eta, device):
    start = model()
    options = {"window": window, "lambda_global": 0.3, "lambda_ref": 0.7, "eta": eta}
    found, told = rounds(strategy(start, device=device, **options), start, 8)
    expected = simulated(start, 8, window=window, lambda_global=0.3, lambda_of=lambda _: 0.7, eta=eta)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    assert [m["fine_tuned"] for m in told] == [0.0] * window + [1.0] * (8 - window)


def test_gradient_rounds_are_the_closed_form(device):
    start = model()
    options = {"window": 2, "lambda_global": 0.3, "lambda_ref": 0.7, "ref_max": 0.7, "device": device}
    closed, _ = rounds(strategy(start, **options), start, 6)
    steps, _ = rounds(strategy(start, solver="gradient", server_steps=200, server_lr=0.4, **options), start, 6)
    few, _ = rounds(strategy(start, solver="gradient", server_steps=1, server_lr=0.1, **options), start, 6)
    for a, b in zip(steps, closed, strict=True):
        assert_close(a, b)
    assert not np.allclose(few[-1][0], closed[-1][0], rtol=1e-3)


def test_gradient_steps_get_shorter_by_the_decay():
    start = [np.zeros(2, dtype=np.float32)]
    s = strategy(
        start, window=1, lambda_global=0.0, lambda_ref=0.5, solver="gradient", server_steps=1, server_lr=0.4,
        server_lr_decay=0.5,
    )  # fmt: skip
    (first,), _ = rounds(s, start, 1)
    (second,), _ = rounds(s, first, 1, first=2)
    # θ_ref = θ_r here: one step of .4/2 from θ_agg on .5/2 ‖θ − θ_r‖², whose other half vanishes at θ_agg.
    sent = trained(first, 3, seed=[1, 2])
    mean = sum(w * c[0].astype(np.float64) for w, c in zip((1 / 6, 2 / 6, 3 / 6), sent, strict=True))
    np.testing.assert_allclose(second[0], mean - 0.2 * 0.5 * (mean - first[0]), rtol=1e-6)


def test_the_step_by_default():
    assert FedRef().server_lr == 1.0
    assert FedRef(solver="gradient", lambda_global=1.0, lambda_ref=2.0).server_lr == pytest.approx(1 / 4)
    grown = FedRef(solver="gradient", lambda_ref=0.1, ref_growth=10.0, ref_max=4.0)
    assert grown.server_lr == pytest.approx(1 / 5)
    start = model()
    options = {"window": 1, "lambda_global": 3.0, "lambda_ref": 5.0}
    closed, _ = rounds(strategy(start, **options), start, 4)
    steps, _ = rounds(strategy(start, solver="gradient", **options), start, 4)
    assert_close(steps[-1], closed[-1])


@pytest.mark.parametrize("solver", KINDS)
@pytest.mark.parametrize("layers", [False, True])
def test_without_priors_it_is_fedavg_bit_for_bit(solver, layers):
    start = model()
    shapes = [a.shape for a in start]
    given = {"layers": LayerMap.from_names(["a.weight", "a.bias", "b.weight", "b.count"], shapes)} if layers else {}
    fedavg, _ = rounds(strategy(start, cls=FedAvg, **given), start, 6)
    ours, told = rounds(strategy(start, window=2, lambda_global=0.0, lambda_ref=0.0, solver=solver, **given), start, 6)
    assert told[-1]["fine_tuned"] == 1.0
    for a, b in zip(ours, fedavg, strict=True):
        assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def test_the_first_rounds_are_fedavg_bit_for_bit_then_no_longer():
    start = model()
    fedavg, _ = rounds(strategy(start, cls=FedAvg), start, 4)
    ours, _ = rounds(strategy(start, window=3, lambda_ref=5.0, ref_max=5.0), start, 4)
    for a, b in zip(ours[:3], fedavg[:3], strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.allclose(ours[3][0], fedavg[3][0])


@pytest.mark.parametrize("pull", [1e12, math.inf])
def test_with_an_infinite_pull_the_model_becomes_the_reference(pull):
    start = model()
    found, _ = rounds(strategy(start, window=3, lambda_ref=pull), start, 4)
    expected = [(3 * c + 2 * b + 1 * a) / 6 for a, b, c in zip(*found[:3], strict=True)]
    for i in range(3):
        np.testing.assert_allclose(found[3][i], expected[i], rtol=1e-5, atol=1e-6)


def test_with_a_window_of_one_the_pull_is_to_the_model_the_clients_got():
    start = model()
    by_reference, _ = rounds(strategy(start, window=1, lambda_global=0.0, lambda_ref=0.6, ref_max=0.6), start, 5)
    by_global, _ = rounds(strategy(start, window=1, lambda_global=0.6, lambda_ref=0.0), start, 5)
    for a, b in zip(by_reference, by_global, strict=True):
        assert_close(a, b)


def test_a_wide_model_keeps_its_digits_in_the_window():
    start = [np.array([1.0, 2.0]) + 1e-12]
    s = strategy(start, window=1, lambda_ref=1e15, ref_max=1e15)
    found, _ = rounds(s, start, 2)
    assert found[0][0].dtype == np.float64
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-14)
    assert [rows.dtype for rows in s.memory.values()] == [torch.float64]


def test_a_failed_round_is_not_in_the_window():
    start = model()
    s = strategy(start, window=2, lambda_ref=0.5)
    rounds(s, start, 1)
    s.aggregate_fit(2, [], [])
    before = {k: v.clone() for k, v in s.memory.items()}
    assert s.records["window"]["count"] == 1
    s.aggregate_fit(3, [], [])
    assert all(torch.equal(s.memory[k], v) for k, v in before.items())


def test_the_ratio_reported_is_that_of_pull_and_aggregate_step():
    start = model()
    s = strategy(start, window=2, lambda_global=0.3, lambda_ref=0.7, ref_max=0.7)
    found, _ = rounds(s, start, 3)
    sent = trained(found[-1], 3, seed=[1, 4])
    _, told = s.aggregate_fit(4, [result(i, a, 10 * (i + 1)) for i, a in enumerate(sent)], [])
    rho, pull, step = np.array([1, 2, 3]) / 6, 0.0, 0.0
    for t in range(3):
        now = found[-1][t].astype(np.float64)
        reference = (2 * found[-1][t].astype(np.float64) + found[-2][t]) / 3
        mean = sum(r * (c[t].astype(np.float64) - now) for r, c in zip(rho, sent, strict=True))
        pull += np.sum((0.7 / 2.0 * (reference - now)) ** 2)
        step += np.sum((1 / 2.0 * mean) ** 2)
    assert told["reference_ratio"] == pytest.approx(math.sqrt(pull / step), rel=1e-5)
    assert told["lambda_ref"] == 0.7


# ---- schedule and gate -------------------------------------------------------------------------------------


def test_the_schedule_by_hand():
    s = FedRef(lambda_ref=1e-3, ref_every=10, ref_growth=10.0, ref_max=0.05)
    assert [s.lambda_in(n) for n in (1, 10, 11, 20)] == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
    assert [s.lambda_in(n) for n in (21, 30, 10**9)] == [0.05] * 3  # capped, not overflowing
    assert FedRef(lambda_ref=0.2, ref_growth=1.0, ref_max=9.0).lambda_in(10**6) == 0.2
    assert FedRef(lambda_ref=1e6).lambda_in(1) == FedRef(lambda_ref=1e6).lambda_in(500) == 1e6  # no cap by default
    assert FedRef(lambda_ref=0.2, ref_max=0.05).lambda_in(1) == 0.05
    assert FedRef(lambda_ref=0.2, ref_max=0.0).lambda_in(1) == 0.0
    assert math.isfinite(FedRef(lambda_ref=0.2, ref_growth=10.0).lambda_in(10**9))
    assert FedRef(lambda_ref=0.0, ref_growth=10.0).lambda_in(100) == 0.0


def test_rounds_follow_the_schedule():
    start = model()
    s = strategy(start, window=1, lambda_global=0.0, lambda_ref=0.1, ref_every=2, ref_growth=3.0, ref_max=0.5)
    found, told = rounds(s, start, 7)
    lambdas = [0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 0.5]
    assert [m["lambda_ref"] for m in told] == pytest.approx(lambdas)
    expected = simulated(start, 7, window=1, lambda_global=0.0, lambda_of=lambda n: lambdas[n - 1])
    assert_close(found[-1], expected[-1])


def test_the_gate_opens_where_the_loss_rose_by_more_than_delta():
    start = model()
    losses = [5.0, 5.2, 5.1, 5.7, 5.7, 6.0, 3.0, 3.5]  # the last rise is above the round before only
    s = strategy(start, window=1, gate="loss", gate_delta=0.25, lambda_ref=1.0)
    found, told = rounds(s, start, 8, losses=losses)
    assert [m["fine_tuned"] for m in told] == [0, 0, 0, 1, 0, 1, 0, 1]
    fedavg, _ = rounds(strategy(start, cls=FedAvg), start, 3)
    assert all(np.array_equal(x, y) for x, y in zip(found[2], fedavg[2], strict=True))


def test_the_gate_needs_the_clients_loss_and_the_other_one_does_not():
    start = model()
    sent = [result(i, a, metrics={"train_loss": None}) for i, a in enumerate(trained(start, 3))]
    s = strategy(start, gate="loss", max_failed_rounds=2)
    _, told = s.aggregate_fit(1, sent, [])
    assert told["failed_round"]
    assert "train_loss" in json.loads(told["rejection_reasons"])[0]
    _, told = strategy(start).aggregate_fit(1, sent, [])
    assert told["clients_accepted"] == 3


# ---- state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 4, 7])
@pytest.mark.parametrize("on_disk", [False, True])
def test_resumed_mid_schedule_it_goes_on_bit_for_bit(at, on_disk, device):
    start = model()
    options = {
        "window": 3, "lambda_global": 0.1, "lambda_ref": 0.1, "ref_every": 2, "ref_growth": 2.0, "gate": "loss",
        "device": device, "window_memory_mb": 0 if on_disk else 100,
    }  # fmt: skip
    losses = [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0]
    whole, told = rounds(strategy(start, **options), start, 9, losses=losses)
    assert sum(m["fine_tuned"] for m in told) >= 3
    first = strategy(start, **options)
    half, _ = rounds(first, start, at, losses=losses)
    state = first.state_dict()
    rest = strategy(half[-1], **options)
    rest.load_state_dict({**json.loads(json.dumps({k: v for k, v in state.items() if k != "memory"})),
                          "memory": state["memory"]})  # fmt: skip
    found, again = rounds(rest, half[-1], 9 - at, first=at + 1, losses=losses)
    assert all(np.array_equal(x, y) for x, y in zip(found[-1], whole[-1], strict=True))
    keys = ("lambda_ref", "fine_tuned", "direction_norm")
    assert [[m[k] for k in keys] for m in again] == [[m[k] for k in keys] for m in told[at:]]


@pytest.mark.parametrize("newest", [0, 2, 3])
def test_a_ring_that_holds_rows_nobody_wrote_is_refused(newest):
    start = model()
    s = strategy(start, window=4)
    rounds(s, start, 2)
    state = s.state_dict()
    strategy(start, window=4).load_state_dict(state)
    state["records"]["window"] = {"count": 2, "newest": newest}
    with pytest.raises(ValueError, match="window of 4 models"):
        strategy(start, window=4).load_state_dict(state)


def test_a_model_of_counters_only_is_saved_and_loaded():
    start = [np.array([3], dtype=np.int64)]
    s = strategy(start, window=2)
    rounds(s, start, 3)
    strategy(start, window=2).load_state_dict(s.state_dict())


def test_a_model_that_gets_wider_keeps_its_digits():
    start = [np.array([1.0, 2.0], dtype=np.float32)]
    s = strategy(start, window=2)
    rounds(s, start, 2)
    wide = ndarrays_to_parameters([np.array([1e50, 2.0])])
    s.configure_fit(3, wide, manager(["0", "1"]))
    rounds(s, arrays_of(wide), 1, first=3)
    assert all(bool(torch.isfinite(rows).all()) for rows in s.memory.values())


def test_a_window_that_no_machine_holds_is_refused_before_clients_train():
    s = strategy(model(), window=10**15)
    with pytest.raises(ValueError, match="window=1000000000000000 models of this size"):
        s.configure_fit(1, s.initial_parameters, manager(["0", "1"]))


def test_a_proxy_of_another_shape_is_refused_before_clients_train():
    net, _, given = proxy()
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    s = strategy(start, **{**given, "proxy_model": nn.Linear(4, 2)})
    with pytest.raises(ValueError, match="proxy_model has shape"):
        s.configure_fit(1, s.initial_parameters, manager(["0", "1"]))


def test_a_window_of_another_length_is_refused():
    start = model()
    s = strategy(start, window=3)
    rounds(s, start, 2)
    with pytest.raises(ValueError, match="window of 2 models"):
        strategy(start, window=2).load_state_dict(s.state_dict())


# ---- the window --------------------------------------------------------------------------------------------


def test_the_window_is_one_allocation_that_is_written_in_place():
    start = model()
    s = strategy(start, window=3)
    rounds(s, start, 1)
    where = {k: v.data_ptr() for k, v in s.memory.items()}
    rounds(s, start, 6, first=2)
    assert {k: v.data_ptr() for k, v in s.memory.items()} == where
    assert all(v.dtype == torch.float32 and len(v) == 3 for v in s.memory.values())


def test_on_disk_it_gives_the_same_bits_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = model()
    inside, _ = rounds(strategy(start, window=2, lambda_ref=0.5), start, 6)
    s = strategy(start, window=2, lambda_ref=0.5, window_memory_mb=1e-6)
    outside, _ = rounds(s, start, 6)
    assert len(s._window._mapped) == 3
    assert list(tmp_path.iterdir()) == []
    for a, b in zip(inside, outside, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_full_disk_is_told_before_anything_is_written(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    start = model()
    with pytest.raises(OSError, match=r"do not fit into .*No space left.*window_memory_mb"):
        rounds(strategy(start, window_memory_mb=0), start, 1)


# ---- proxy data --------------------------------------------------------------------------------------------


def squared(net, batch):
    x, y = batch
    return ((net(x) - y) ** 2).mean()


def proxy(shuffle=False, seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    x = torch.randn(12, 3)
    data = DataLoader(TensorDataset(x, x @ torch.randn(3, 2)), batch_size=4, shuffle=shuffle)
    return net, data, {"likelihood": "proxy", "solver": "gradient", "proxy_model": net, "proxy_data": data,
                       "proxy_loss": squared}  # fmt: skip


def test_proxy_steps_by_numpy():
    net, data, given = proxy()
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    s = strategy(start, window=1, lambda_global=0.2, lambda_ref=0.3, server_steps=5, server_lr=0.1, **given)
    found, told = rounds(s, start, 2)
    theta_r = [a.astype(np.float64) for a in found[0]]
    sent = trained(found[0], 3, seed=[1, 2])
    theta = [sum(r * c[t].astype(np.float64) for r, c in zip((1 / 6, 2 / 6, 3 / 6), sent, strict=True)) for t in (0, 1)]
    batches = [tuple(b.double().numpy() for b in batch) for batch in data]
    for step in range(5):
        x, y = batches[step % 3]  # begun anew when they end
        error = 2 * (x @ theta[0].T + theta[1] - y) / y.size
        gradient = [error.T @ x, error.sum(0)]
        theta = [a - 0.1 * (g + (0.2 + 0.3) * (a - r)) for a, g, r in zip(theta, gradient, theta_r, strict=True)]
    for a, b in zip(found[1], theta, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert told[1]["fine_tuned"] == 1.0


def test_proxy_data_that_shuffle_repeat_and_leave_the_generators_alone():
    runs = []
    for _ in range(2):
        net, _, given = proxy(shuffle=True)
        start = [t.detach().numpy().copy() for t in net.state_dict().values()]
        torch.manual_seed(77 + len(runs))
        before = torch.get_rng_state()
        found, _ = rounds(strategy(start, window=1, server_lr=0.1, **given), start, 4)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(found)
    assert all(np.array_equal(x, y) for x, y in zip(runs[0][-1], runs[1][-1], strict=True))


def test_proxy_data_are_shuffled_anew_in_each_round_and_so_again_in_a_resumed_run():
    net, _, given = proxy(shuffle=True)
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    seen = []

    def loss(model, batch):
        seen.append(batch[0].clone())
        return squared(model, batch)

    options = {**given, "window": 1, "server_lr": 0.1, "server_steps": 3, "proxy_loss": loss}
    s = strategy(start, **options)
    first, _ = rounds(s, start, 2)
    state = s.state_dict()
    whole, _ = rounds(s, first[-1], 1, first=3)
    assert not torch.equal(torch.cat(seen[:3]), torch.cat(seen[3:]))
    resumed = strategy(first[-1], **options)
    resumed.load_state_dict(state)
    again, _ = rounds(resumed, first[-1], 1, first=3)
    assert all(torch.equal(a, b) for a, b in zip(seen[3:6], seen[6:], strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(again[-1], whole[-1], strict=True))


def test_proxy_data_help():
    """Where the clients' updates are noise, gradients of the true loss move the model towards it."""
    net, data, given = proxy()
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]

    def loss(arrays):
        net.load_state_dict({"weight": torch.tensor(arrays[0]), "bias": torch.tensor(arrays[1])})
        return sum(squared(net, batch).item() for batch in data)

    s = strategy(start, window=1, lambda_ref=0.01, server_steps=20, server_lr=0.1, **given)
    found, _ = rounds(s, start, 8)
    noise, _ = rounds(strategy(start, cls=FedAvg), start, 8)
    assert loss(found[-1]) < 0.2 * loss(noise[-1])


def test_running_statistics_reach_the_proxy_model():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    seen = []

    def loss(model, batch):
        seen.append([t.detach().clone() for t in (model[1].running_mean, model[1].running_var)])
        return model(batch).square().mean()

    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    s = strategy(
        start, window=1, layers=LayerMap.from_module(net), likelihood="proxy", solver="gradient", server_lr=0.01,
        proxy_model=net, proxy_data=[torch.ones(4, 3)], proxy_loss=loss,
    )  # fmt: skip
    found, _ = rounds(s, start, 2)
    torch.testing.assert_close(seen[0][0], torch.from_numpy(found[1][4]))
    torch.testing.assert_close(seen[0][1], torch.from_numpy(found[1][5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proxy_model": nn.Linear(4, 2)}, "shape (2, 4) at position 0"),
        ({"proxy_model": nn.Linear(3, 2, bias=False)}, "1 tensors where the global model has 2"),
        ({"proxy_data": []}, "proxy_data gave no batch"),
        ({"proxy_loss": lambda model, batch: 1.0}, "differentiable scalar"),
        ({"proxy_loss": lambda model, batch: model(batch[0])}, "differentiable scalar"),
    ],
)
def test_what_the_proxy_cannot_use_is_named(changes, message):
    net, _, given = proxy()
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    s = strategy(start, window=1, **{**given, **changes})
    with pytest.raises(ValueError, match=re.escape(message)):
        rounds(s, start, 2)


def test_a_proxy_loss_that_is_not_finite_fails_the_round():
    net, _, given = proxy()
    start = [t.detach().numpy().copy() for t in net.state_dict().values()]
    s = strategy(start, window=1, **{**given, "proxy_loss": lambda m, b: squared(m, b) * math.inf})
    found, told = rounds(s, start, 2)
    assert told[1]["failed_round"]
    assert "proxy_loss is inf" in told[1]["failed_reason"]
    assert all(np.array_equal(x, y) for x, y in zip(found[0], found[1], strict=True))


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0 must be"),
        ({"window": 2.0}, "window=2.0 must be"),
        ({"lambda_global": -0.1}, "lambda_global=-0.1"),
        ({"lambda_ref": "a"}, "lambda_ref='a'"),
        ({"eta": 0}, "eta=0"),
        ({"ref_every": 0}, "ref_every=0"),
        ({"ref_growth": 0.5}, "ref_growth=0.5"),
        ({"ref_max": -1.0}, "ref_max=-1.0 must be a number of at least 0"),
        ({"gate": "never"}, "gate='never' is unknown"),
        ({"gate_delta": -1}, "gate_delta=-1"),
        ({"solver": "newton"}, "solver='newton'"),
        ({"server_steps": 0}, "server_steps=0"),
        ({"solver": "gradient", "server_lr": 1.0, "lambda_global": 9.0}, "server_lr=1.0 must be below"),
        (
            {"solver": "gradient", "server_lr": 1.0, "ref_growth": 2.0, "ref_max": 9.0},
            "server_lr=1.0 must be below 2/(1/eta + lambda_global + λ_ref), 0.2",
        ),
        ({"solver": "gradient", "ref_growth": 2.0}, "ref_max=None must be a number"),
        ({"solver": "gradient", "lambda_ref": math.inf}, "solver='gradient' must be closed with an infinite λ"),
        ({"lambda_ref": math.nan}, "lambda_ref=nan"),
        ({"likelihood": "true"}, "likelihood='true'"),
        ({"likelihood": "proxy"}, "solver='closed' must be gradient"),
        ({"likelihood": "proxy", "solver": "gradient"}, "proxy_model=None"),
        (
            {**{"likelihood": "proxy", "solver": "gradient"}, "proxy_model": nn.Linear(1, 1), "proxy_data": iter([1])},
            "iterated anew",
        ),
        ({"eta": 1e-320}, "eta=1e-320"),
        ({"proxy_data": [1]}, "only used with likelihood='proxy'"),
        ({"window_memory_mb": -1}, "window_memory_mb=-1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FedRef(**options)
