"""FedProx, FedNova, FedAdam, FedYogi, FedAdagrad, AFL and q-FedAvg against formulas worked out here, or by Flower."""

import json

import flwr.server.strategy as theirs
import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters

from strategies import (
    AFL,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMGDA,
    FedNova,
    FedProx,
    FedYogi,
    QFedAvg,
)

from .helpers import arrays_of, manager, model, result, trained
from .layered import LAYERS, SIZE, Client, clients, losses_of, matrix, moved, parameters, play, shares, start


def rejected(metrics):
    return json.loads(metrics["rejection_reasons"])


# ---- FedProx ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0, 0.3])
def test_fedprox_is_fedavg_on_the_server_bit_for_bit(mu, device):
    # Li et al., MLSys 2020: only what clients minimise differs.
    first = parameters(dtype=np.float32)
    ours = FedProx(proximal_mu=mu, initial_parameters=first, layers=LAYERS, device=device)
    plain = FedAvg(initial_parameters=first, layers=LAYERS, device=device)
    theta = start(dtype=np.float32)
    for number in (1, 2):
        sent = clients(4, number)
        one, _, _ = play(ours, number, theta, sent)
        two, _, _ = play(plain, number, theta, sent)
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        theta = one


@pytest.mark.parametrize("mu", [0, 0.3])
def test_fedprox_tells_clients_mu(mu):
    s = FedProx(proximal_mu=mu, on_fit_config_fn=lambda number: {"lr": 0.1 * number}, min_available_clients=3)
    told = s.configure_fit(1, parameters(), manager("abc"))
    assert len(told) == 3
    for _, ins in told:
        assert ins.config == {"server_round": 1, "proximal_mu": mu, "lr": 0.1}


# ---- FedNova ----------------------------------------------------------------------------------------------


def test_fednova_by_hand():
    # ρ = (¾, ¼), a = (1, 4): τ_eff = ¾ + 1 = 1.75; the step is 1.75 (¾·(1, 0)/1 + ¼·(0, 2)/4) = (1.3125, .21875).
    s = FedNova(initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [
        result(0, [np.array([1.0, 0.0])], 30, {"step_weight": 1}),
        result(1, [np.array([0.0, 2.0])], 10, {"step_weight": 4.0}),
    ]
    theta, metrics = s.aggregate_fit(1, sent, [])
    np.testing.assert_allclose(arrays_of(theta)[0], [1.3125, 0.21875], rtol=1e-14)
    assert metrics["effective_steps"] == pytest.approx(1.75)


def test_fednova_is_equation_10_over_several_layers_and_rounds(device):
    s = FedNova(server_lr=0.7, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta = start()
    for number in (1, 2, 3):
        sent = clients(5, number)
        steps = np.random.default_rng(number).uniform(1, 30, size=5)
        for client, a in zip(sent.values(), steps, strict=True):
            client.metrics["step_weight"] = float(a)
        theta, step, _ = play(s, number, theta, sent)
        rho = shares(sent)
        tau = rho @ steps
        np.testing.assert_allclose(step, 0.7 * tau * (rho / steps) @ matrix(sent), rtol=1e-9, atol=1e-12)


def test_fednova_undoes_what_momentum_and_steps_add():
    """With constant gradients c_i, SGD with momentum β sends −lr a_i c_i; the server moves along Σ ρ_i c_i again.

    a_i = Σ_t c_t with c ← βc + 1 (arXiv 2007.07481, section 4.2): β = .9 and 3 steps give 1 + 1.9 + 2.71 = 5.61.
    """
    lr, beta, rng = 0.1, 0.9, np.random.default_rng(0)
    gradients, steps = rng.normal(size=(3, SIZE)), (1, 3, 10)
    sent, weights = {}, []
    for i, (gradient, count) in enumerate(zip(gradients, steps, strict=True)):
        update, velocity, weight, c = np.zeros(SIZE), np.zeros(SIZE), 0.0, 0.0
        for _ in range(count):
            velocity = beta * velocity + gradient
            update = update - lr * velocity
            c = beta * c + 1
            weight += c
        sent[str(i)] = Client(update, 10 * (i + 1), {"step_weight": weight})
        weights.append(weight)
    assert weights[1] == pytest.approx(5.61)
    s = FedNova(layers=LAYERS, initial_parameters=parameters())
    _, step, metrics = play(s, 1, start(), sent)
    rho = np.array([1, 2, 3]) / 6
    assert metrics["effective_steps"] == pytest.approx(rho @ weights)
    np.testing.assert_allclose(step, -lr * (rho @ weights) * rho @ gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), "5"])
def test_fednova_rejects_a_client_without_step_weight_by_that_name(value):
    sent = [result(i, a, 10) for i, a in enumerate(trained(model(), 3))]
    if value is None:
        del sent[1][1].metrics["step_weight"]
    else:
        sent[1][1].metrics["step_weight"] = value
    _, metrics = FedNova(initial_parameters=ndarrays_to_parameters(model())).aggregate_fit(1, sent, [])
    assert metrics["clients_accepted"] == 2
    (reason,) = rejected(metrics)
    assert reason.startswith("client 1:")
    assert "step_weight" in reason


# ---- FedAdam, FedYogi, FedAdagrad -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "flowers", "betas"),
    [
        (FedAdam, theirs.FedAdam, {"beta_1": 0.9, "beta_2": 0.99}),
        (FedAdam, theirs.FedAdam, {"beta_1": 0.0, "beta_2": 0.5}),
        (FedYogi, theirs.FedYogi, {"beta_1": 0.9, "beta_2": 0.99}),
        (FedYogi, theirs.FedYogi, {"beta_1": 0.5, "beta_2": 0.6}),
        (FedAdagrad, theirs.FedAdagrad, {}),
    ],
)
@pytest.mark.parametrize("tau", [1e-3, 1e-9])
def test_adaptive_methods_are_flowers(ours, flowers, betas, tau, device):
    """Eight rounds of unequal clients on a model of float64 tensors only, which Flower's can step too."""
    rng = np.random.default_rng(0)
    theta = [rng.normal(size=(4, 3)), rng.normal(size=3), np.array(rng.normal())]
    first = ndarrays_to_parameters(theta)
    one = ours(server_lr=0.05, tau=tau, initial_parameters=first, device=device, **betas)
    two = flowers(eta=0.05, tau=tau, initial_parameters=first, fit_metrics_aggregation_fn=lambda _: {}, **betas)
    for number in range(1, 9):
        sent = [
            result(i, [a + rng.normal(scale=0.1 * (i + 1), size=a.shape) for a in theta], n)
            for i, n in enumerate((5, 40, 17))
        ]
        mine = arrays_of(one.aggregate_fit(number, sent, [])[0])
        flower = arrays_of(two.aggregate_fit(number, sent, [])[0])
        for a, b in zip(mine, flower, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        theta = mine


@pytest.mark.parametrize("make", [FedAdam, FedYogi, FedAdagrad])
def test_adaptive_methods_step_trained_tensors_only(make, device):
    """Running statistics are averaged and counters counted, where Flower's methods step them, below zero too."""
    s = make(server_lr=1.0, layers=LAYERS, initial_parameters=parameters(dtype=np.float32), device=device)
    theta = start(dtype=np.float32)
    for number in range(1, 7):
        results, variances = [], []
        for i, (cid, client) in enumerate(clients(3, number).items()):
            arrays = [np.asarray(a) for a in theta]
            for t in (0, 1, 2, 3, 7, 8, 9):
                arrays[t] = (theta[t] + 0.1 * client.update[: theta[t].size].reshape(theta[t].shape)).astype(np.float32)
            arrays[5] = (theta[5] * 1e-3 * (i + 1)).astype(np.float32)  # falls by orders of magnitude every round
            arrays[6] = np.array(7 + 10 * number + i)
            variances.append(arrays[5])
            results.append(result(cid, arrays, 10 * (i + 1)))
        before, theta = theta, arrays_of(s.aggregate_fit(number, results, [])[0])
        np.testing.assert_allclose(theta[5], np.average(variances, axis=0, weights=[1, 2, 3]), rtol=1e-6)
        assert (theta[5] > 0).all()
        assert theta[6] == 7 + 10 * number + 2
        assert theta[6].dtype == np.int64
        assert all(a.dtype == np.float32 for t, a in enumerate(theta) if t != 6)
        assert np.abs(theta[0] - before[0]).max() > 1e-3


@pytest.mark.parametrize("make", [FedAdam, FedYogi, FedAdagrad])
def test_the_first_adaptive_step_by_hand(make):
    # g = 3, β₁ = .5 (Adagrad 0), β₂ = .75, τ = 1, step 1. Adam: m = 1.5, v = .25·9 = 2.25, times
    # √(1 − .75²)/(1 − .5²); Yogi: the same m and v without that factor; Adagrad: m = 3, v = 9.
    options = {} if make is FedAdagrad else {"beta_1": 0.5, "beta_2": 0.75}
    s = make(server_lr=1.0, tau=1.0, initial_parameters=ndarrays_to_parameters([np.zeros(1)]), **options)
    theta, _ = s.aggregate_fit(1, [result(0, [np.array([3.0])])], [])
    expected = {
        FedAdam: np.sqrt(1 - 0.75**2) / 0.75 * 1.5 / 2.5,
        FedYogi: 1.5 / 2.5,
        FedAdagrad: 3 / 4,
    }[make]
    assert arrays_of(theta)[0] == pytest.approx([expected], rel=1e-12)


# ---- AFL --------------------------------------------------------------------------------------------------


def afl(initial, **options):
    return AFL(initial_parameters=ndarrays_to_parameters([np.array(initial)]), min_completed=1, **options)


def afl_round(s, number, theta, sent):
    """`sent`: update, loss and number of examples by client; returns Flower's parameters and the array."""
    results = [result(cid, [theta + np.array(g)], n, {"initial_loss": loss}) for cid, (g, loss, n) in sent.items()]
    after, metrics = s.aggregate_fit(number, results, [])
    assert metrics["failed_round"] is False
    return after, arrays_of(after)[0], metrics


def test_afl_by_hand():
    """Two clients, η_λ = .5, numbers of examples that play no role.

    λ_0 = (.5, .5): θ_1 = (1, 2). (.5, .5) + .5 (1, .2) = (1, .6), projected λ_1 = (.7, .3).
    θ_2 = θ_1 + .7 (1, 1) + .3 (−1, 1) = (1.4, 3). (.7, .3) + .5 (3, 0) = (2.2, .3), projected λ_2 = (1, 0).
    """
    seen = []
    s = afl(
        [0.0, 0.0],
        lambda_lr=0.5,
        min_available_clients=2,
        evaluate_fn=lambda number, arrays, config: seen.append(arrays[0]) or (0.0, {}),
    )
    one, theta, metrics = afl_round(s, 1, np.zeros(2), {"a": ([2, 0], 1.0, 1), "b": ([0, 4], 0.2, 100)})
    np.testing.assert_allclose(theta, [1, 2], rtol=1e-14)
    assert metrics["largest_lambda"] == pytest.approx(0.5)
    s.evaluate(1, one)
    two, theta, metrics = afl_round(s, 2, theta, {"a": ([1, 1], 3.0, 7), "b": ([-1, 1], 0.0, 1)})
    np.testing.assert_allclose(theta, [1.4, 3], rtol=1e-14)
    assert metrics["largest_lambda"] == pytest.approx(0.7)
    s.evaluate(2, two)
    # The mean of θ_0, θ_1 and of θ_0, θ_1, θ_2.
    np.testing.assert_allclose(seen, [[0.5, 1.0], [0.8, 5 / 3]], rtol=1e-14)
    for _, ins in s.configure_evaluate(2, two, manager("ab")):
        np.testing.assert_allclose(arrays_of(ins.parameters)[0], [0.8, 5 / 3], rtol=1e-14)
    for _, ins in s.configure_fit(3, two, manager("ab")):  # clients go on from the last iterate
        np.testing.assert_allclose(arrays_of(ins.parameters)[0], [1.4, 3], rtol=1e-14)
        assert ins.config["initial_loss"] is True
    _, theta, metrics = afl_round(s, 3, theta, {"a": ([1, 0], 0.0, 7), "b": ([9, 9], 0.0, 1)})
    np.testing.assert_allclose(theta, [2.4, 3], rtol=1e-14)
    assert metrics["largest_lambda"] == pytest.approx(1)


def test_afl_without_averaging_evaluates_the_last_iterate():
    seen = []
    s = afl([0.0], average_iterates=False, evaluate_fn=lambda _, arrays, __: seen.append(arrays[0]) or (0.0, {}))
    one, theta, _ = afl_round(s, 1, np.zeros(1), {"a": ([2.0], 1.0, 1)})
    s.evaluate(1, one)
    np.testing.assert_array_equal(seen, [theta])


def test_afl_averages_trained_tensors_and_leaves_buffers_as_they_are_now():
    s = AFL(layers=LAYERS, initial_parameters=parameters())
    iterates, theta = [start()], start()
    for number in (1, 2, 3):
        sent = [result(cid, moved(theta, client.update)) for cid, client in clients(3, number).items()]
        after, _ = s.aggregate_fit(number, sent, [])
        theta = arrays_of(after)
        iterates.append(theta)
    for t, array in enumerate(arrays_of(s.evaluated(after))):
        expected = theta[t] if t in (4, 5, 6) else np.mean([x[t] for x in iterates], axis=0)
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-14)


def test_afl_with_clients_that_come_and_go():
    """A client seen for the first time enters with 1 / (clients known), and makes room by shrinking the others.

    Round 1: λ = (½, ½) and losses of zero leave it. Round 2: c enters, λ = (⅓, ⅓, ⅓), alone here it has all the
    weight; ⅓ + .5·.6 for c projects to (⅓ − .1, ⅓ − .1, ⅓ + .2). Round 3: a and c share by λ.
    """
    s = afl([0.0, 0.0], lambda_lr=0.5)
    _, theta, _ = afl_round(s, 1, np.zeros(2), {"a": ([1, 0], 0.0, 1), "b": ([0, 1], 0.0, 3)})
    np.testing.assert_allclose(theta, [0.5, 0.5], rtol=1e-14)
    _, after, _ = afl_round(s, 2, theta, {"c": ([3, 1], 0.6, 1)})
    np.testing.assert_allclose(after - theta, [3, 1], rtol=1e-14)
    a, c = 1 / 3 - 0.1, 1 / 3 + 0.2
    assert s.records["lambda"] == pytest.approx({"a": a, "b": a, "c": c})
    theta = after
    _, after, _ = afl_round(s, 3, theta, {"c": ([1, 0], 0.0, 1), "a": ([0, 1], 0.0, 9)})
    np.testing.assert_allclose(after - theta, [c / (a + c), a / (a + c)], rtol=1e-12)


def test_afl_with_nobody_of_the_worst_mixture_weights_equally():
    # (⅓, ⅓, ⅓) + (10, 0, 0) projects to (1, 0, 0): in round 2 nobody present has any weight.
    s = afl([0.0, 0.0], lambda_lr=1.0)
    sent = {"a": ([0, 0], 10.0, 1), "b": ([0, 0], 0.0, 1), "c": ([0, 0], 0.0, 1)}
    _, theta, _ = afl_round(s, 1, np.zeros(2), sent)
    _, theta, metrics = afl_round(s, 2, theta, {"b": ([2, 0], 0.0, 1), "c": ([0, 4], 0.0, 99)})
    np.testing.assert_allclose(theta, [1, 2], rtol=1e-14)
    assert metrics["largest_lambda"] == pytest.approx(1)


# ---- q-FedAvg ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0, 0.2, 1, 5])
@pytest.mark.parametrize("lr", [0.1, 2.0])
def test_qfedavg_is_algorithm_2(q, lr, device):
    """Δ_i = F_i^q L g_i, h_i = q F_i^(q−1) ‖L g_i‖² + L F_i^q, θ ← θ + ΣΔ/Σh (arXiv 1905.10497), three rounds."""
    s = QFedAvg(q=q, client_lr=lr, server_lr=0.5, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta, L = start(), 1 / lr
    for number in (1, 2, 3):
        sent = clients(4, number)
        theta, step, _ = play(s, number, theta, sent)
        delta, h = np.zeros(SIZE), 0.0
        for client in sent.values():
            F, g = client.metrics["initial_loss"], client.update
            delta += F**q * L * g
            h += q * F ** (q - 1) * np.linalg.norm(L * g) ** 2 + L * F**q
        np.testing.assert_allclose(step, 0.5 * delta / h, rtol=1e-7, atol=1e-12)


def test_qfedavg_weighs_each_client_by_its_own_loss():
    # q = L = 1, unit updates on two axes: Δ = (3, 1), h = (1 + 3) + (1 + 1). Flower's QFedAvg has one loss for all.
    s = QFedAvg(q=1, client_lr=1, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(i, [np.eye(2)[i]], 10, {"initial_loss": loss}) for i, loss in enumerate((3.0, 1.0))]
    np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], [3 / 6, 1 / 6], rtol=1e-9)


@pytest.mark.parametrize("q", [0.2, 1, 5])
def test_qfedavg_with_a_loss_of_zero(q):
    """The authors add 1e-10 to every loss (github.com/litian96/fair_flearn, qffedavg)."""
    sent = clients(3, 0, losses=[0.0, 1.0, 2.0])
    s = QFedAvg(q=q, client_lr=0.1, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), sent)
    F, G, L = losses_of(sent) + 1e-10, matrix(sent), 10
    h = q * F ** (q - 1) * (L * np.linalg.norm(G, axis=1)) ** 2 + L * F**q
    expected = L * F**q @ G / h.sum()
    np.testing.assert_allclose(step, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max() + 1e-15)


def test_qfedavg_where_every_loss_is_zero_is_finite():
    s = QFedAvg(q=2, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), clients(3, 0, losses=[0.0, 0.0, 0.0]))
    assert np.isfinite(step).all()


@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
def test_qfedavg_with_a_huge_q_is_the_worst_client_alone(scale):
    # With losses 2 and 1 the second's share is 2^−q of the first's: h = q/F ‖L g‖² + L of the first alone remains.
    q, L, F = 1e4, 10.0, 2.0 * scale
    sent = clients(2, 1, losses=[F, scale])
    s = QFedAvg(q=q, client_lr=1 / L, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), sent)
    g = sent["0"].update
    np.testing.assert_allclose(step, L * g / (q / F * L**2 * (g @ g) + L), rtol=1e-5, atol=1e-14)


@pytest.mark.parametrize("make", [QFedAvg, AFL])
@pytest.mark.parametrize("value", [None, -0.5, float("inf")])
def test_a_client_without_initial_loss_is_rejected_by_that_name(make, value):
    sent = [result(i, a, 10) for i, a in enumerate(trained(model(), 3))]
    if value is None:
        del sent[2][1].metrics["initial_loss"]
    else:
        sent[2][1].metrics["initial_loss"] = value
    _, metrics = make(initial_parameters=ndarrays_to_parameters(model())).aggregate_fit(1, sent, [])
    assert metrics["clients_accepted"] == 2
    (reason,) = rejected(metrics)
    assert reason.startswith("client 2:")
    assert "initial_loss" in reason


@pytest.mark.parametrize("make", [QFedAvg, AFL])
def test_clients_are_asked_for_their_initial_loss(make):
    s = make(min_available_clients=2)
    assert [ins.config["initial_loss"] for _, ins in s.configure_fit(1, parameters(), manager("ab"))] == [True, True]


# ---- what reduces to FedAvg -------------------------------------------------------------------------------

REDUCED = {
    "fedprox-without-mu": (lambda **k: FedProx(proximal_mu=0, **k), False),
    "qfedavg-without-q": (lambda **k: QFedAvg(q=0, client_lr=0.3, **k), True),
    "fednova-equal-steps": (FedNova, False),
    "fedmgda-without-room": (lambda **k: FedMGDA(epsilon=0, normalise=False, **k), False),
    "fedavgm-without-momentum": (lambda **k: FedAvgM(server_momentum=0, **k), False),
}


@pytest.mark.parametrize(("make", "equal_sizes"), REDUCED.values(), ids=REDUCED)
def test_special_cases_are_fedavg(make, equal_sizes, device):
    """Each method's paper names the case; three rounds, so that no state may interfere."""
    s = make(server_lr=0.8, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta = start()
    for number in (1, 2, 3):
        sent = clients(5, number)
        for client in sent.values():
            client.metrics["step_weight"] = 6.0
            if equal_sizes:
                client.num_examples = 12
        theta, step, _ = play(s, number, theta, sent)
        np.testing.assert_allclose(step, 0.8 * shares(sent) @ matrix(sent), rtol=1e-9, atol=1e-12)


def test_qfedavg_without_q_weighs_clients_equally():
    sent = clients(5, 0)
    s = QFedAvg(q=0, client_lr=0.01, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), sent)
    np.testing.assert_allclose(step, matrix(sent).mean(axis=0), rtol=1e-9, atol=1e-12)
