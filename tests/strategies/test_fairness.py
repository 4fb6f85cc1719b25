"""FedFV, FedLF, FedMGDA+ and ConFIG against literal computations on whole vectors, and what they promise clients."""

import math

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters

from strategies import CRAFT, ConFIG, FedFV, FedLF, FedMGDA

from .helpers import arrays_of, manager, result
from .layered import (
    LAYERS,
    PARTS,
    SIZE,
    Client,
    clients,
    losses_of,
    matrix,
    min_norm_weights,
    parameters,
    play,
    shares,
    start,
    unit_rows,
)

# Clients of each round: some stay, some leave for one round or several, some come late.
COMING_AND_GOING = ["01234", "125", "0356", "267", "37", "014"]


def rounds_of(groups, seed):
    """Clients by round; ids recur, updates and losses are new every time."""
    for number, group in enumerate(groups, start=1):
        everyone = clients(10, 100 * seed + number)
        yield number, {cid: everyone[cid] for cid in group}


# ---- FedFV ------------------------------------------------------------------------------------------------


def fedfv(sent, history, number, alpha, tau):
    """Algorithms 1 to 3 of arXiv 2104.14937 on whole vectors, as they stand; `history` has each client's last update.

    How many of the largest losses the share α keeps is as in the authors' code (github.com/WwZzz/easyFL). Clients
    of the last τ rounds are looked at from the first round on.
    """
    G = {cid: client.update for cid, client in sent.items()}
    ordered = sorted(sent, key=lambda cid: sent[cid].metrics["initial_loss"])
    kept = ordered[math.ceil((len(sent) - 1) * (1 - alpha)) :] if alpha > 0 else []
    projected = []
    for k in sent:
        g = G[k].copy()
        if k not in kept:
            for i in ordered:
                if i != k and g @ G[i] < 0:
                    g = g - (g @ G[i]) / (G[i] @ G[i]) * G[i]
        projected.append(g)
    mean = np.mean(projected, axis=0)
    for back in range(tau, 0, -1):
        conflicting = [
            g for cid, (g, came) in history.items() if came == number - back and cid not in sent and mean @ g < 0
        ]
        if conflicting:
            total = np.sum(conflicting, axis=0)
            if mean @ total < 0:
                mean = mean - (mean @ total) / (total @ total) * total
    return mean / np.linalg.norm(mean) * np.linalg.norm(np.mean(list(G.values()), axis=0))


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("alpha", [0, 0.1, 0.5, 1])
def test_fedfv_is_algorithms_1_to_3(alpha, tau, device):
    common = {"min_completed": 1, "layers": LAYERS, "initial_parameters": parameters(), "device": device}
    s = FedFV(alpha=alpha, tau=tau, server_lr=0.9, **common)
    theta, history, told_apart = start(), {}, 0
    for number, sent in rounds_of(COMING_AND_GOING, seed=1):
        theta, step, _ = play(s, number, theta, sent)
        expected = fedfv(sent, history, number, alpha, tau)
        # The past is kept in float32.
        np.testing.assert_allclose(step, 0.9 * expected, rtol=1e-5, atol=1e-6)
        if tau:
            shorter = fedfv(sent, history, number, alpha, tau - 1)
            told_apart += not np.allclose(expected, shorter, rtol=1e-3, atol=1e-3)
        history.update({cid: (client.update, number) for cid, client in sent.items()})
    assert tau == 0 or told_apart >= 2  # absent clients of the oldest round counted somewhere


def test_fedfv_by_hand():
    # (1, 0) off (−1, 1) is (½, ½); (−1, 1) off (1, 0) is (0, 1). Mean (¼, ¾), scaled to the plain mean's length ½.
    s = FedFV(alpha=0, tau=0, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(0, [np.array([1.0, 0.0])], 99), result(1, [np.array([-1.0, 1.0])], 1)]
    theta = arrays_of(s.aggregate_fit(1, sent, [])[0])[0]
    np.testing.assert_allclose(theta, 0.5 * np.array([1, 3]) / np.sqrt(10), rtol=1e-12)


@pytest.mark.parametrize("worst", [0, 1])
def test_fedfv_lets_the_client_with_the_largest_loss_be(worst):
    # As above with α = .5: ⌈1·½⌉ = 1 client is projected, the one with the smaller loss.
    s = FedFV(alpha=0.5, tau=0, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    G = np.array([[1.0, 0.0], [-1.0, 1.0]])
    sent = [result(i, [g], 10, {"initial_loss": 5.0 if i == worst else 1.0}) for i, g in enumerate(G)]
    theta = arrays_of(s.aggregate_fit(1, sent, [])[0])[0]
    mean = (G[0] + [0, 1]) / 2 if worst == 0 else ([0.5, 0.5] + G[1]) / 2
    np.testing.assert_allclose(theta, 0.5 * mean / np.linalg.norm(mean), rtol=1e-12)


def test_fedfv_that_keeps_every_update_is_the_plain_mean(device):
    s = FedFV(alpha=1, tau=0, layers=LAYERS, initial_parameters=parameters(), device=device)
    sent = clients(6, 3)
    _, step, _ = play(s, 1, start(), sent)
    np.testing.assert_allclose(step, matrix(sent).mean(axis=0), rtol=1e-9, atol=1e-12)


def test_fedfv_looks_at_the_oldest_absent_client_first():
    """Clients a (round 1) and b (round 2) are both against round 3's update g; projections off two do not commute.

    g = (2, 1), a = (−1, 0), b = (−1, −1): g off a is (0, 1), and that off b is (−½, ½). The other way round g off b
    is (½, −½), and that off a is (0, −½).
    """
    g, a, b = np.array([2.0, 1.0]), np.array([-1.0, 0.0]), np.array([-1.0, -1.0])
    s = FedFV(alpha=0, tau=2, min_completed=1, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    theta = np.zeros(2)
    for number, (cid, update) in enumerate([("a", a), ("b", b), ("c", g)], start=1):
        before = theta
        theta = arrays_of(s.aggregate_fit(number, [result(cid, [theta + update])], [])[0])[0]
    np.testing.assert_allclose(theta - before, np.sqrt(5) * np.array([-1, 1]) / np.sqrt(2), rtol=1e-6)


# ---- FedLF ------------------------------------------------------------------------------------------------


def fedlf(sent, history, number, window):
    """FedLF on whole vectors, as in the authors' get_FedLF_d_layers (github.com/zibinpan/FedLF); float64 and CVXPY."""
    G, F = matrix(sent), losses_of(sent)
    m = len(F)
    even = np.ones(m) / np.sqrt(m)
    h = (F @ even * F / np.linalg.norm(F) - even * np.linalg.norm(F)) / np.linalg.norm(F) ** 2
    past = [g for cid, (g, came) in history.items() if cid not in sent and number - came <= window]
    direction = np.empty(SIZE)
    for part in PARTS:
        mean_length = np.linalg.norm(G[:, part], axis=1).mean()
        rows = unit_rows(G[:, part]) * mean_length
        fair = h @ rows
        fair = fair / np.linalg.norm(fair) * mean_length
        absent = [g[part] / np.linalg.norm(g[part]) * mean_length for g in past]
        hull = np.vstack([rows, fair, *absent])
        direction[part] = min_norm_weights(hull) @ hull
    return direction / np.linalg.norm(direction) * np.linalg.norm(G.mean(axis=0))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_fedlf_is_the_authors_computation(window, device):
    s = FedLF(
        rounds=window, server_lr=0.9, min_completed=1, layers=LAYERS, initial_parameters=parameters(), device=device
    )
    theta, history = start(), {}
    for number, sent in rounds_of(COMING_AND_GOING[:4], seed=2):
        theta, step, metrics = play(s, number, theta, sent)
        np.testing.assert_allclose(step, 0.9 * fedlf(sent, history, number, window), rtol=2e-5, atol=2e-5)
        assert metrics["kkt"] < 1e-10
        history.update({cid: (client.update, number) for cid, client in sent.items()})


@pytest.mark.parametrize(
    "groups",
    [
        ["01", "23", "45", "01", "23", "67"],
        ["01", "23", "45", "45", "67"],  # the windows grow: 0, 0, 2, 3, 3
    ],
)
def test_fedlf_listens_by_default_for_as_many_rounds_as_all_clients_take_turns(groups):
    """Two clients a round: with n > 2 of them seen before, those absent for n/2 rounds or less are in the hull."""
    s = FedLF(layers=LAYERS, initial_parameters=parameters())
    theta, history = start(), {}
    for number, sent in rounds_of(groups, seed=3):
        window = len(history) // 2 if len(history) > 2 else 0
        theta, step, _ = play(s, number, theta, sent)
        np.testing.assert_allclose(step, fedlf(sent, history, number, window), rtol=2e-5, atol=2e-5)
        history.update({cid: (client.update, number) for cid, client in sent.items()})


def test_fedlf_fairness_by_hand():
    """Losses (3, 1), orthogonal unit updates e_1, e_2: cos = 4/√20, h = (cos·F/‖F‖ − 1/√2)/‖F‖ ∝ (1, −3).

    The fairness row is (1, −3)/√10, of length 1 as the others. With 0 ≤ λ it pulls against e_2, and the min-norm
    point of the three lies on the edge between e_2 and it, off which e_1 is further:
    ½ (e_2 + f) up to scale, as both have length 1.
    """
    s = FedLF(rounds=0, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(i, [np.eye(2)[i]], 10, {"initial_loss": loss}) for i, loss in enumerate((3.0, 1.0))]
    theta = arrays_of(s.aggregate_fit(1, sent, [])[0])[0]
    fair = np.array([1.0, -3.0]) / np.sqrt(10)
    direction = np.array([0.0, 1.0]) + fair
    # Scaled to the plain mean's length, ‖(½, ½)‖.
    np.testing.assert_allclose(theta, np.sqrt(0.5) * direction / np.linalg.norm(direction), rtol=1e-9)


def test_fedlf_with_equal_losses_has_no_fairness_row():
    s = FedLF(rounds=0, layers=LAYERS, initial_parameters=parameters())
    sent = clients(3, 0, losses=[2.0, 2.0, 2.0])
    _, step, _ = play(s, 1, start(), sent)
    expected, G = np.empty(SIZE), matrix(sent)
    for part in PARTS:
        rows = unit_rows(G[:, part]) * np.linalg.norm(G[:, part], axis=1).mean()
        expected[part] = min_norm_weights(rows) @ rows
    expected *= np.linalg.norm(G.mean(axis=0)) / np.linalg.norm(expected)
    np.testing.assert_allclose(step, expected, rtol=2e-5, atol=2e-5)


# ---- FedMGDA+ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("normalise", [True, False])
def test_fedmgda_is_the_bounded_quadratic_program(epsilon, normalise, device):
    """min ‖Σ λ_i u_i‖² over the simplex with |λ − ρ| ≤ ε (arXiv 2006.11489, algorithm 1), by CVXPY; two rounds."""
    s = FedMGDA(epsilon=epsilon, normalise=normalise, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta = start()
    for number in (1, 2):
        sent = clients(6, number, common=0.3)
        theta, step, metrics = play(s, number, theta, sent)
        rows, rho = matrix(sent), shares(sent)
        if normalise:
            rows = unit_rows(rows)
        if epsilon == 0:
            expected = rho
        else:
            expected = min_norm_weights(rows, np.maximum(rho - epsilon, 0), np.minimum(rho + epsilon, 1))
        np.testing.assert_allclose(step, expected @ rows, rtol=1e-5, atol=1e-6)
        # Six independent rows: the direction says what λ is.
        weights = np.linalg.lstsq(rows.T, step, rcond=None)[0]
        assert weights.sum() == pytest.approx(1, abs=1e-9)
        assert weights.min() > -1e-9
        assert np.abs(weights - rho).max() < epsilon + 1e-9
        assert metrics["kkt"] < 1e-9


def test_fedmgda_bound_binds_by_hand():
    # Orthogonal unit updates: ‖Σλu‖² = Σλ² wants (½, ½); ρ = (.9, .1) and ε = .2 allow no less than .7.
    s = FedMGDA(epsilon=0.2, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(0, [np.array([5.0, 0.0])], 90), result(1, [np.array([0.0, 0.01])], 10)]
    np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], [0.7, 0.3], rtol=1e-9)


def test_fedmgda_leaves_out_a_client_without_an_update():
    s = FedMGDA(epsilon=0, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(0, [np.array([5.0, 0.0])], 10), result(1, [np.zeros(2)], 30)]
    np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], [0.25, 0], rtol=1e-9)


# ---- ConFIG -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_config_is_its_formula(common, device):
    """d = U⁺1 over all layers together, g = (Σ⟨g_i, d̂⟩) d̂ / m (arXiv 2408.11104), by a float64 pseudo-inverse."""
    s = ConFIG(server_lr=0.6, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta = start()
    for number in (1, 2):
        sent = clients(7, number, common=common)
        theta, step, metrics = play(s, number, theta, sent)
        G = matrix(sent)
        d = np.linalg.pinv(unit_rows(G)) @ np.ones(7)
        d /= np.linalg.norm(d)
        np.testing.assert_allclose(step, 0.6 * (G @ d).sum() / 7 * d, rtol=1e-8, atol=1e-11)
        cosines = unit_rows(G) @ step / np.linalg.norm(step)
        np.testing.assert_allclose(cosines, cosines[0], rtol=1e-8)
        assert cosines[0] > 0
        assert (metrics["rank"], metrics["conflict_share_after"]) == (7, 0)
        assert metrics["residual"] < 1e-9


def test_config_direction_does_not_depend_on_how_long_an_update_is():
    sent = clients(5, 4)
    longer = {cid: Client(c.update * (50 if cid == "2" else 1), c.num_examples, c.metrics) for cid, c in sent.items()}
    steps = []
    for group in (sent, longer):
        _, step, _ = play(ConFIG(layers=LAYERS, initial_parameters=parameters()), 1, start(), group)
        steps.append(step / np.linalg.norm(step))
    np.testing.assert_allclose(*steps, rtol=1e-8, atol=1e-11)


def test_config_of_identical_clients_is_their_update():
    update = clients(1, 0)["0"].update
    sent = {cid: Client(update, n, {"initial_loss": 1.0}) for cid, n in (("0", 3), ("1", 90), ("2", 7))}
    _, step, metrics = play(ConFIG(layers=LAYERS, initial_parameters=parameters()), 1, start(), sent)
    np.testing.assert_allclose(step, update, rtol=1e-9, atol=1e-12)
    assert metrics["rank"] == 1


# ---- no client in conflict --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [ConFIG, lambda **k: FedMGDA(epsilon=1, **k), CRAFT])
def test_nobody_is_in_conflict_where_updates_are_independent(make, seed, device):
    sent = clients(6, seed)
    s = make(layers=LAYERS, initial_parameters=parameters(), device=device)
    if make is CRAFT:  # the third layer has one number: six clients cannot all gain there
        for client in sent.values():
            client.update[PARTS[2]] = np.abs(client.update[PARTS[2]])
    _, step, metrics = play(s, 1, start(), sent)
    assert (matrix(sent) @ step > 0).all()
    assert metrics["conflict_share_after"] == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [CRAFT, lambda **k: CRAFT(constraint="inequality", **k), FedLF])
def test_nobody_is_in_conflict_in_any_layer(make, seed):
    sent = clients(6, seed)
    _, step, _ = play(make(layers=LAYERS, initial_parameters=parameters()), 1, start(), sent)
    for part in PARTS[:2]:  # the third has one number, and clients on both sides of zero
        assert (matrix(sent)[:, part] @ step[part] > 0).all()


@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_fedmgda_direction_is_no_longer_than_the_mean_of_unit_updates(epsilon):
    # ρ itself is allowed, so the minimum is at most its value; and a wider box never does worse.
    sent = clients(6, 9)
    s = FedMGDA(epsilon=epsilon, layers=LAYERS, initial_parameters=parameters())
    _, step, _ = play(s, 1, start(), sent)
    assert np.linalg.norm(step) <= np.linalg.norm(shares(sent) @ unit_rows(matrix(sent))) + 1e-9


@pytest.mark.parametrize("make", [FedFV, FedLF])
def test_fair_methods_ask_for_the_loss(make):
    s = make(min_available_clients=2)
    assert [ins.config["initial_loss"] for _, ins in s.configure_fit(1, parameters(), manager("ab"))] == [True, True]
