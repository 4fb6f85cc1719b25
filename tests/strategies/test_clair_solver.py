"""CLAIR's solve against CVXPY and NumPy, the reference simulation, and its properties."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.solvers import clair, lowrank
from strategies.solvers.clair import random_pairs, solve, solve_jointly
from strategies.solvers.lowrank import TooLargeError
from strategies.solvers.noise import noise_of_pairs, noise_of_stack, noise_of_tails, unit_quantile

from .clair_problems import problem

FORMS = ["pairs", "clients"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are faster without a second thread, and much faster where other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensor(array, device="cpu"):
    return torch.tensor(np.asarray(array), device=device)


def flags(found):
    """Who is voted out, as NumPy has it."""
    return ~found.members.cpu().numpy()


def all_pairs(count):
    return np.array([(j, k) for j in range(count) for k in range(j + 1, count)])


def incidence(pairs, count):
    """Δ, a row for each pair with 1 at j and −1 at k."""
    Delta = np.zeros((len(pairs), count))
    Delta[np.arange(len(pairs)), pairs[:, 0]] = 1
    Delta[np.arange(len(pairs)), pairs[:, 1]] = -1
    return Delta


def svt(X, threshold):
    """The prox of a nuclear norm."""
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    return (U * np.maximum(s - threshold, 0)) @ Vt


def shorten(blocks, threshold):
    """The prox of Frobenius norms of blocks."""
    norms = np.linalg.norm(blocks, axis=(1, 2), keepdims=True)
    return blocks * np.maximum(1 - threshold / np.maximum(norms, 1e-300), 0)


def centred(blocks):
    return blocks - blocks.mean(0)


def nuclear(X):
    return np.linalg.svd(X, compute_uv=False).sum()


def pair_objective(W, pairs, omega, low, sparse, L, S):
    D = W[pairs[:, 0]] - W[pairs[:, 1]]
    loss = 0.5 * (omega * np.square(D - L - S).sum((1, 2))).sum()
    return loss + low * nuclear(L.reshape(-1, W.shape[2])) + sparse * np.linalg.norm(S, axis=(1, 2)).sum()


def client_objective(W, low, sparse, M, C):
    K, _, p = W.shape
    loss = 0.5 * K * np.square(centred(W - M - C)).sum()
    return loss + low * np.sqrt(K) * nuclear(centred(M).reshape(-1, p)) + sparse * np.linalg.norm(C, axis=(1, 2)).sum()


def pair_penalties(noise, pairs, omega, shape):
    """λ_L and λ_S as documented: from the largest singular value of ΩΔ, √K for all pairs with weights 1."""
    K, q, p = shape
    weighted = omega[:, None] * incidence(pairs, K)
    largest = np.linalg.eigvalsh(weighted.T @ weighted)[-1]
    low = noise * np.sqrt(largest) * (np.sqrt(K * q) + np.sqrt(p))
    return low, omega.max() * noise * np.sqrt(2) * (np.sqrt(q * p) + np.sqrt(2 * np.log(len(pairs))))


def client_penalties(noise, shape):
    K, q, p = shape
    low = noise * np.sqrt(K) * (np.sqrt(K * q) + np.sqrt(p))
    return low, noise * K * (np.sqrt(q * p) + np.sqrt(2 * np.log(K)))


# ---- the program ---------------------------------------------------------------------------------------------------


def small(seed=0):
    """Five clients, small enough for CVXPY; the last one differs from the others by a matrix of full rank."""
    rng = np.random.default_rng(seed)
    W = problem(5, 0, seed, n=None, p=5, q=4, r=1).weights + 0.1 * rng.normal(size=(5, 4, 5))
    W[4] += 0.8 * rng.normal(size=(4, 5))
    return W


GRAPHS = {
    "all pairs": (all_pairs(5), np.ones(10)),
    "weighted": (all_pairs(5), np.linspace(0.5, 2, 10)),
    "a cycle and a chord": (np.array([(0, 1), (2, 1), (2, 3), (3, 4), (0, 4), (1, 3)]), np.array([1, 2, 0.5, 1, 1, 3])),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_pair_program_equals_cvxpy(graph):
    cp = pytest.importorskip("cvxpy")
    W, (pairs, omega) = small(2), GRAPHS[graph]
    low, sparse = pair_penalties(0.1, pairs, omega, W.shape)
    G, q, p = len(pairs), *W.shape[1:]
    D = W[pairs[:, 0]] - W[pairs[:, 1]]
    L, S = cp.Variable((G * q, p)), cp.Variable((G * q, p))
    blocks = [slice(g * q, (g + 1) * q) for g in range(G)]
    loss = sum(0.5 * w * cp.sum_squares(d - L[b] - S[b]) for w, d, b in zip(omega, D, blocks, strict=True))
    penalty = low * cp.normNuc(L) + sparse * sum(cp.norm(S[b], "fro") for b in blocks)
    best = cp.Problem(cp.Minimize(loss + penalty)).solve(solver=cp.CLARABEL)
    found = solve(tensor(W), rank=1, noise=0.1, pairs=pairs, pair_weights=omega, tolerance=1e-8)
    assert found.certificate.objective == pytest.approx(best, rel=1e-5)
    np.testing.assert_allclose(found.low_rank, L.value.reshape(G, q, p), atol=1e-3)
    np.testing.assert_allclose(found.sparse, S.value.reshape(G, q, p), atol=1e-3)
    sizes = found.sparse.flatten(1).norm(dim=1)
    assert (sizes > 0.1).any(), "a program without a sparse part tests nothing"
    assert (sizes == 0).any()
    assert found.low_rank.norm() > 1


def test_the_client_program_equals_cvxpy():
    cp = pytest.importorskip("cvxpy")
    W = small(2)
    low, sparse = client_penalties(0.1, W.shape)
    K, q, p = W.shape
    centre = np.kron(np.eye(K) - 1 / K, np.eye(q))
    M, C = cp.Variable((K * q, p)), cp.Variable((K * q, p))
    loss = 0.5 * K * cp.sum_squares(centre @ (W.reshape(-1, p) - M - C))
    penalty = low * np.sqrt(K) * cp.normNuc(centre @ M)
    penalty += sparse * sum(cp.norm(C[k * q : (k + 1) * q], "fro") for k in range(K))
    best = cp.Problem(cp.Minimize(loss + penalty)).solve(solver=cp.CLARABEL)
    found = solve(tensor(W), rank=1, noise=0.1, form="clients", tolerance=1e-8)
    assert found.certificate.objective == pytest.approx(best, rel=1e-5)
    np.testing.assert_allclose(found.low_rank, centred(M.value.reshape(K, q, p)), atol=1e-3)
    np.testing.assert_allclose(found.sparse, C.value.reshape(K, q, p), atol=1e-3)
    assert 0 < (found.sparse.flatten(1).norm(dim=1) > 0.1).sum() < K


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_objective_is_that_of_what_is_returned(graph):
    W, (pairs, omega) = small(1), GRAPHS[graph]
    low, sparse = pair_penalties(0.1, pairs, omega, W.shape)
    found = solve(tensor(W), rank=1, noise=0.1, pairs=pairs, pair_weights=omega)
    objective = pair_objective(W, pairs, omega, low, sparse, found.low_rank.numpy(), found.sparse.numpy())
    assert found.certificate.objective == pytest.approx(objective, rel=1e-9)


def test_the_objective_of_the_client_form_is_that_of_what_is_returned():
    W = small(1)
    found = solve(tensor(W), rank=1, noise=0.1, form="clients")
    objective = client_objective(W, *client_penalties(0.1, W.shape), found.low_rank.numpy(), found.sparse.numpy())
    assert found.certificate.objective == pytest.approx(objective, rel=1e-9)


def test_alternating_both_proxes_leads_to_the_same_optimum(device):
    # With ω = 1 each of L and S has a closed form given the other.
    W, (pairs, omega) = small(2), GRAPHS["all pairs"]
    low, sparse = pair_penalties(0.07, pairs, omega, W.shape)
    D = W[pairs[:, 0]] - W[pairs[:, 1]]
    L, S = np.zeros_like(D), np.zeros_like(D)
    for _ in range(3000):
        L = svt((D - S).reshape(-1, 5), low).reshape(D.shape)
        S = shorten(D - L, sparse)
    found = solve(tensor(W, device), rank=1, noise=0.07, tolerance=1e-9)
    assert found.converged
    best = pair_objective(W, pairs, omega, low, sparse, L, S)
    assert found.certificate.objective == pytest.approx(best, rel=1e-9)
    np.testing.assert_allclose(found.low_rank.cpu(), L, atol=1e-6)
    np.testing.assert_allclose(found.sparse.cpu(), S, atol=1e-6)
    assert np.linalg.norm(L) > 1
    assert np.linalg.norm(S) > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("iterations", [1, 2, 3, 7, 20])
def test_the_gap_bounds_what_is_missing_to_the_optimum(form, iterations):
    W = tensor(problem(8, 2, 3).weights)
    best = solve(W, rank=2, noise=0.07, form=form, tolerance=1e-11, max_iterations=20_000).certificate
    assert best.converged
    assert best.gap < 1e-9
    found = solve(W, rank=2, noise=0.07, form=form, tolerance=1e-11, max_iterations=iterations).certificate
    missing = (found.objective - best.objective) / found.objective
    assert missing > 0
    assert found.gap >= missing


@pytest.mark.parametrize("form", FORMS)
def test_a_solve_that_stops_early_says_so(form):
    found = solve(tensor(problem(8, 2, 3).weights), rank=2, form=form, refit=True, max_iterations=3)
    assert found.iterations == 3
    assert not found.converged
    assert found.certificate.residual > 1e-6
    assert "3 iterations" in found.warning
    assert "max_iterations" in found.warning
    assert "\n" not in found.warning


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("iterations", [1, 2, 30])
def test_warm_starts_count_as_iterations(form, iterations):
    # So little noise that the program is solved for larger λ first.
    found = solve(tensor(problem(8, 2, 3).weights), rank=2, noise=1e-9, form=form, max_iterations=iterations)
    assert found.iterations == iterations


@pytest.mark.parametrize("form", FORMS)
def test_the_tolerance_is_that_of_the_residual(form):
    W = tensor(problem(10, 3, 4).weights)
    loose, tight = (solve(W, rank=2, form=form, tolerance=t) for t in (1e-2, 1e-9))
    assert loose.converged
    assert tight.converged
    assert loose.certificate.residual <= 1e-2
    assert tight.certificate.residual <= 1e-9
    assert loose.iterations < tight.iterations


@pytest.mark.parametrize("form", FORMS)
def test_a_client_infinitely_far_off_does_not_keep_the_program_from_its_optimum(form):
    # Huber's loss: beyond a distance its pull does not depend on it.
    P = problem(8, 0, 5)
    bases = []
    for factor in (1e6, 1e12, 1e18, 1e100):
        W = P.weights.copy()
        W[3] *= factor
        found = solve(tensor(W), rank=2, noise=0.07, form=form, tolerance=1e-9)
        assert found.converged
        assert abs(found.certificate.gap) < 1e-6
        bases.append(found.projector)
    for other in bases[1:]:
        torch.testing.assert_close(other, bases[0], rtol=0, atol=1e-5)


# ---- the constants -------------------------------------------------------------------------------------------------


def test_the_penalties_and_the_threshold_are_as_documented():
    W = problem(7, 2, 6).weights
    found = solve(tensor(W), rank=3, noise=0.05)
    assert found.lambda_low == pytest.approx(0.05 * np.sqrt(7) * (np.sqrt(70) + np.sqrt(20)), rel=1e-12)
    assert found.lambda_sparse == pytest.approx(0.05 * np.sqrt(2) * (np.sqrt(200) + np.sqrt(2 * np.log(21))), rel=1e-12)
    assert found.threshold == pytest.approx(0.5 * 0.05 * np.sqrt(10 * 17), rel=1e-12)


def test_the_penalties_follow_the_graph_of_pairs():
    W, pairs = problem(8, 1, 7).weights, random_pairs(8, 3, 1)
    omega = np.linspace(0.5, 2, len(pairs))
    found = solve(tensor(W), rank=2, noise=0.05, pairs=pairs, pair_weights=omega)
    low, sparse = pair_penalties(0.05, pairs.numpy(), omega, W.shape)
    assert (found.lambda_low, found.lambda_sparse) == pytest.approx((low, sparse), rel=1e-9)


def test_the_penalties_of_the_client_form():
    W = problem(8, 1, 7).weights
    found = solve(tensor(W), rank=2, noise=0.05, form="clients")
    assert (found.lambda_low, found.lambda_sparse) == pytest.approx(client_penalties(0.05, W.shape), rel=1e-12)


def test_lambda_low_is_what_the_largest_singular_value_of_noise_does_not_exceed():
    # What it is derived from: ‖D‖ of K clients of noise is about √K(√(Kq) + √p), and stays below it as a rule.
    rng = np.random.default_rng(8)
    largest = []
    for _ in range(50):
        W, pairs = rng.normal(size=(8, 10, 20)), all_pairs(8)
        largest.append(np.linalg.norm((W[pairs[:, 0]] - W[pairs[:, 1]]).reshape(-1, 20), 2))
    low, _ = pair_penalties(1.0, all_pairs(8), np.ones(28), (8, 10, 20))
    assert 0.9 * low < np.mean(largest) < low


# ---- the votes and the refined weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_votes_are_counts_of_close_pairs(form, device):
    P = problem(9, 3, 9)
    found = solve(tensor(P.weights, device), rank=2, form=form)
    pairs, S = found.pairs.cpu().numpy(), found.sparse.cpu().numpy()
    if form == "clients":
        S = S[pairs[:, 0]] - S[pairs[:, 1]]
    outside = np.eye(20) - found.projector.cpu().numpy()
    distances = np.linalg.norm(S @ outside, axis=(1, 2))
    np.testing.assert_allclose(found.distances.cpu(), distances, atol=1e-7)
    close = distances <= found.threshold
    votes = np.array([close[(pairs == k).any(1)].sum() for k in range(9)])
    np.testing.assert_array_equal(found.votes.cpu(), votes)
    assert (found.comparisons == 8).all()
    np.testing.assert_array_equal(found.members.cpu(), votes >= (9 - 1) / 2)
    np.testing.assert_allclose(found.margins.cpu(), votes / 8 - 0.5)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_members_are_refined_and_others_left_as_they_are(form, refit, device):
    P = problem(10, 3, 10)
    W, shares = P.weights, np.arange(1.0, 11.0)
    found = solve(tensor(W, device), form=form, refit=refit, client_weights=shares)
    members, projector = found.members.cpu().numpy(), found.projector.cpu().numpy()
    assert 0 < members.sum() < 10
    mean = np.einsum("k,kqp->qp", shares[members] / shares[members].sum(), W[members])
    np.testing.assert_allclose(found.mean.cpu(), mean, atol=1e-12)
    expected = W[members] @ projector + mean @ (np.eye(20) - projector)
    np.testing.assert_allclose(found.refined.cpu()[members], expected, atol=1e-12)
    assert torch.equal(found.refined.cpu()[~members], tensor(W)[~members])
    assert found.refined.dtype == torch.float64
    np.testing.assert_allclose(found.basis.cpu().T @ found.basis.cpu(), np.eye(2), atol=1e-12)


def test_without_refit_the_subspace_is_that_of_the_low_rank_part():
    found = solve(tensor(problem(10, 1, 11).weights), rank=2)
    Vt = np.linalg.svd(found.low_rank.reshape(-1, 20).numpy(), full_matrices=False)[2][:2]
    np.testing.assert_allclose(found.projector, Vt.T @ Vt, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_with_refit_the_subspace_is_that_of_the_members(form):
    P = problem(10, 3, 12)
    found = solve(tensor(P.weights), rank=2, form=form, refit=True)
    Vt = np.linalg.svd(centred(P.weights[found.members.numpy()]).reshape(-1, 20))[2][:2]
    np.testing.assert_allclose(found.projector, Vt.T @ Vt, atol=1e-9)


def test_the_gain_is_that_of_the_formula_and_the_cost_is_within_what_the_subspace_is_worth():
    P = problem(10, 1, 13)
    s = 1 / np.sqrt(200 - 21)  # of least squares with 20 inputs and 200 samples
    found = solve(tensor(P.weights), rank=2, noise=s, refit=True)
    assert found.gain == pytest.approx((1 - 1 / 9) * 10 * 18 * s**2, rel=1e-12)
    # The members' own singular vectors: first-order perturbation, and nothing else beyond noise but by chance.
    assert found.cost >= 2 * 18 * s**2 / 9 * (1 - 1e-12)
    assert found.cost < 0.25 * found.gain
    assert found.warning is None


@pytest.mark.parametrize("form", FORMS)
def test_the_gain_is_what_collaboration_takes_off_the_error(form):
    s, gains, taken = 1 / np.sqrt(200 - 21), [], []
    for seed in range(20):
        P = problem(10, 1, 100 + seed)
        found = solve(tensor(P.weights), rank=2, noise=s, form=form, refit=True)
        gains.append(found.gain - found.cost)
        taken.append(P.error(P.weights) - P.error(found.refined))
    assert np.mean(gains) == pytest.approx(np.mean(taken), rel=0.1)


def test_a_cost_beyond_the_gain_is_warned_of():
    # Benign clients differ by more than noise outside of the subspace, and sharing it costs that.
    s, het = 1 / np.sqrt(200 - 21), 0.08
    costs = []
    for seed in range(10):
        found = solve(tensor(problem(10, 0, 14 + seed, het=het).weights), rank=2, noise=s)
        assert found.members.sum() >= 8
        assert found.cost > found.gain
        assert "does not pay" in found.warning
        assert "\n" not in found.warning
        costs.append(found.cost)
    expected = (1 - 1 / 10) * 10 * 18 * het**2 + 2 * 18 * s**2 / 10
    assert np.mean(costs) == pytest.approx(expected, rel=0.15)


# ---- the reference simulation --------------------------------------------------------------------------------------

# METHODS.md, section 3: mean benign MSE by (clients, contaminated).
PLAIN = {(10, 1): 0.57, (10, 3): 1.27, (20, 4): 0.42, (40, 8): 0.19}
REFIT = {(10, 1): 0.28, (10, 3): 0.29}
TRUE_SUBSPACE = {(10, 1): 0.24, (10, 3): 0.26}


@pytest.fixture(scope="module")
def reference():
    """Mean errors and their standard errors over repetitions, by clients, contaminated and method."""
    table = {}
    for count, bad in PLAIN:
        rows = []
        for seed in range(50 if count < 40 else 15):
            P = problem(count, bad, seed)
            W, mean = P.weights, P.weights[~P.bad].mean(0)
            errors = {"local": P.error(W), "mean": P.error(np.broadcast_to(mean, W.shape))}
            errors["subspace"] = P.error(mean + (W - mean) @ P.common.T @ P.common)
            for refit in (False, True):
                found = solve(tensor(W), rank=2, refit=refit)
                errors["refit" if refit else "plain"] = P.error(found.refined)
                errors["exact refit" if refit else "exact plain"] = (flags(found) == P.bad).all()
            rows.append(errors)
        for name in rows[0]:
            drawn = np.array([row[name] for row in rows], float)
            table[count, bad, name] = drawn.mean(), drawn.std() / np.sqrt(len(drawn))
    return table


@pytest.mark.parametrize("size", PLAIN)
def test_reference_errors_of_least_squares_and_of_the_mean(reference, size):
    # Least squares: q p/(n − p − 1). The mean of m benign clients: (1 − 1/m) E‖B_k‖² = (1 − 1/m) r, and 1/m of that.
    m, alone = size[0] - size[1], 200 / (200 - 21)
    local, mean = reference[*size, "local"][0], reference[*size, "mean"][0]
    assert local == pytest.approx(alone, rel=0.02)
    assert local == pytest.approx(1.14, rel=0.05)
    assert mean == pytest.approx((1 - 1 / m) * 2 + alone / m, rel=0.05)


@pytest.mark.parametrize("size", PLAIN)
def test_reference_errors_of_the_papers_method(reference, size):
    found, error = reference[*size, "plain"]
    assert found == pytest.approx(PLAIN[size], abs=0.1 * PLAIN[size] + 2 * error)


@pytest.mark.parametrize("size", REFIT)
def test_reference_errors_of_the_refit_and_of_the_true_subspace(reference, size):
    assert reference[*size, "refit"][0] == pytest.approx(REFIT[size], rel=0.12)
    assert reference[*size, "subspace"][0] == pytest.approx(TRUE_SUBSPACE[size], rel=0.08)


@pytest.mark.parametrize("size", PLAIN)
def test_the_refit_is_nearly_as_good_as_the_true_subspace(reference, size):
    assert reference[*size, "refit"][0] < 1.2 * reference[*size, "subspace"][0]


def test_at_3_of_10_the_papers_method_loses_to_local_estimates_and_the_refit_does_not(reference):
    assert reference[10, 3, "plain"][0] > 1.05 * reference[10, 3, "local"][0]
    assert reference[10, 3, "refit"][0] < 0.3 * reference[10, 3, "local"][0]


@pytest.mark.parametrize("size", PLAIN)
def test_the_reference_sets_are_found(reference, size):
    assert reference[*size, "exact plain"][0] >= 0.9
    assert reference[*size, "exact refit"][0] >= 0.95


# ---- detection -----------------------------------------------------------------------------------------------------


def exact_rate(count, bad, repetitions, rank, **options):
    hits = 0
    for seed in range(repetitions):
        P = problem(count, bad, 1000 + seed, **options)
        hits += (flags(solve(tensor(P.weights), rank=rank, refit=True)) == P.bad).all()
    return hits / repetitions


@pytest.mark.parametrize("rank", [None, 2], ids=["rank unknown", "rank known"])
@pytest.mark.parametrize(
    ("count", "bad", "repetitions", "options"),
    [
        (5, 1, 40, {}),
        (5, 1, 40, {"het": 0.03}),
        (5, 2, 40, {"n": 1000}),
        (10, 1, 40, {}),
        (10, 3, 40, {}),
        (10, 4, 40, {"n": 1000}),
        (10, 3, 40, {"het": 0.03}),
        (20, 4, 20, {"het": 0.03}),
        (20, 9, 20, {}),
        (40, 8, 8, {}),
        (40, 18, 8, {"het": 0.03}),
    ],
)
def test_contaminated_clients_are_found(count, bad, repetitions, options, rank):
    assert exact_rate(count, bad, repetitions, rank, **options) >= 0.95


@pytest.mark.parametrize("rank", [None, 2], ids=["rank unknown", "rank known"])
@pytest.mark.parametrize("n", [60, 200, 1000])
@pytest.mark.parametrize(("count", "repetitions"), [(5, 50), (10, 50), (20, 15)])
def test_nobody_is_accused_where_nobody_is_contaminated(count, repetitions, n, rank):
    # At most one run of 50.
    assert exact_rate(count, 0, repetitions, rank, n=n) >= 0.98


@pytest.mark.parametrize("form", FORMS)
def test_the_rank_is_found(form):
    for r in (1, 2, 3):
        P = problem(12, 3, 15, r=r, n=1000)
        found = solve(tensor(P.weights), form=form, refit=True)
        assert found.rank == r
        assert found.basis.shape == (20, r)


def test_the_rank_is_that_of_benign_clients_where_contaminated_ones_agree_with_some_by_chance():
    # One that agrees with a majority by pairs alone must not be in the first fit: its subspace would add to the rank.
    for seed in range(10):
        P = problem(20, 4, 54 + seed, n=100)
        found = solve(tensor(P.weights), max_iterations=1)
        assert found.rank == 2


def test_the_subspace_error_falls_with_the_square_root_of_the_number_of_clients():
    # The paper's rate, O(K^−½): a factor of 2 from 10 to 40 clients.
    errors = {}
    for count, repetitions in ((10, 20), (40, 8)):
        drawn = []
        for seed in range(repetitions):
            P = problem(count, count // 5, 200 + seed)
            found = solve(tensor(P.weights), rank=2, refit=True)
            drawn.append(np.linalg.norm(found.projector.numpy() - P.common.T @ P.common))
        errors[count] = np.mean(drawn)
    assert errors[10] / errors[40] == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("count", "bad"), [(9, 4), (10, 4), (11, 5)])
def test_a_bare_majority_is_enough(count, bad, refit):
    P = problem(count, bad, 16, n=1000)
    np.testing.assert_array_equal(flags(solve(tensor(P.weights), rank=2, refit=refit)), P.bad)


@pytest.mark.parametrize("refit", [False, True])
def test_half_of_the_clients_are_no_majority(refit):
    # Each benign one agrees with 4 of 9 others, and 4½ are needed.
    P = problem(10, 5, 17, n=1000)
    found = solve(tensor(P.weights), rank=2, refit=refit)
    assert not found.members.any()
    assert torch.equal(found.refined, tensor(P.weights))
    np.testing.assert_allclose(found.mean, P.weights.mean(0), atol=1e-12)


# ---- invariances ---------------------------------------------------------------------------------------------------

WAYS = [(form, refit) for form in FORMS for refit in (False, True)]


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize("rank", [None, 2])
def test_the_order_of_clients_does_not_matter(form, refit, rank, device):
    P = problem(9, 3, 18)
    order = np.random.default_rng(18).permutation(9)
    options = {"rank": rank, "form": form, "refit": refit}
    found, other = (solve(tensor(W, device), **options) for W in (P.weights, P.weights[order]))
    assert torch.equal(other.members, found.members[order])
    assert torch.equal(other.votes, found.votes[order])
    torch.testing.assert_close(other.refined, found.refined[order], rtol=0, atol=1e-10)
    torch.testing.assert_close(other.mean, found.mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("form", "refit"), WAYS)
def test_what_is_common_to_all_does_not_matter_but_for_the_rounding_of_the_input(form, refit, device):
    P = problem(10, 3, 19)
    start = 1e6 * np.random.default_rng(19).normal(size=(10, 20))
    moved = P.weights + start
    options = {"form": form, "refit": refit}
    found, other = solve(tensor(P.weights, device), **options), solve(tensor(moved, device), **options)
    assert torch.equal(other.members, found.members)
    # Rounding of an entry of 4e6 is 5e−10; the subspace moves by that over the gap, times the largest weights.
    rounded = solve(tensor(moved - start, device), **options)
    few = 8 * np.abs(start).max() * np.finfo(float).eps
    torch.testing.assert_close(other.refined - tensor(start, device), rounded.refined, rtol=0, atol=few)
    torch.testing.assert_close(rounded.refined, found.refined, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize("rank", [None, 2])
def test_an_orthogonal_change_of_basis_of_the_rows_is_followed(form, refit, rank):
    P = problem(10, 3, 20)
    Q = np.linalg.qr(np.random.default_rng(20).normal(size=(20, 20)))[0]
    options = {"rank": rank, "form": form, "refit": refit, "tolerance": 1e-10}
    found, other = (solve(tensor(W), **options) for W in (P.weights, P.weights @ Q))
    assert torch.equal(other.members, found.members)
    torch.testing.assert_close(other.refined, found.refined @ tensor(Q), rtol=0, atol=1e-7)
    torch.testing.assert_close(other.projector, tensor(Q).T @ found.projector @ tensor(Q), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize("scale", [1e-100, 1e-20, 1e20, 1e100])
@pytest.mark.parametrize("rank", [None, 2])
def test_the_size_of_weights_does_not_matter(form, refit, scale, rank, device):
    P = problem(10, 3, 21)
    options = {"rank": rank, "form": form, "refit": refit}
    found, other = (solve(tensor(W, device), **options) for W in (P.weights, scale * P.weights))
    assert torch.equal(other.members, found.members)
    assert other.noise == pytest.approx(scale * found.noise, rel=1e-9)
    torch.testing.assert_close(other.refined / scale, found.refined, rtol=0, atol=1e-9)


def test_pair_weights_count_by_their_ratio():
    # With ω and both λ multiplied, the program is the same; λ follows ω.
    W, omega = tensor(problem(8, 2, 22).weights), np.linspace(0.5, 2, 28)
    found, other = (solve(W, rank=2, noise=0.07, pair_weights=c * omega, tolerance=1e-9) for c in (1.0, 1e6))
    torch.testing.assert_close(other.low_rank, found.low_rank, rtol=0, atol=1e-6)
    assert torch.equal(other.votes, found.votes)


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_zeros_and_many_more_columns_than_clients_have_rows(form):
    # p > K q: computed in coordinates of the rows' span, which padding with zeros does not change.
    P = problem(6, 1, 23, n=1000, p=12, q=3, r=1)
    options = {"rank": 1, "noise": 0.03, "form": form, "tolerance": 1e-10}
    found = solve(tensor(P.weights), **options)
    rng = np.random.default_rng(23)
    Q = np.linalg.qr(rng.normal(size=(400, 12)))[0]
    low, sparse = found.lambda_low, found.lambda_sparse
    wide = solve(tensor(P.weights @ Q.T), **options)
    assert wide.basis.shape[0] == 400
    assert wide.lambda_low > low
    assert wide.lambda_sparse > sparse
    M = wide.members.numpy()
    Pr = wide.projector.numpy()
    W = P.weights @ Q.T
    np.testing.assert_allclose(wide.refined[M], W[M] @ Pr + W[M].mean(0) @ (np.eye(400) - Pr), atol=1e-10)
    penalties = pair_penalties(0.03, all_pairs(6), np.ones(15), W.shape)
    if form == "pairs":
        objective = pair_objective(W, all_pairs(6), 1, *penalties, wide.low_rank.numpy(), wide.sparse.numpy())
    else:
        objective = client_objective(W, *client_penalties(0.03, W.shape), wide.low_rank.numpy(), wide.sparse.numpy())
    assert wide.certificate.objective == pytest.approx(objective, rel=1e-9)


# ---- input that is hard --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_names_the_client(value):
    W = tensor(problem(6, 1, 24).weights)
    W[4, 2, 3] = value
    with pytest.raises(ValueError, match="client 4 hold NaN or Inf"):
        solve(W)


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize("rank", [None, 0, 2])
@pytest.mark.parametrize("value", [0.0, 7.0, 1e-140, 1e140])
def test_identical_clients_are_all_members_and_keep_their_weights(form, refit, rank, value, device):
    W = torch.full((6, 3, 4), value, dtype=torch.float64, device=device)
    found = solve(W, rank=rank, form=form, refit=refit)
    assert found.members.all()
    assert torch.equal(found.refined, W)
    assert found.warning is None


@pytest.mark.parametrize(("form", "refit"), WAYS)
def test_one_that_differs_from_identical_ones_is_found(form, refit):
    W = np.repeat(problem(6, 0, 25).weights[:1], 6, axis=0)
    W[2] = problem(6, 0, 26).weights[0]
    found = solve(tensor(W), form=form, refit=refit, max_iterations=200)
    np.testing.assert_array_equal(flags(found), np.arange(6) == 2)
    torch.testing.assert_close(found.refined, tensor(W), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_far_off_is_left_out_and_harms_no_other(form, refit, dtype, device):
    P = problem(10, 2, 27)
    victim = int(np.flatnonzero(~P.bad)[0])
    W = tensor(P.weights).to(dtype)
    near, far = W.clone(), W.clone()
    near[victim] *= 1e6
    far[victim] *= 1e9
    options = {"rank": 2, "form": form, "refit": refit, "tolerance": 1e-9}
    found, other = (solve(w.to(device), **options) for w in (near, far))
    expected = P.bad.copy()
    expected[victim] = True
    np.testing.assert_array_equal(flags(other), expected)
    assert torch.equal(other.members, found.members)
    rest = torch.arange(10) != victim
    torch.testing.assert_close(other.refined.cpu()[rest], found.refined.cpu()[rest], rtol=0, atol=1e-6)
    assert torch.equal(other.refined.cpu()[victim], far[victim].double())


@pytest.mark.parametrize(("form", "refit"), WAYS)
@pytest.mark.parametrize(
    ("count", "q", "p"), [(1, 10, 20), (2, 10, 20), (3, 10, 20), (9, 1, 20), (9, 20, 1), (9, 1, 1)]
)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_few_clients_and_thin_matrices(count, q, p, form, refit, rank):
    P = problem(count, 0, 28, q=q, p=p, r=min(2, p))
    found = solve(tensor(P.weights), rank=rank, form=form, refit=refit)
    assert found.refined.shape == (count, q, p)
    assert torch.isfinite(found.refined).all()
    assert found.rank <= min(q, p)
    assert found.converged
    assert found.votes.shape == (count,)
    assert (found.comparisons == count - 1).all()


def test_one_client_is_its_own_majority():
    W = tensor(problem(1, 0, 29).weights)
    found = solve(W)
    assert found.members.all()
    torch.testing.assert_close(found.refined, W, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_float_dtype_is_solved_in_float64(dtype, device):
    P = problem(10, 3, 30)
    W = tensor(P.weights).to(dtype)
    found, same = solve(W.to(device), refit=True), solve(W.double().to(device), refit=True)
    np.testing.assert_array_equal(flags(found), P.bad)
    assert found.refined.dtype == torch.float64
    assert torch.equal(found.refined, same.refined)


@pytest.mark.parametrize("form", FORMS)
def test_without_noise_sets_and_subspace_are_exact(form):
    # As of adapters whose B differ and whose A is common: differences are of exactly low rank.
    P = problem(10, 3, 31, n=None)
    found = solve(tensor(P.weights), form=form, refit=True, max_iterations=300)
    np.testing.assert_array_equal(flags(found), P.bad)
    assert found.rank == 2
    np.testing.assert_allclose(found.projector, P.common.T @ P.common, atol=1e-9)
    np.testing.assert_allclose(found.refined, P.weights, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [None, 200])
def test_noise_that_is_far_too_small_ends_and_says_that_it_did_not_converge(form, n):
    found = solve(tensor(problem(10, 3, 32, n=n).weights), rank=2, noise=1e-12, form=form)
    assert found.iterations <= 2000
    assert not found.converged
    assert found.warning is not None
    assert torch.isfinite(found.refined).all()


BAD_OPTIONS = [
    ({"rank": 11}, "rank"),
    ({"rank": -1}, "rank"),
    ({"rank": 1.5}, "rank"),
    ({"rank": True}, "rank"),
    ({"noise": 0.0}, "noise"),
    ({"noise": -1.0}, "noise"),
    ({"noise": float("nan")}, "noise"),
    ({"noise": 1e300}, "noise"),
    ({"noise": "low"}, "noise"),
    ({"form": "triples"}, "form"),
    ({"tolerance": 0.0}, "tolerance"),
    ({"tolerance": float("inf")}, "tolerance"),
    ({"max_iterations": 0}, "max_iterations"),
    ({"max_iterations": 2.5}, "max_iterations"),
    ({"pairs": [(0, 1), (1, 2)]}, "each client must be in a pair"),
    ({"pairs": [(0, 1), (2, 3), (4, 4)]}, "two different clients"),
    ({"pairs": [(0, 1), (2, 3), (4, 5)]}, "from 0 to 4"),
    ({"pairs": [(0, 1), (2, 3), (4, -1)]}, "from 0 to 4"),
    ({"pairs": [(0, 1), (2, 3), (4, 0), (1, 0)]}, "occur once"),
    ({"pairs": [(0.0, 1.0)]}, "integers"),
    ({"pairs": [0, 1]}, "shape"),
    ({"pairs": torch.zeros(0, 2, dtype=torch.int64)}, "pair"),
    ({"pair_weights": np.ones(9)}, "pair_weights must have 10"),
    ({"pair_weights": np.zeros(10)}, "pair_weights"),
    ({"pair_weights": np.full(10, np.nan)}, "pair_weights"),
    ({"client_weights": np.ones(4)}, "client_weights must have 5"),
    ({"client_weights": np.zeros(5)}, "client_weights"),
    ({"client_weights": [1, 1, -1, 1, 1]}, "client_weights"),
    ({"weights": torch.zeros(5, 3)}, "shape"),
    ({"weights": torch.zeros(5, 0, 3)}, "without a 0"),
    ({"weights": torch.zeros(0, 2, 3)}, "without a 0"),
    ({"weights": torch.zeros(5, 2, 3, dtype=torch.int64)}, "floating-point"),
    ({"weights": torch.zeros(5, 2, 3, dtype=torch.complex64)}, "floating-point"),
    ({"weights": torch.full((5, 2, 3), 1e200, dtype=torch.float64)}, "scale them down"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_input_is_one_sentence(options, words):
    given = {"weights": tensor(problem(5, 0, 33).weights), **options}
    with pytest.raises(ValueError, match=words) as error:
        solve(given.pop("weights"), **given)
    assert "\n" not in str(error.value)


# ---- several matrices ----------------------------------------------------------------------------------------------


def test_votes_of_several_matrices_are_added_up(device):
    matrices = [problem(9, 2, seed).weights for seed in (34, 35, 36)]
    found = solve_jointly([tensor(W, device) for W in matrices], rank=2)
    alone = [solve(tensor(W, device), rank=2) for W in matrices]
    votes = sum(each.votes for each in alone)
    for each in found:
        assert torch.equal(each.votes, votes)
        assert (each.comparisons == 3 * 8).all()
        assert torch.equal(each.members, 2 * votes >= 24)


@pytest.mark.parametrize("refit", [False, True])
def test_matrices_of_different_shapes_and_dtypes_have_one_set(refit, device):
    sizes = [(10, 20, torch.float64), (16, 12, torch.float32), (20, 30, torch.bfloat16)]
    bad = np.arange(10) >= 7
    matrices = []
    for i, (q, p, dtype) in enumerate(sizes):
        P = problem(10, 3, 37 + i, n=1000, q=q, p=p, shuffled=False)
        matrices.append(tensor(P.weights, device).to(dtype))
    for each, W in zip(solve_jointly(matrices, rank=2, refit=refit), matrices, strict=True):
        np.testing.assert_array_equal(flags(each), bad)
        assert each.refined.shape == W.shape
        assert torch.equal(each.refined[7:], W[7:].double())


@pytest.mark.parametrize("refit", [False, True])
def test_one_contaminated_matrix_of_three_is_outvoted_by_the_others(refit):
    # The last client agrees with all others in two matrices and with none in one: 16 of 24.
    matrices = [problem(9, bad, 40 + bad, n=1000, shuffled=False).weights for bad in (1, 0, 0)]
    found = solve_jointly([tensor(W) for W in matrices], rank=2, refit=refit)
    assert found[0].members.all()
    assert int(found[0].votes[-1]) == 16
    assert flags(solve(tensor(matrices[0]), rank=2, refit=refit))[-1]


def test_two_contaminated_matrices_of_three_decide():
    matrices = [problem(9, bad, 43 + i, n=1000, shuffled=False).weights for i, bad in enumerate((1, 1, 0))]
    for each in solve_jointly([tensor(W) for W in matrices], rank=2, refit=True):
        np.testing.assert_array_equal(flags(each), np.arange(9) == 8)


def test_matrices_must_be_of_the_same_clients():
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        solve_jointly([torch.zeros(2, 3, 4), torch.zeros(3, 3, 4)])
    with pytest.raises(ValueError, match="at least one matrix"):
        solve_jointly([])


# ---- graphs of pairs, and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "degree"), [(3, 2), (4, 3), (5, 4), (10, 3), (11, 4), (60, 12), (101, 100), (100, 99)]
)
def test_random_pairs_are_a_connected_regular_graph(count, degree):
    pairs = random_pairs(count, degree, 5).numpy()
    assert len({tuple(sorted(pair)) for pair in pairs}) == len(pairs) == count * degree // 2
    assert (pairs[:, 0] != pairs[:, 1]).all()
    np.testing.assert_array_equal(np.bincount(pairs.ravel(), minlength=count), degree)
    # Connected: Δ has rank K − 1.
    assert np.linalg.matrix_rank(incidence(pairs, count)) == count - 1


def test_random_pairs_depend_on_the_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = random_pairs(30, 6, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(random_pairs(30, 6, 1), first)
    assert not torch.equal(random_pairs(30, 6, 2), first)


@pytest.mark.parametrize(("count", "degree"), [(2, 1), (5, 3), (5, 5), (5, 1), (5, 2.0), (5.0, 2)])
def test_graphs_that_do_not_exist_are_refused(count, degree):
    with pytest.raises(ValueError, match="must be"):
        random_pairs(count, degree)


@pytest.mark.parametrize("refit", [False, True])
def test_a_graph_of_pairs_finds_the_contaminated_clients(refit, device):
    P = problem(60, 9, 46, n=1000)
    found = solve(tensor(P.weights, device), rank=2, refit=refit, pairs=random_pairs(60, 12, 3))
    assert (found.comparisons == 12).all()
    np.testing.assert_array_equal(flags(found), P.bad)


def test_the_order_within_a_pair_does_not_matter():
    W, pairs = tensor(problem(8, 2, 47).weights), random_pairs(8, 5, 2)
    found, other = solve(W, rank=2, pairs=pairs), solve(W, rank=2, pairs=pairs.flip(1))
    assert torch.equal(other.votes, found.votes)
    torch.testing.assert_close(other.low_rank, -found.low_rank, rtol=0, atol=1e-7)


class Largest(TorchDispatchMode):
    """Remember how many numbers the largest tensor made has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // 8)
        return made


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    W = tensor(problem(40, 8, 48).weights)
    monkeypatch.setattr(lowrank, "_CHUNK", 2**12)
    monkeypatch.setattr(lowrank, "available_memory", lambda device: 100_000)
    with Largest() as largest, pytest.raises(TooLargeError, match="form='clients', or fewer pairs") as error:
        solve(W, rank=2)
    assert isinstance(error.value, MemoryError)
    # 780 pairs of 10 rows and two or more singular values each would be more; singular values are sampled.
    assert largest.numbers < 780 * 10 * 2


def test_the_list_of_all_pairs_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(lowrank, "available_memory", lambda device: 10**9)
    with Largest() as largest, pytest.raises(TooLargeError, match="20000 clients"):
        solve(torch.zeros(20_000, 1, 1), pairs=None)
    assert largest.numbers <= 20_000


def test_the_form_for_clients_is_refused_where_it_does_not_fit_either(monkeypatch):
    W = tensor(problem(10, 2, 49).weights)
    monkeypatch.setattr(lowrank, "available_memory", lambda device: 20_000)
    with pytest.raises(TooLargeError, match="10 clients"):
        solve(W, rank=2, form="clients")


@pytest.mark.parametrize("part", ["low_rank", "sparse"])
def test_blocks_of_all_pairs_are_made_only_where_they_fit(part, monkeypatch):
    found = solve(tensor(problem(20, 4, 50).weights), rank=2)
    with monkeypatch.context() as patch:
        patch.setattr(lowrank, "available_memory", lambda device: 190 * 200 * 8)
        with Largest() as largest, pytest.raises(TooLargeError, match="190 blocks"):
            getattr(found, part)
    assert largest.numbers == 0
    assert getattr(found, part).shape == (190, 10, 20)


def test_pieces_make_no_difference(monkeypatch, device):
    # Passes over pairs in pieces, and a step that is computed twice rather than kept.
    W = tensor(problem(12, 3, 51).weights, device)
    whole = solve(W, rank=2, refit=True)
    monkeypatch.setattr(lowrank, "_CHUNK", 500)
    found = solve(W, rank=2, refit=True)
    assert found.iterations == whole.iterations
    assert torch.equal(found.votes, whole.votes)
    torch.testing.assert_close(found.refined, whole.refined, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.sparse, whole.sparse, rtol=0, atol=1e-8)


def test_singular_values_of_a_sample_of_pairs_are_enough(monkeypatch):
    P = problem(30, 9, 52, n=1000)
    monkeypatch.setattr(clair, "_PAIR_NUMBERS", 1)
    np.testing.assert_array_equal(flags(solve(tensor(P.weights), refit=True)), P.bad)


# ---- the level of noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "p", "share"), [(10, 20, 0.5), (20, 10, 0.5), (8, 8, 0.5), (1, 50, 0.5), (30, 5, 0.25)])
def test_the_unit_quantile_is_that_of_a_simulation(q, p, share):
    rng = np.random.default_rng(53)
    drawn = [np.quantile(np.linalg.svd(rng.normal(size=(q, p)), compute_uv=False), share) for _ in range(1000)]
    assert unit_quantile(q, p, share) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("bad", [0, 4, 9])
def test_the_noise_is_estimated_with_nearly_half_of_the_clients_contaminated(bad, rank, device):
    for seed, s in ((54, 0.01), (55, 1.0)):
        rng = np.random.default_rng(seed)
        W = 10 * s * problem(20, bad, seed, n=None).weights
        found = solve(tensor(W + s * rng.normal(size=W.shape), device), rank=rank)
        assert found.noise == pytest.approx(s, rel=0.1)


def test_the_estimators_agree_on_noise_alone():
    rng = np.random.default_rng(56)
    W = 0.3 * rng.normal(size=(30, 10, 20))
    pairs = all_pairs(30)
    values = np.linalg.svd(W[pairs[:, 0]] - W[pairs[:, 1]], compute_uv=False)
    assert noise_of_pairs(tensor(values), 10, 20, 0) == pytest.approx(0.3, rel=0.1)
    assert noise_of_tails(tensor(values), 10, 20, 0) == pytest.approx(0.3, rel=0.1)
    assert noise_of_stack(tensor(centred(W)), 20) == pytest.approx(0.3, rel=0.05)


def test_the_noise_estimate_leaves_the_global_generator_alone():
    W = tensor(problem(8, 2, 57).weights)
    results = []
    for seed in (0, 1):
        unit_quantile.cache_clear()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(solve(W, refit=True))
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0].noise == results[1].noise
    assert torch.equal(results[0].refined, results[1].refined)


def test_no_pair_has_no_noise():
    assert noise_of_pairs(torch.zeros(0, 3), 3, 4, 0) == 0
    assert noise_of_tails(torch.zeros(0, 3), 3, 4, 0) == 0


# ---- the input is not touched --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_not_written_to_and_may_require_gradients(form):
    W = tensor(problem(8, 2, 58).weights).requires_grad_()
    before = W.detach().clone()
    found = solve(W, form=form, refit=True)
    assert torch.equal(W.detach(), before)
    assert not found.refined.requires_grad
    found.refined.zero_()
    assert torch.equal(W.detach(), before)


@pytest.mark.parametrize("form", FORMS)
def test_transposed_and_strided_views_are_read_as_they_are(form):
    W = tensor(problem(8, 2, 59).weights)
    view = W.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not view.is_contiguous()
    found, other = solve(W, form=form), solve(view, form=form)
    torch.testing.assert_close(other.refined, found.refined, rtol=0, atol=1e-12)


def test_a_solve_repeats_itself(device):
    W = tensor(problem(12, 3, 60).weights, device)
    first, second = solve(W, refit=True), solve(W, refit=True)
    assert torch.equal(first.refined, second.refined)
    assert first.certificate == second.certificate


# ---- adapters: what clients differ in beside the shared subspace is of low rank itself -------------------------------


def adapters(seed, kind, clients=10, size=40, rank=4, drift=0.25):
    """Updates B_k (A + E_k) of the last of which is `kind`; the others share A but for what training made of it."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(size, rank)))[0].T
    found = []
    for k in range(clients):
        own = shared + drift * rng.normal(size=(rank, size)) / np.sqrt(size)
        update = rng.normal(size=(size, rank)) @ own
        if k == clients - 1 and kind == "elsewhere":
            update = update[:, rng.permutation(size)] * rng.choice([-1, 1], size)
        if k == clients - 1 and kind == "long":
            u, v = rng.normal(size=size), rng.normal(size=size)
            update = update + 4 * np.linalg.norm(update) * np.outer(u, v) / np.linalg.norm(u) / np.linalg.norm(v)
        found.append(update)
    return np.stack(found)


@pytest.mark.parametrize("kind", ["elsewhere", "long"])
@pytest.mark.parametrize("seed", range(5))
def test_a_contaminated_adapter_is_found_though_no_update_is_of_full_rank(kind, seed):
    matrices = [tensor(adapters(10 * seed + i, kind)) for i in range(3)]
    found = solve_jointly(matrices, rank=4, refit=True)
    assert found[0].members.tolist() == [True] * 9 + [False]
    assert found[0].margins[-1] < 0


@pytest.mark.parametrize("seed", range(10))
def test_without_a_contaminated_adapter_nobody_is_voted_out(seed):
    matrices = [tensor(adapters(10 * seed + i, "honest")) for i in range(3)]
    assert solve_jointly(matrices, rank=4, refit=True)[0].members.all()


def test_after_lora_what_is_outside_counts_as_noise_and_averaging_it_is_a_gain():
    found = solve(tensor(adapters(0, "honest")), rank=4, refit=True)
    W, P = adapters(0, "honest"), found.projector.numpy()
    outside = np.square((W - W.mean(axis=0)) @ (np.eye(40) - P)).sum() / (9 * 40 * 36 - 4 * 36)
    assert found.gain == pytest.approx((1 - 1 / 10) * 40 * 36 * outside)
    assert found.cost < found.gain / 5
    assert found.warning is None


def test_a_solve_without_a_majority_says_so():
    W = np.random.default_rng(0).normal(size=(6, 1, 1, 1)) * np.random.default_rng(1).normal(size=(6, 10, 10, 3))
    W = np.einsum("kqir,kjr->kqj", W.reshape(6, 10, 10, 3)[:, :, :1], np.random.default_rng(2).normal(size=(6, 20, 3)))
    found = solve(tensor(W), rank=1, noise=1e-3, refit=True, max_iterations=50)
    assert not found.members.any()
    assert "no majority" in found.warning


def test_a_long_client_alone_is_barred_and_agrees_with_nobody():
    """It is well inside the subspace fitted with it, and far outside the one fitted without it."""
    W = adapters(0, "long")
    found = solve(tensor(W), rank=4, refit=True)
    assert found.votes[-1] == 0
    others = W[:9] - W[:9].mean(axis=0)
    basis = np.linalg.svd(others.reshape(-1, 40))[2][:4]
    np.testing.assert_allclose(found.projector.numpy(), basis.T @ basis, atol=1e-8)


def test_adapters_without_a_rank_say_that_they_need_one():
    found = solve(tensor(adapters(0, "honest")), refit=True, max_iterations=50)
    assert "no majority" in found.warning
    assert "give rank=" in found.warning


@pytest.mark.parametrize("size", [1e10, 1e17, 1e100])
@pytest.mark.parametrize(("form", "refit"), WAYS)
def test_a_client_without_noise_and_beyond_all_digits_hides_nobodys_noise(size, form, refit):
    """Its differences are of rank 1 to the last digit, which must not be taken for what noise there is."""
    W = problem(8, 0, 31).weights
    W[0] = size
    found = solve(tensor(W), rank=2, form=form, refit=refit)
    np.testing.assert_array_equal(flags(found), np.arange(8) == 0)
    assert found.noise == pytest.approx(1 / np.sqrt(179), rel=0.15)


def test_nobody_is_alone_within_the_noise_given():
    assert solve(tensor(problem(8, 1, 32).weights), rank=2, noise=10.0, refit=True).members.all()


def test_shares_of_none_of_the_members_give_the_equal_mean():
    W = problem(8, 1, 33)
    shares = torch.tensor(W.bad, dtype=torch.float64)
    found = solve(tensor(W.weights), rank=2, refit=True, client_weights=shares)
    np.testing.assert_allclose(found.mean.numpy(), W.weights[~W.bad].mean(axis=0), atol=1e-12)
