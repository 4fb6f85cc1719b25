"""CRAFT's options and NormalisedMomentum against CVXPY, a float64 pseudo-inverse, and work by hand."""

import json

import cvxpy
import numpy as np
import pytest
import torch
from flwr.common import ndarrays_to_parameters
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import CRAFT, NormalisedMomentum
from strategies.solvers.craft import solve

from .helpers import arrays_of, manager, model, result, trained
from .layered import LAYERS, PARTS, SIZE, clients, convex, losses_of, matrix, parameters, play, shares, start, unit_rows

WHOLE = [slice(0, SIZE)]


def inequality(G, rho, reference=None, ridge=None, device="cpu"):
    options = {} if ridge is None else {"ridge": ridge}
    reference = None if reference is None else torch.tensor(reference)
    found = solve(torch.tensor(G, device=device), torch.tensor(rho), reference, constraint="inequality", **options)
    return found, found.direction.cpu().numpy()


def least_correction(U, rho, reference):
    """min ½‖g − ĝ‖² s.t. U g ≥ ρ."""
    g = cvxpy.Variable(U.shape[1])
    return convex(0.5 * cvxpy.sum_squares(g - reference), [U @ g >= rho], g)[0]


def least_violation(U, rho):
    """min ‖max(ρ − U g, 0)‖."""
    g = cvxpy.Variable(U.shape[1])
    value = convex(cvxpy.sum_squares(cvxpy.pos(rho - U @ g)), [], g)[0]
    return np.linalg.norm(np.maximum(rho - U @ value, 0))


def problem(m, d, seed, kind="plain", with_reference=True):
    """Updates, shares and a unit reference."""
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(m, d)) * rng.uniform(0.1, 10, size=(m, 1))
    if kind == "agreeing":
        G = G + 2 * rng.normal(size=d)
    elif kind == "near duplicates":
        G[1] = G[0] + 1e-4 * G[1]
    elif kind == "duplicates":
        G[m // 2 :] = 3 * G[: m - m // 2]
    rho = rng.dirichlet(np.ones(m))
    reference = rng.normal(size=d) if with_reference else np.zeros(d)
    return G, rho, reference / max(np.linalg.norm(reference), 1e-300)


# ---- U g ≥ ρ, the solve -----------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [3, 10, 30])
@pytest.mark.parametrize("kind", ["plain", "agreeing", "near duplicates", "duplicates"])
@pytest.mark.parametrize("with_reference", [False, True])
def test_inequality_is_the_quadratic_program(m, kind, with_reference, device):
    G, rho, reference = problem(m, 60, m, kind, with_reference)
    found, g = inequality(G, rho, reference, device=device)
    expected = least_correction(unit_rows(G), rho, reference)
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.alignment.cpu(), unit_rows(G) @ g, rtol=1e-8, atol=1e-10)
    assert (unit_rows(G) @ g > rho - 1e-9).all()
    assert found.residual < 1e-9
    assert found.kkt < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_inequality_multipliers_are_optimal(seed, device):
    """g = ĝ + Uᵀα with α ≥ 0, and α_i > 0 only where ⟨u_i, g⟩ = ρ_i."""
    G, rho, reference = problem(12, 40, seed)
    _, g = inequality(G, rho, reference, device=device)
    U = unit_rows(G)
    alpha = np.linalg.lstsq(U.T, g - reference, rcond=None)[0]
    np.testing.assert_allclose(U.T @ alpha, g - reference, atol=1e-12)
    slack = U @ g - rho
    assert alpha.min() > -1e-10
    assert slack.min() > -1e-10
    assert np.abs(alpha * slack).max() < 1e-10
    assert 0 < (alpha > 1e-9).sum() < 12  # some constraints bind, and not all


@pytest.mark.parametrize("kind", ["plain", "agreeing"])
@pytest.mark.parametrize("m", [2, 15])
def test_inequality_never_corrects_more_than_equality(m, kind):
    # What meets the equalities meets the inequalities.
    G, rho, reference = problem(m, 50, m, kind)
    _, g = inequality(G, rho, reference)
    equal = solve(torch.tensor(G), torch.tensor(rho), torch.tensor(reference)).direction.numpy()
    assert np.linalg.norm(g - reference) <= np.linalg.norm(equal - reference) + 1e-12


def test_a_reference_that_serves_everyone_stays_to_the_last_bit(device):
    G, rho, _ = problem(8, 40, 1)
    reference = np.linalg.pinv(unit_rows(G)) @ (rho + 0.01)
    found, g = inequality(G, rho, reference, device=device)
    np.testing.assert_array_equal(g, reference)
    assert found.residual == 0
    equal = solve(torch.tensor(G), torch.tensor(rho), torch.tensor(reference)).direction.numpy()
    assert np.linalg.norm(equal - reference) > 0.01  # the equality takes it back


def test_of_duplicates_the_larger_share_holds(device):
    """⟨u, g⟩ ≥ .2 and ≥ .5, ⟨v, g⟩ ≥ .3, u and v orthogonal: g = .5u + .3v."""
    u, v = np.eye(2, 30)
    found, g = inequality(np.stack([u, 4 * u, v]), np.array([0.2, 0.5, 0.3]), device=device)
    np.testing.assert_allclose(g, 0.5 * u + 0.3 * v, atol=1e-9)
    assert found.residual < 1e-9
    assert found.rank == 2


def test_opposite_clients_get_the_least_violation(device):
    """No g serves both: ⟨u, g⟩ = t violates by (.7 − t)₊ and (.3 + t)₊, least at t = .2, by .5 each; v is served."""
    u, v = np.eye(2, 30)
    found, g = inequality(np.stack([u, -3 * u, v]), np.array([0.7, 0.3, 0.4]), device=device)
    np.testing.assert_allclose(g, 0.2 * u + 0.4 * v, atol=1e-6)
    np.testing.assert_allclose(found.alignment.cpu(), [0.2, -0.2, 0.4], atol=1e-6)
    assert found.residual == pytest.approx(0.5 * np.sqrt(2) / np.linalg.norm([0.7, 0.3, 0.4]), rel=1e-5)
    assert found.kkt < 1e-5


@pytest.mark.parametrize(("m", "d"), [(12, 5), (30, 8), (50, 1)])
def test_a_layer_narrower_than_the_clients_gets_the_least_violation(m, d, device):
    G, rho, reference = problem(m, d, 3 * m)
    found, g = inequality(G, rho, reference, device=device)
    least = least_violation(unit_rows(G), rho)
    assert least > 0.01  # otherwise this would be about something else
    assert np.linalg.norm(np.maximum(rho - unit_rows(G) @ g, 0)) == pytest.approx(least, rel=1e-5)
    assert found.residual == pytest.approx(least / np.linalg.norm(rho), rel=1e-5)
    assert found.rank == d


@pytest.mark.parametrize(("m", "d"), [(12, 5), (40, 8)])
def test_a_narrow_layer_that_can_serve_everyone_does(m, d, device):
    G, rho, reference = problem(m, d, m, "agreeing")
    G = G * np.sign(G @ np.ones(d))[:, None] + 5  # all in one half space
    found, g = inequality(G, rho, reference, device=device)
    np.testing.assert_allclose(g, least_correction(unit_rows(G), rho, reference), rtol=1e-5, atol=1e-6)
    assert found.residual < 1e-8


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize("kind", ["plain", "duplicates", "narrow"])
def test_ridge_makes_the_constraints_soft(ridge, kind, device):
    """½‖g − ĝ‖² + ‖max(ρ − U g, 0)‖² / (2 ridge), by CVXPY."""
    G, rho, reference = problem(12, 5 if kind == "narrow" else 40, 5, kind)
    U, g = unit_rows(G), cvxpy.Variable(G.shape[1])
    soft = cvxpy.sum_squares(cvxpy.pos(rho - U @ g)) / (2 * ridge)
    (expected,) = convex(0.5 * cvxpy.sum_squares(g - reference) + soft, [], g)
    found, direction = inequality(G, rho, reference, ridge, device)
    np.testing.assert_allclose(direction, expected, rtol=1e-5, atol=1e-6)
    assert found.kkt < 1e-9


def test_inequality_leaves_out_a_client_without_an_update(device):
    G, rho, reference = problem(6, 30, 2)
    G[3] = 0
    found, g = inequality(G, rho, reference, device=device)
    active = np.arange(6) != 3
    scaled = rho[active] / rho[active].sum()
    np.testing.assert_allclose(g, least_correction(unit_rows(G[active]), scaled, reference), rtol=1e-5, atol=1e-7)
    assert float(found.alignment[3]) == 0


@pytest.mark.timeout(120)
def test_two_hundred_clients(device):
    G, rho, reference = problem(200, 800, 4, "agreeing")
    found, g = inequality(G, rho, reference, device=device)
    U = unit_rows(G)
    assert (U @ g > rho - 1e-10).all()
    alpha = np.linalg.lstsq(U.T, g - reference, rcond=None)[0]
    assert alpha.min() > -1e-9
    assert np.abs(alpha * (U @ g - rho)).max() < 1e-10
    assert found.kkt < 1e-10


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(8, 20), st.integers(0, 2**32 - 1))
def test_inequality_serves_everyone_where_updates_are_independent(m, d, seed):
    G, rho, reference = problem(m, d, seed)
    found, g = inequality(G, rho, reference)
    assert (unit_rows(G) @ g >= rho - 1e-8).all()
    assert found.kkt < 1e-8
    # The nearest point of a convex set: from ĝ, every other feasible point lies beyond it.
    other = np.linalg.pinv(unit_rows(G)) @ (rho + np.random.default_rng(seed).uniform(size=m))
    assert (g - reference) @ (other - g) >= -1e-7 * (1 + np.linalg.norm(other)) ** 2


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_inequality_does_not_depend_on_the_length_or_the_order_of_updates(m, d, seed):
    G, rho, reference = problem(m, d, seed)
    rng = np.random.default_rng(seed)
    order, lengths = rng.permutation(m), 10.0 ** rng.uniform(-6, 6, size=(m, 1))
    one, _ = inequality(G, rho, reference)
    two, _ = inequality((G * lengths)[order], rho[order], reference)
    np.testing.assert_allclose(two.alignment, one.alignment[order.tolist()], atol=1e-5)
    assert two.residual == pytest.approx(one.residual, abs=1e-6)


# ---- the strategy's options -------------------------------------------------------------------------------


def craft(sent, rho, previous, parts, *, scale="raw", constraint="equality"):
    """One round by CRAFT's formula in each of `parts`: the direction at the length asked for, and as solved."""
    G, direction, solved = matrix(sent), np.empty(SIZE), np.empty(SIZE)
    for part in parts:
        rows = G[:, part]
        U, ghat = unit_rows(rows), previous[part]
        if constraint == "equality":
            g = ghat + np.linalg.pinv(U, rcond=1e-10) @ (rho - U @ ghat)
        else:
            g = least_correction(U, rho, ghat)
        length = rho @ np.linalg.norm(rows, axis=1) if scale == "mean_norm" else np.linalg.norm(g)
        direction[part] = g / np.linalg.norm(g) * length
        solved[part] = g
    return direction, solved


def unit_parts(vector, parts):
    """Each part at unit length; one that is zero up to rounding (a layer of one number, +1 and −1) stays zero."""
    out = np.zeros(SIZE)
    for part in parts:
        norm = np.linalg.norm(vector[part])
        out[part] = vector[part] / norm if norm > 1e-12 else 0.0
    return out


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("reference", ["momentum", "zero", "ema"])
@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_reference_granularity_and_scale(granularity, reference, scale, device):
    """Three rounds; ĝ is the last direction, nothing, or r/‖r‖ with r ← .7r + .3 (direction at unit length)."""
    s = CRAFT(
        granularity=granularity,
        reference=reference,
        reference_decay=0.7,
        scale=scale,
        server_lr=0.5,
        server_lr_decay=0.9,
        layers=LAYERS,
        initial_parameters=parameters(),
        device=device,
    )
    parts = WHOLE if granularity == "model" else PARTS
    theta, ghat, average = start(), np.zeros(SIZE), None
    for number in (1, 2, 3):
        sent = clients(5, number)
        theta, step, metrics = play(s, number, theta, sent)
        direction, solved = craft(sent, shares(sent), ghat, parts, scale=scale)
        np.testing.assert_allclose(step, 0.5 * 0.9 ** (number - 1) * direction, rtol=1e-7, atol=1e-9)
        assert "kkt" not in metrics
        if granularity == "model":
            assert (metrics["rank"], metrics["residual"] < 1e-9, metrics["conflict_share_after"]) == (5, True, 0)
            length = shares(sent) @ np.linalg.norm(matrix(sent), axis=1)
            if scale == "mean_norm":
                assert metrics["direction_norm"] == pytest.approx(length)
        unit = unit_parts(solved, parts)
        average = unit if average is None else 0.7 * average + 0.3 * unit
        ghat = {"momentum": unit, "zero": np.zeros(SIZE), "ema": unit_parts(average, parts)}[reference]
    kept = bool(s.memory)
    assert kept == (reference != "zero")


def test_ema_without_decay_is_momentum():
    one = CRAFT(reference="ema", reference_decay=0, layers=LAYERS, initial_parameters=parameters())
    two = CRAFT(layers=LAYERS, initial_parameters=parameters())
    theta = start()
    for number in (1, 2, 3):
        sent = clients(4, number)
        after, step, _ = play(one, number, theta, sent)
        _, other, _ = play(two, number, theta, sent)
        np.testing.assert_allclose(step, other, rtol=1e-9, atol=1e-12)
        theta = after


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_inequality_over_two_rounds(granularity, scale, device):
    """Against CVXPY; the second round has a reference. Clients agree in the layer of one number, or none could gain."""
    s = CRAFT(
        constraint="inequality",
        granularity=granularity,
        scale=scale,
        layers=LAYERS,
        initial_parameters=parameters(),
        device=device,
    )
    parts = WHOLE if granularity == "model" else PARTS
    theta, ghat = start(), np.zeros(SIZE)
    for number in (1, 2):
        sent = clients(5, number, common=0.5)
        for client in sent.values():
            client.update[PARTS[2]] = np.abs(client.update[PARTS[2]])
        theta, step, metrics = play(s, number, theta, sent)
        direction, solved = craft(sent, shares(sent), ghat, parts, scale=scale, constraint="inequality")
        np.testing.assert_allclose(step, 0.1 * direction, rtol=1e-5, atol=1e-6)
        assert metrics["residual"] < 1e-9
        assert metrics["kkt"] < 1e-9
        assert metrics["conflict_share_after"] == 0
        ghat = unit_parts(solved, parts)


@pytest.mark.parametrize("power", [0, 0.5, 1, 3])
def test_targets_by_loss(power, device):
    # ρ_i ∝ n_i F_i^q.
    s = CRAFT(targets="loss", loss_power=power, layers=LAYERS, initial_parameters=parameters(), device=device)
    sent = clients(5, 11)
    _, step, _ = play(s, 1, start(), sent)
    rho = shares(sent) * losses_of(sent) ** power
    rho /= rho.sum()
    np.testing.assert_allclose(step, 0.1 * craft(sent, rho, np.zeros(SIZE), PARTS)[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Orthogonal unit updates: the direction's components are ρ. n = (10, 30), F = (6, 1).
        ({"targets": "data"}, [1 / 4, 3 / 4]),
        ({"targets": "uniform"}, [1 / 2, 1 / 2]),
        ({"targets": "loss"}, [60 / 90, 30 / 90]),
        ({"targets": "loss", "loss_power": 0}, [1 / 4, 3 / 4]),
        ({"targets": "loss", "loss_power": 2}, [360 / 390, 30 / 390]),
        ({"targets": "loss", "loss_power": 1e4}, [1, 0]),
    ],
)
@pytest.mark.parametrize("constraint", ["equality", "inequality"])
def test_targets_by_hand(options, expected, constraint):
    s = CRAFT(server_lr=1, constraint=constraint, initial_parameters=ndarrays_to_parameters([np.zeros(2)]), **options)
    sent = [
        result(0, [np.array([7.0, 0.0])], 10, {"initial_loss": 6.0}),
        result(1, [np.array([0.0, 0.1])], 30, {"initial_loss": 1.0}),
    ]
    np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], expected, rtol=1e-9, atol=1e-12)


def test_losses_of_zero_leave_the_data_shares():
    s = CRAFT(server_lr=1, targets="loss", initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    sent = [result(i, [np.eye(2)[i]], n, {"initial_loss": 0.0}) for i, n in enumerate((10, 30))]
    np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], [0.25, 0.75], rtol=1e-9)


@pytest.mark.parametrize(("targets", "accepted"), [("data", 3), ("uniform", 3), ("loss", 2)])
def test_initial_loss_is_required_for_targets_by_loss_only(targets, accepted):
    sent = [result(i, a, 10) for i, a in enumerate(trained(model(), 3))]
    del sent[1][1].metrics["initial_loss"]
    s = CRAFT(targets=targets, initial_parameters=ndarrays_to_parameters(model()))
    _, metrics = s.aggregate_fit(1, sent, [])
    assert metrics["clients_accepted"] == accepted
    if accepted == 2:
        (reason,) = json.loads(metrics["rejection_reasons"])
        assert "initial_loss" in reason
    asked = CRAFT(targets=targets, min_available_clients=2).configure_fit(1, parameters(), manager("ab"))
    assert all(("initial_loss" in ins.config) == (targets == "loss") for _, ins in asked)


def test_ridge_of_the_strategy_is_the_solvers():
    # Orthogonal unit updates, K = I: α = ρ / (1 + ridge), with either constraint.
    for constraint in ("equality", "inequality"):
        first = ndarrays_to_parameters([np.zeros(2)])
        s = CRAFT(server_lr=1, ridge=0.25, constraint=constraint, initial_parameters=first)
        sent = [result(i, [5.0 * np.eye(2)[i]], n) for i, n in enumerate((10, 30))]
        np.testing.assert_allclose(arrays_of(s.aggregate_fit(1, sent, [])[0])[0], [0.2, 0.6], rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"constraint": "both"}, "constraint"),
        ({"scale": "unit"}, "scale"),
        ({"targets": "size"}, "targets"),
        ({"loss_power": -1}, "loss_power"),
        ({"reference": "last"}, "reference"),
        ({"reference_decay": 1.0}, "reference_decay"),
        ({"reference_decay": -0.1}, "reference_decay"),
        ({"granularity": "tensor"}, "granularity"),
        ({"ridge": -1e-3}, "ridge"),
        ({"rtol": 1.0}, "rtol"),
        ({"server_lr": 0}, "server_lr"),
        ({"server_lr_decay": 1.1}, "server_lr_decay"),
    ],
)
def test_options_out_of_range_are_named(options, name):
    with pytest.raises(ValueError, match=f"^{name}=") as error:
        CRAFT(**options)
    assert "\n" not in str(error.value)


# ---- NormalisedMomentum -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_normalised_momentum_is_its_formula(scale, device):
    """Per layer ĝ + ḡ/‖ḡ‖, at length 1 or Σ ρ_i ‖g_i‖, over three rounds."""
    s = NormalisedMomentum(server_lr=0.5, scale=scale, layers=LAYERS, initial_parameters=parameters(), device=device)
    theta, ghat = start(), np.zeros(SIZE)
    for number in (1, 2, 3):
        sent = clients(4, number)
        theta, step, _ = play(s, number, theta, sent)
        ghat = unit_parts(ghat + unit_parts(shares(sent) @ matrix(sent), PARTS), PARTS)
        for part in PARTS:
            length = shares(sent) @ np.linalg.norm(matrix(sent)[:, part], axis=1) if scale == "mean_norm" else 1
            np.testing.assert_allclose(step[part], 0.5 * length * ghat[part], rtol=1e-8, atol=1e-11)


def test_normalised_momentum_by_hand():
    # Mean (2, 0), then (0, 5): directions (1, 0), (1, 1)/√2, and with (0, 1) once more (1, 1 + √2) at unit length.
    s = NormalisedMomentum(server_lr=1, min_completed=1, initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
    theta, expected = np.zeros(2), [[1, 0], np.array([1, 1]) / np.sqrt(2)]
    expected.append(np.array([1, 1 + np.sqrt(2)]) / np.sqrt(4 + 2 * np.sqrt(2)))
    for number, update in enumerate(([2, 0], [0, 5], [0, 0.1]), start=1):
        before = theta
        theta = arrays_of(s.aggregate_fit(number, [result(0, [theta + np.array(update)])], [])[0])[0]
        np.testing.assert_allclose(theta - before, expected[number - 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", ["raw", "mean_norm"])
def test_normalised_momentum_stays_where_updates_cancel(scale):
    s = NormalisedMomentum(server_lr=1, scale=scale, initial_parameters=ndarrays_to_parameters([np.zeros(3)]))
    g = np.array([0.1, -0.7, 0.3])
    theta, _ = s.aggregate_fit(1, [result(0, [3 * g], 10), result(1, [-g], 30)], [])
    np.testing.assert_array_equal(arrays_of(theta)[0], 0)


def test_normalised_momentum_names_a_scale_it_does_not_know():
    with pytest.raises(ValueError, match=r"^scale="):
        NormalisedMomentum(scale="unit")


@pytest.mark.parametrize("other", [{"reference": "ema"}, {"granularity": "model"}, {}])
def test_a_state_saved_under_other_options_brings_no_other_reference(other):
    """ĝ has length 1 over what is solved together whatever the state comes from; reference="zero" has none."""
    first = CRAFT(layers=LAYERS, initial_parameters=parameters(), **other)
    theta = start()
    for number in (1, 2):
        theta, _, _ = play(first, number, theta, clients(4, number))
    resumed = CRAFT(layers=LAYERS, reference="zero")
    resumed.load_state_dict(first.state_dict())
    fresh = CRAFT(layers=LAYERS, reference="zero", initial_parameters=parameters())
    sent = clients(4, 3)
    _, one, _ = play(fresh, 1, start(), sent)
    resumed._set_model(parameters())
    _, two, _ = play(resumed, 1, start(), sent)
    np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-15)
    layered = CRAFT(layers=LAYERS)
    layered.load_state_dict(first.state_dict())
    for layer in LAYERS.layers:
        (reference,) = layered._references([layer])
        assert float(reference.norm()) == pytest.approx(1, rel=1e-12)
