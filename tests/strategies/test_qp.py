"""The quadratic programs and the simplex: against CVXPY, known answers, and their own certificates worked out here."""

import cvxpy
import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.solvers import qp, simplex

from .layered import convex, min_norm_weights


def tensor(values):
    return torch.tensor(np.asarray(values, np.float64))


def gap(G, weights, lower, upper):
    """How far a point of the box and simplex is from optimal, relative to the largest G_ii; asserts that it is one.

    λᵀGλ exceeds the minimum by at most twice λᵀGλ − min_λ' λ'ᵀGλ (convexity); the linear program is SciPy's.
    """
    assert weights.sum() == pytest.approx(1, abs=1e-9)
    assert (weights >= lower - 1e-12).all()
    assert (weights <= upper + 1e-12).all()
    slope = G @ weights
    m = len(slope)
    scale = max(np.abs(slope).max(), 1e-300)
    bounds = np.column_stack([np.broadcast_to(lower, m), np.broadcast_to(upper, m)])
    found = scipy.optimize.linprog(slope / scale, A_eq=np.ones((1, m)), b_eq=[1], bounds=bounds)
    return (weights @ slope - found.fun * scale) / G.diagonal().max()


def updates(kind, m, seed=0, d=None):
    """Rows of several shapes, each hard in its own way."""
    rng = np.random.default_rng(seed)
    d = d or m + 20
    A = rng.normal(size=(m, d))
    if kind == "rank":
        rank = max(1, m // 15)
        A = rng.normal(size=(m, rank)) @ rng.normal(size=(rank, d))
    elif kind == "identical":
        A = np.tile(A[:1], (m, 1))
    elif kind == "agreeing":
        A = A + 3 * rng.normal(size=d)
    return A


KINDS = ["plain", "rank", "identical", "agreeing"]

# ---- projection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.3], [1.0]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([1.0, 0.6], [0.7, 0.3]),
        ([5.0, 0.0, 0.0], [1, 0, 0]),
        ([-7.0, -7.0], [0.5, 0.5]),
        ([0.5, 0.5, -1.0], [0.5, 0.5, 0]),
        ([2.0, 2.0, 1.5, -9.0], [0.5, 0.5, 0, 0]),
    ],
)
def test_projection_by_hand(values, expected, device):
    found = simplex.project(tensor(values).to(device))
    np.testing.assert_allclose(found.cpu(), expected, atol=1e-15)


@pytest.mark.parametrize("m", [2, 10, 300])
@pytest.mark.parametrize("size", [0.01, 1, 100])
def test_projection_is_the_nearest_point(m, size):
    """p is nearest iff ⟨v − p, x − p⟩ ≤ 0 for all x of the simplex, i.e. for its corners."""
    v = size * np.random.default_rng(m).normal(size=m)
    p = simplex.project(tensor(v)).numpy()
    assert p.sum() == pytest.approx(1)
    assert p.min() >= 0
    assert (v - p).max() - (v - p) @ p <= 1e-12 * size * m


# ---- x ≥ 0 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("K", "b", "expected"),
    [
        ([[2.0]], [3.0], [1.5]),
        ([[2.0]], [-3.0], [0]),
        (np.eye(4), [1, -2, 3, 0], [1, 0, 3, 0]),
        # Without the bound x = (5/3, −4/3); with x_2 = 0, x_1 = 1 and the gradient by x_2 is 1 + 1 > 0.
        ([[2, 1], [1, 2]], [2, -1], [1, 0]),
        # Both positive: K⁻¹b.
        ([[2, 1], [1, 2]], [1, 1], [1 / 3, 1 / 3]),
    ],
)
def test_nonnegative_by_hand(K, b, expected, device):
    found = qp.nonnegative(tensor(K).to(device), tensor(b).to(device))
    np.testing.assert_allclose(found.x.cpu(), expected, atol=1e-14)
    assert float(found.kkt) < 1e-14


def test_nonnegative_of_nothing():
    assert qp.nonnegative(torch.zeros(0, 0, dtype=torch.float64), tensor([])).x.shape == (0,)


@pytest.mark.parametrize("m", [1, 2, 25, 300])
@pytest.mark.parametrize("kind", ["plain", "agreeing"])
@pytest.mark.parametrize("scale", [1e-12, 1, 1e12])
def test_nonnegative_satisfies_the_optimality_conditions(m, kind, scale):
    """x ≥ 0, w = Kx − b ≥ 0, x_i w_i = 0: enough for an optimum, as the problem is convex."""
    A = updates(kind, m, seed=m)
    K, b = A @ A.T, np.random.default_rng(m + 1).normal(size=m)
    found = qp.nonnegative(tensor(scale * K), tensor(b))
    x = scale * found.x.numpy()
    w = K @ x - b
    assert x.min() >= 0
    assert w.min() > -1e-9
    assert np.abs(x * w).max() < 1e-9 * max(1, x.max())
    assert float(found.kkt) < 1e-9


@pytest.mark.parametrize("m", [3, 20])
def test_nonnegative_is_cvxpys(m):
    A = updates("agreeing", m, seed=m)
    K, b = A @ A.T / 100, np.random.default_rng(m).normal(size=m)
    x = cvxpy.Variable(m)
    (expected,) = convex(0.5 * cvxpy.sum_squares(A.T / 10 @ x) - b @ x, [x >= 0], x)
    found = qp.nonnegative(tensor(K), tensor(b)).x.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_nonnegative_of_clients_of_very_different_sizes():
    # x* > 0 chosen, b = Kx*; with DKD and Db the answer is D⁻¹x*. Sizes over twelve orders of magnitude.
    rng = np.random.default_rng(0)
    A, x, sizes = rng.normal(size=(7, 20)), rng.uniform(0.1, 2, size=7), 10.0 ** np.arange(-6, 7, 2)
    K = A @ A.T
    found = qp.nonnegative(tensor(K * sizes[:, None] * sizes), tensor(sizes * (K @ x)))
    np.testing.assert_allclose(found.x.numpy() * sizes, x, rtol=1e-9)


@pytest.mark.parametrize("K", [[[1, 2], [2, 1]], [[1, 0], [0, -1]], [[1, 1], [1, 1]]])
def test_a_matrix_that_is_not_positive_definite_is_refused(K):
    with pytest.raises(qp.NoSolution, match="positive definite"):
        qp.nonnegative(tensor(K), tensor([1, 1]))


# ---- bounds and simplex -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("G", "lower", "upper", "expected"),
    [
        ([[3.0]], [0], [1], [1]),
        # λ ∝ 1 / G_ii for orthogonal updates.
        (np.diag([1.0, 2, 4]), [0, 0, 0], [1, 1, 1], [4 / 7, 2 / 7, 1 / 7]),
        (np.diag([1.0, 2, 4]), [0, 0, 0], [0.5, 1, 1], [0.5, 1 / 3, 1 / 6]),
        (np.diag([1.0, 2, 4]), [0, 0, 0.4], [1, 1, 1], [0.4, 0.2, 0.4]),
        # An update on the way to a longer one: the shorter alone.
        ([[1, 2], [2, 4]], [0, 0], [1, 1], [1, 0]),
        # Bounds that leave no choice, and updates that leave nothing to choose by.
        (np.eye(2), [0.3, 0.7], [0.3, 0.7], [0.3, 0.7]),
        (np.zeros((2, 2)), [0, 0.2], [0.4, 0.8], [0.32, 0.68]),
    ],
)
def test_box_simplex_by_hand(G, lower, upper, expected, device):
    found = qp.box_simplex(*(tensor(a).to(device) for a in (G, lower, upper)))
    np.testing.assert_allclose(found.x.cpu(), expected, atol=1e-6)
    assert float(found.kkt) < 1e-9


@pytest.mark.parametrize("m", [1, 2, 30, 300])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [0.1, 1e6])
def test_box_simplex_is_optimal_and_its_certificate_true(m, kind, width):
    A = updates(kind, m, seed=m)
    G = A @ A.T
    center = np.random.default_rng(m).dirichlet(np.ones(m))
    lower, upper = np.maximum(center - width / m, 0), np.minimum(center + width / m, 1)
    for scale in (1e-12, 1.0, 1e12) if m < 100 else (1e-12,):
        found = qp.box_simplex(tensor(scale * G), tensor(lower), tensor(upper))
        true = gap(scale * G, found.x.numpy(), lower, upper)
        assert true < 1e-9
        assert float(found.kkt) == pytest.approx(max(true, 0), abs=1e-11)


@pytest.mark.parametrize("m", [1, 2, 30, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_min_norm_is_optimal_and_its_certificate_true(m, kind):
    A = updates(kind, m, seed=m)
    G = A @ A.T
    for scale in (1e-12, 1.0, 1e12) if m < 100 else (1e12,):
        found = simplex.min_norm(tensor(scale * G))
        true = gap(scale * G, found.x.numpy(), 0.0, 1.0)
        assert true < 1e-9
        assert float(found.kkt) == pytest.approx(max(true, 0), abs=1e-11)


@pytest.mark.parametrize("m", [2, 8, 30])
@pytest.mark.parametrize("kind", ["plain", "agreeing"])
def test_min_norm_point_is_cvxpys(m, kind):
    A = updates(kind, m, seed=m)
    found = simplex.min_norm(tensor(A @ A.T)).x.numpy() @ A
    np.testing.assert_allclose(found, min_norm_weights(A) @ A, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
def test_min_norm_of_orthogonal_updates_of_very_different_sizes(size):
    # λ ∝ 1 / ‖g_i‖².
    squared = np.geomspace(1 / size, size, 7)
    found = simplex.min_norm(tensor(np.diag(squared)))
    np.testing.assert_allclose(found.x, 1 / squared / (1 / squared).sum(), rtol=1e-6, atol=1e-7)


def test_min_norm_of_opposite_updates_is_zero():
    # ¾·(1, 0) + ¼·(−3, 0) = 0.
    g = np.array([[1.0, 0.0], [-3.0, 0.0]])
    np.testing.assert_allclose(simplex.min_norm(tensor(g @ g.T)).x, [0.75, 0.25], atol=1e-12)


def test_min_norm_without_updates_is_the_mean():
    np.testing.assert_array_equal(simplex.min_norm(torch.zeros(4, 4, dtype=torch.float64)).x, np.full(4, 0.25))


# ---- when the first solver gives up, or lies --------------------------------------------------------------


def gives_up(*_, **__):
    raise RuntimeError("Maximum number of iterations reached.")


@pytest.mark.parametrize("m", [1, 2, 12, 60])
@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_the_second_solver_gives_the_same(m, scale, monkeypatch):
    A = updates("plain", m, seed=m)
    K, b = scale * A @ A.T, scale * np.random.default_rng(m).normal(size=m)
    one, two = qp.nonnegative(tensor(K), tensor(b)), simplex.min_norm(tensor(K))
    monkeypatch.setattr(scipy.optimize, "nnls", gives_up)
    other, another = qp.nonnegative(tensor(K), tensor(b)), simplex.min_norm(tensor(K))
    np.testing.assert_allclose(other.x, one.x, rtol=1e-7, atol=1e-7 * float(one.x.max()))
    np.testing.assert_allclose(another.x @ tensor(A), two.x @ tensor(A), atol=1e-7)
    assert max(float(other.kkt), float(another.kkt)) < 1e-9


def test_a_solver_that_does_not_finish_is_reported(monkeypatch):
    A = updates("plain", 40)
    monkeypatch.setattr(scipy.optimize, "nnls", gives_up)
    monkeypatch.setattr(qp, "SECONDS", 0.0)
    with pytest.raises(qp.NoSolution, match="40 clients was not solved"):
        qp.nonnegative(tensor(A @ A.T), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
def test_a_wrong_answer_has_a_large_certificate(wrong, monkeypatch):
    """K = I, b = (1, 2, −1) has x = (1, 2, 0); orthogonal unit updates have λ = (⅓, ⅓, ⅓)."""
    monkeypatch.setattr(scipy.optimize, "nnls", lambda *_, **__: (np.array(wrong), 0.0))
    assert float(qp.nonnegative(torch.eye(3, dtype=torch.float64), tensor([1, 2, -1])).kkt) >= 0.5
    kkt = float(simplex.min_norm(torch.eye(3, dtype=torch.float64)).kkt)
    assert kkt == pytest.approx(1.0 if wrong[1] == 0 else 0.0)


# ---- properties -------------------------------------------------------------------------------------------

cases = st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32 - 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases)
def test_the_min_norm_point_is_in_conflict_with_no_update(case):
    """⟨g_i, p⟩ ≥ ‖p‖² for the nearest point p of a convex set to the origin."""
    m, d, seed = case
    A = np.random.default_rng(seed).normal(size=(m, d))
    p = simplex.min_norm(tensor(A @ A.T)).x.numpy() @ A
    assert (A @ p).min() >= p @ p - 1e-8


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.floats(-12, 12))
def test_min_norm_weights_do_not_depend_on_the_scale_or_the_order_of_updates(case, exponent):
    m, d, seed = case
    rng = np.random.default_rng(seed)
    A, order = rng.normal(size=(m, d)), rng.permutation(m)
    p = simplex.min_norm(tensor(A @ A.T)).x.numpy() @ A
    B = A[order]
    other = simplex.min_norm(tensor(10.0**exponent * B @ B.T)).x.numpy() @ B
    np.testing.assert_allclose(other, p, atol=1e-7)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_projection_leaves_the_simplex_and_ignores_a_common_shift(m, seed):
    rng = np.random.default_rng(seed)
    p, v, shift = rng.dirichlet(np.ones(m)), rng.normal(size=m), rng.normal()
    np.testing.assert_allclose(simplex.project(tensor(p)), p, atol=1e-12)
    np.testing.assert_allclose(simplex.project(tensor(v + shift)), simplex.project(tensor(v)), atol=1e-12)


def test_projection_of_numbers_that_swallow_a_one():
    for values, expected in [
        ([1e16, 1.0], [1.0, 0.0]),
        ([1e17, 5.0, 3.0], [1.0, 0.0, 0.0]),
        ([1.7e308, 1.7e308], [0.5, 0.5]),
        ([-1e300, -1e300 * (1 + 1e-15)], [1.0, 0.0]),
    ]:
        np.testing.assert_allclose(simplex.project(torch.tensor(values, dtype=torch.float64)), expected, atol=1e-12)
