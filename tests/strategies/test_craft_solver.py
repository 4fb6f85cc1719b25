"""The CRAFT solve against a float64 pseudo-inverse, and its properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.solvers import craft
from strategies.solvers.craft import solve


def oracle(updates, targets, reference=None, rtol=1e-6):
    """g = ĝ + U⁺(ρ − Uĝ) by a float64 SVD; zero rows left out, targets scaled up to the same sum."""
    G = np.asarray(updates, np.float64)
    rho = np.asarray(targets, np.float64)
    norms = np.linalg.norm(G, axis=1)
    active = norms > 0
    U = G[active] / norms[active, None]
    rho = rho[active] * (rho.sum() / rho[active].sum())
    ghat = np.zeros(G.shape[1]) if reference is None else np.asarray(reference, np.float64)
    return ghat + np.linalg.pinv(U, rcond=rtol) @ (rho - U @ ghat), U, rho


def shares(m, seed):
    n = np.random.default_rng(seed).integers(1, 500, size=m).astype(float)
    return n / n.sum()


def close(actual, expected, rtol=1e-5):
    actual, expected = actual.cpu().numpy(), np.asarray(expected)
    assert np.linalg.norm(actual - expected) <= rtol * max(np.linalg.norm(expected), 1e-300)


@pytest.mark.parametrize("m", [1, 2, 7, 50])
@pytest.mark.parametrize("d", [10, 1000, 100_000])
@pytest.mark.parametrize("with_reference", [False, True])
def test_equals_the_pseudo_inverse(m, d, with_reference, device):
    # m > d is a layer narrower than m: the constraints cannot all be met, and the least-squares solution is right.
    rng = np.random.default_rng(m * d)
    G = rng.normal(size=(m, d)) * rng.uniform(0.1, 10, size=(m, 1))
    ref = rng.normal(size=d)
    ref = ref / np.linalg.norm(ref) if with_reference else None
    rho = shares(m, d)
    found = solve(torch.tensor(G, device=device), torch.tensor(rho), None if ref is None else torch.tensor(ref))
    expected, U, target = oracle(G, rho, ref)
    close(found.direction, expected)
    np.testing.assert_allclose(found.alignment.cpu(), U @ expected, rtol=1e-6, atol=1e-9)
    assert found.rank == min(m, d)
    misfit = np.linalg.norm(U @ expected - target) / np.linalg.norm(target)
    assert found.residual == pytest.approx(misfit, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("exponent", [-12, -6, 0, 6, 12])
def test_the_size_of_updates_does_not_matter(exponent, device):
    rng = np.random.default_rng(1)
    G, rho = rng.normal(size=(8, 200)), shares(8, 2)
    scales = 10.0**exponent * rng.uniform(0.5, 2, size=(8, 1))
    close(solve(torch.tensor(G * scales, device=device), torch.tensor(rho)).direction, oracle(G, rho)[0], 1e-9)


def test_very_different_sizes_in_one_round(device):
    rng = np.random.default_rng(3)
    G, rho = rng.normal(size=(6, 50)), shares(6, 3)
    scales = 10.0 ** np.array([[-12], [-5], [0], [1], [5], [12]])
    close(solve(torch.tensor(G * scales, device=device), torch.tensor(rho)).direction, oracle(G, rho)[0])


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_rows_that_cannot_be_squared_in_float64(scale, device):
    rng = np.random.default_rng(15)
    G, rho = rng.normal(size=(4, 30)), shares(4, 15)
    scales = np.array([[1.0], [scale], [1.0], [scale]])
    close(solve(torch.tensor(G * scales, device=device), torch.tensor(rho)).direction, oracle(G, rho)[0], 1e-9)


def test_targets_of_both_signs_are_never_turned_around(device):
    G = np.eye(3, 5)
    G[2] = 0
    found = solve(torch.tensor(G, device=device), torch.tensor([1.0, -2.0, 3.0]))
    np.testing.assert_allclose(found.direction.cpu(), [1, -2, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_dtype_is_solved_in_float64(dtype, device):
    G = torch.tensor(np.random.default_rng(4).normal(size=(10, 300))).to(dtype)
    rho = shares(10, 4)
    found = solve(G.to(device), torch.tensor(rho))
    assert found.direction.dtype == torch.float64
    close(found.direction, oracle(G.to(torch.float64).numpy(), rho)[0])


def test_a_zero_update_is_left_out_and_targets_renormalised(device):
    rng = np.random.default_rng(5)
    G, rho = rng.normal(size=(5, 40)), shares(5, 5)
    G[2] = 0
    found = solve(torch.tensor(G, device=device), torch.tensor(rho))
    close(found.direction, oracle(G, rho)[0])
    expected = rho / (1 - rho[2])
    expected[2] = 0
    np.testing.assert_allclose(found.alignment.cpu(), expected, rtol=1e-9)
    assert found.residual < 1e-9
    assert found.rank == 4


def test_all_updates_zero_leaves_the_reference(device):
    reference = torch.tensor([0.6, 0.8], dtype=torch.float64)
    found = solve(torch.zeros(3, 2, device=device), torch.full((3,), 1 / 3), reference)
    assert torch.equal(found.direction.cpu(), reference)
    assert (found.rank, found.residual) == (0, 0.0)


def test_duplicated_clients_get_the_mean_of_their_shares(device):
    # Infeasible with unequal shares: the pseudo-inverse gives both the mean.
    rng = np.random.default_rng(6)
    G, rho = rng.normal(size=(4, 1000)), np.array([0.1, 0.2, 0.3, 0.4])
    G[3] = G[0]
    found = solve(torch.tensor(G, device=device), torch.tensor(rho))
    close(found.direction, oracle(G, rho)[0])
    np.testing.assert_allclose(found.alignment.cpu(), [0.25, 0.2, 0.3, 0.25], rtol=1e-9)
    assert found.rank == 3
    # ‖(.15, 0, 0, −.15)‖ / ‖ρ‖
    assert found.residual == pytest.approx(0.15 * np.sqrt(2) / np.sqrt(0.3), rel=1e-9)


@pytest.mark.parametrize("d", [10, 36_928])
def test_many_exact_duplicates_do_not_explode(d, device):
    g = np.random.default_rng(7).normal(size=d)
    G = np.tile(g, (50, 1)) * np.random.default_rng(8).uniform(0.1, 3, size=(50, 1))
    found = solve(torch.tensor(G, device=device), torch.tensor(shares(50, 9)))
    assert found.rank == 1
    close(found.direction, g / np.linalg.norm(g) / 50)


def test_opposite_clients_leave_one_misaligned(device):
    # Rank 1: alignments are ±a with the least-squares a = (ρ_1 − ρ_2)/2.
    g = np.random.default_rng(10).normal(size=30)
    found = solve(torch.tensor(np.stack([g, -3 * g]), device=device), torch.tensor([0.7, 0.3]))
    np.testing.assert_allclose(found.alignment.cpu(), [0.2, -0.2], rtol=1e-6)
    close(found.direction, 0.2 * g / np.linalg.norm(g), 1e-6)
    assert found.rank == 1


def test_near_duplicates_are_feasible_but_long_and_rtol_cuts_them(device):
    rng = np.random.default_rng(11)
    g, h = rng.normal(size=(2, 500))
    G, rho = np.stack([g, g + 1e-3 * h]), np.array([0.8, 0.2])
    found = solve(torch.tensor(G, device=device), torch.tensor(rho))
    close(found.direction, oracle(G, rho)[0])
    np.testing.assert_allclose(found.alignment.cpu(), rho, rtol=1e-6)
    assert found.direction.norm() > 100
    cut = solve(torch.tensor(G, device=device), torch.tensor(rho), rtol=1e-2)
    close(cut.direction, oracle(G, rho, rtol=1e-2)[0])
    assert cut.rank == 1
    assert cut.direction.norm() < 1


def test_ridge_is_ridge_regression(device):
    # min ½‖g − ĝ‖² + ½/ridge ‖Ug − ρ‖², solved directly in the d-dimensional space.
    rng = np.random.default_rng(12)
    G, rho, ref = rng.normal(size=(4, 6)), shares(4, 12), rng.normal(size=6)
    U = G / np.linalg.norm(G, axis=1, keepdims=True)
    expected = ref + np.linalg.solve(np.eye(6) + U.T @ U / 0.3, U.T @ (rho - U @ ref) / 0.3)
    found = solve(torch.tensor(G, device=device), torch.tensor(rho), torch.tensor(ref), ridge=0.3)
    close(found.direction, expected, 1e-9)


def test_condition_500_in_float32_input(device):
    rng = np.random.default_rng(13)
    Q1, Q2 = np.linalg.qr(rng.normal(size=(20, 20)))[0], np.linalg.qr(rng.normal(size=(5000, 20)))[0]
    G = ((Q1 * np.geomspace(1, 1 / 500, 20)) @ Q2.T).astype(np.float32)
    rho = shares(20, 13)
    close(solve(torch.tensor(G, device=device), torch.tensor(rho)).direction, oracle(G, rho)[0], 1e-6)


def test_the_authors_float32_pinv_truncates_a_wide_layer_and_ours_does_not():
    # torch.linalg.pinv's default rtol is max(m, n)·eps: in float32 on a layer wide enough it exceeds the
    # smallest singular values of ordinary, well separated updates. Correlated clients, 270k columns.
    rng = np.random.default_rng(14)
    common = rng.normal(size=269_722)
    G = (common + 0.02 * rng.normal(size=(20, 269_722))).astype(np.float32)
    U = torch.tensor(G)
    U = U / U.norm(dim=1, keepdim=True)
    rho = torch.full((20,), 0.05)
    rho[0], rho[1] = 0.08, 0.02
    theirs = torch.linalg.pinv(U) @ rho
    residual = (U.double() @ theirs.double() - rho.double()).norm() / rho.double().norm()
    assert residual > 0.1
    ours = solve(torch.tensor(G), rho)
    assert ours.rank == 20
    assert ours.residual < 1e-6
    close(ours.direction, oracle(G, rho.numpy())[0])


def many_clients(kind, m, d, seed):
    """More clients than parameters, with what makes that harder."""
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(m, d)) * rng.uniform(0.1, 10, size=(m, 1))
    if kind == "zero rows":
        G[::7] = 0
    elif kind == "duplicates":  # fewer different clients than parameters
        G = G[rng.integers(0, max(1, d // 2), size=m)]
    elif kind == "common direction":
        G = rng.normal(size=d) + 0.01 * G
    return G


@pytest.mark.parametrize("kind", ["plain", "zero rows", "duplicates", "common direction"])
@pytest.mark.parametrize(("m", "d"), [(60, 6), (200, 20), (40, 29), (50, 1)])
@pytest.mark.parametrize("with_reference", [False, True])
def test_many_more_clients_than_parameters(kind, m, d, with_reference, device):
    G, rho = many_clients(kind, m, d, m + d), shares(m, d)
    ref = np.random.default_rng(d).normal(size=d) if with_reference else None
    found = solve(torch.tensor(G, device=device), torch.tensor(rho), None if ref is None else torch.tensor(ref))
    expected, U, target = oracle(G, rho, ref)
    active = np.linalg.norm(G, axis=1) > 0
    close(found.direction, expected, 1e-8)
    np.testing.assert_allclose(found.alignment.cpu()[active], U @ expected, rtol=1e-7, atol=1e-9)
    assert not found.alignment.cpu()[~active].any()
    assert found.rank == np.linalg.matrix_rank(U)
    misfit = np.linalg.norm(U @ expected - target) / np.linalg.norm(target)
    assert found.residual == pytest.approx(misfit, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("kind", ["plain", "zero rows", "duplicates", "common direction"])
@pytest.mark.parametrize("options", [{}, {"ridge": 0.1}, {"rtol": 0.05}])
def test_the_smaller_of_the_two_products_gives_the_same_coefficients(kind, options):
    G, rho = torch.tensor(many_clients(kind, 40, 8, 3)), torch.tensor(shares(40, 3))
    cross = G @ torch.ones(8, dtype=torch.float64)
    large = craft.coefficients(G @ G.T, cross, rho, **options)
    small = craft.coefficients(G @ G.T, cross, rho, updates=G, **options)
    torch.testing.assert_close(small.coefficients @ G, large.coefficients @ G, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(small.alignment, large.alignment, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(small.residual, large.residual, rtol=1e-8, atol=1e-12)
    assert small.rank == large.rank


@pytest.mark.parametrize("smallest", [1e-2, 1e-5, 1e-7, 3e-8, 1e-8, 1e-10, 0.0])
@pytest.mark.parametrize("rtol", [None, 1e-6])
def test_the_cut_is_by_eigenvalues_however_the_system_is_solved(smallest, rtol, device):
    """Singular values of U on either side of the cut; a factorisation replaces eigenvalues only far above it."""
    rng = np.random.default_rng(16)
    g = rng.normal(size=(2, 400))
    G = np.vstack([rng.normal(size=(18, 400)), g[0], g[0] + smallest * g[1]])
    G[4] = 0
    K = torch.tensor(G @ G.T)
    norms = K.diagonal().sqrt().clamp(min=1e-300)
    eigenvalues = torch.linalg.eigvalsh(K / norms / norms[:, None])
    cut = max((rtol or 0.0) ** 2, craft.ROUNDING * 20 * 2.0**-52) * eigenvalues[-1]
    found = solve(torch.tensor(G, device=device), torch.tensor(shares(20, 16)), rtol=rtol)
    assert found.rank == int((eigenvalues > cut).sum())


@pytest.mark.parametrize("with_zero_row", [False, True])
def test_a_factorisation_gives_what_eigenvalues_give(with_zero_row, monkeypatch):
    rng = np.random.default_rng(17)
    G, rho, ref = rng.normal(size=(30, 100)) + 3 * rng.normal(size=100), shares(30, 17), rng.normal(size=100)
    if with_zero_row:
        G[5] = 0
    args = torch.tensor(G), torch.tensor(rho), torch.tensor(ref)
    one = solve(*args)
    monkeypatch.setattr(craft, "_full_rank_factor", lambda *_: None)
    two = solve(*args)
    torch.testing.assert_close(one.direction, two.direction, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.alignment, two.alignment, rtol=1e-10, atol=1e-12)
    assert one.rank == two.rank == 30 - with_zero_row
    assert abs(one.residual - two.residual) < 1e-10


cases = st.tuples(st.integers(1, 8), st.integers(8, 30), st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_feasible_constraints_hold(case):
    m, d, seed = case
    rng = np.random.default_rng(seed)
    rho = torch.tensor(rng.dirichlet(np.ones(m)))
    found = solve(torch.tensor(rng.normal(size=(m, d))), rho, torch.tensor(rng.normal(size=d)))
    torch.testing.assert_close(found.alignment, rho, rtol=1e-6, atol=1e-8)
    assert found.residual < 1e-6


@settings(max_examples=40, deadline=None)
@given(cases)
def test_clients_may_come_in_any_order(case):
    m, d, seed = case
    rng = np.random.default_rng(seed)
    G, rho = torch.tensor(rng.normal(size=(m, d))), torch.tensor(rng.dirichlet(np.ones(m)))
    order = torch.tensor(rng.permutation(m))
    one, two = solve(G, rho), solve(G[order], rho[order])
    torch.testing.assert_close(two.direction, one.direction, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(two.alignment, one.alignment[order], rtol=1e-7, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_a_reference_that_already_serves_everyone_is_kept(case):
    m, d, seed = case
    rng = np.random.default_rng(seed)
    G = torch.tensor(rng.normal(size=(m, d)))
    reference = torch.tensor(rng.normal(size=d))
    rho = (G / G.norm(dim=1, keepdim=True)) @ reference
    torch.testing.assert_close(solve(G, rho, reference).direction, reference, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_each_update_may_be_scaled_freely(case):
    m, d, seed = case
    rng = np.random.default_rng(seed)
    G, rho = torch.tensor(rng.normal(size=(m, d))), torch.tensor(rng.dirichlet(np.ones(m)))
    scales = torch.tensor(10.0 ** rng.uniform(-6, 6, size=(m, 1)))
    torch.testing.assert_close(solve(G * scales, rho).direction, solve(G, rho).direction, rtol=1e-6, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_the_correction_is_the_smallest_one(case):
    # Any other feasible g differs by something orthogonal to the rows of U, and is further from ĝ.
    m, d, seed = case
    rng = np.random.default_rng(seed)
    G, rho, ref = rng.normal(size=(m, d)), rng.dirichlet(np.ones(m)), rng.normal(size=d)
    found = solve(torch.tensor(G), torch.tensor(rho), torch.tensor(ref)).direction.numpy()
    null = rng.normal(size=d)
    null -= np.linalg.pinv(G) @ (G @ null)
    assert np.linalg.norm(found + null - ref) >= np.linalg.norm(found - ref) - 1e-9


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"updates": torch.zeros(3)}, "matrix"),
        ({"updates": torch.zeros(0, 4), "targets": torch.zeros(0)}, "at least one row"),
        ({"updates": torch.zeros(2, 4, dtype=torch.int64)}, "floating-point"),
        ({"updates": torch.tensor([[1.0, float("nan"), 0, 0], [0, 1, 0, 0]])}, "NaN"),
        ({"targets": torch.ones(3)}, "targets"),
        ({"targets": torch.tensor([0.5, float("inf")])}, "targets"),
        ({"reference": torch.ones(3)}, "reference"),
        ({"reference": torch.tensor([0.0, torch.nan, 0, 0])}, "reference holds NaN"),
        ({"ridge": "big"}, "ridge"),
        ({"rtol": "tight"}, "rtol"),
        ({"constraint": "sideways"}, "constraint"),
        ({"ridge": -1.0}, "ridge"),
        ({"rtol": 2.0}, "rtol"),
    ],
)
def test_bad_input_is_one_sentence(kwargs, words):
    given_ = {"updates": torch.eye(2, 4), "targets": torch.tensor([0.5, 0.5]), **kwargs}
    with pytest.raises(ValueError, match=words) as error:
        solve(given_.pop("updates"), given_.pop("targets"), given_.pop("reference", None), **given_)
    assert "\n" not in str(error.value)
