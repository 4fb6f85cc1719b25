"""Linear regression: the clients' true matrices, exact and stochastic fits, scores, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from torch import nn

from client_apps.app import TaskClient
from client_apps.arrays import get_arrays, set_arrays
from client_apps.data.linear import generate, least_squares, members
from client_apps.errors import ConfigError
from client_apps.tasks import build
from client_apps.tasks.regression import RegressionTask


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a client app sets for its clients; those made by hand, as here, have whatever there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(solver: str = "ols", **changes: Any) -> dict[str, Any]:
    """Return a run on linear models, with `section__key=value` changes."""
    cfg: dict[str, Any] = {
        "seed": 0,
        "num_clients": 10,
        "task": {"name": "regression", "solver": solver},
        "dataset": {"name": "linear"},
        "model": {"name": "linear"},
        "client": {"lr": 1.0, "batch_size": 20, "device": "cpu"},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = cfg
        for section in sections:
            target = target[section]
        target[key] = value
    return cfg


def task(solver: str = "ols", **changes: Any) -> RegressionTask:
    found = build(config(solver, **changes))
    assert isinstance(found, RegressionTask)
    return found


def weight_of(model: nn.Module) -> np.ndarray:
    (array,) = get_arrays(model)
    return array.astype(np.float64)


def fit(of: RegressionTask, cid: int, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
    ins = FitIns(ndarrays_to_parameters(get_arrays(of.new_model())), {"server_round": 1} | settings)
    found = TaskClient(of, cid).fit(ins)
    (array,) = parameters_to_ndarrays(found.parameters)
    assert array.dtype == np.float32
    return array.astype(np.float64), found.metrics


# ---- the clients' matrices -----------------------------------------------------------------------------------------


def test_benign_clients_share_a_row_space_and_contaminated_ones_have_their_own() -> None:
    found = generate(3, 8, 2)
    assert found.weights.shape == (8, 10, 20)
    assert list(found.benign) == [True] * 6 + [False] * 2
    np.testing.assert_allclose(found.basis @ found.basis.T, np.eye(2), atol=1e-12)
    off = np.eye(20) - found.basis.T @ found.basis
    differences = found.weights - found.weights[0]  # W_0 is the same for all
    assert np.abs(differences[:6] @ off).max() < 1e-12
    assert (np.linalg.norm(differences[6:] @ off, axis=(1, 2)) > 0.5).all()
    # A contaminated one's own part has rank r as well: less that of client 0, rank 2 r.
    assert np.linalg.matrix_rank(differences[6]) == 4
    assert np.linalg.matrix_rank(differences[1]) == 2


def test_the_clients_own_parts_are_as_large_as_asked() -> None:
    """E‖B_k A‖² = q r sd² with orthonormal rows."""
    center = generate(1, 200, 100, signal=1e-9, contamination=1e-9).weights[0]
    found = np.sum((generate(1, 200, 100, signal=0.3, contamination=0.7).weights - center) ** 2, axis=(1, 2))
    # chi-squared with q r = 20 degrees of freedom: the mean of 100 has a relative standard error of √(2/20)/10
    assert found[:100].mean() == pytest.approx(20 * 0.09, rel=4 * 0.032)
    assert found[100:].mean() == pytest.approx(20 * 0.49, rel=4 * 0.032)


def test_heterogeneity_is_outside_the_row_space_and_as_large_as_asked() -> None:
    plain, mixed = generate(3, 40, 4), generate(3, 40, 4, heterogeneity=0.1)
    added = mixed.weights - plain.weights
    assert not added[36:].any()  # contaminated clients are as they were
    assert np.abs(added @ plain.basis.T).max() < 1e-12
    # E‖H_k‖² = q (p − r) sd²; 36 clients with 180 entries each: within 4 standard errors of 1.6 %
    assert np.mean(np.sum(added[:36] ** 2, axis=(1, 2))) == pytest.approx(10 * 18 * 0.01, rel=0.07)


def test_who_is_contaminated_changes_nobody_else() -> None:
    few, many = generate(5, 10, 1), generate(5, 10, [4, 9])
    others = [k for k in range(10) if k not in (4, 9)]
    np.testing.assert_array_equal(few.weights[others], many.weights[others])
    np.testing.assert_array_equal(few.weights[9], many.weights[9])
    for one, other in zip(few.samples(2), many.samples(2), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(few.weights[4], many.weights[4])
    assert not np.array_equal(few.weights, generate(6, 10, 1).weights)


def test_samples_are_of_the_clients_own_model_and_splits_independent() -> None:
    found = generate(0, 3, n=20_000, noise=0.5)
    x, y = found.samples(1)
    assert (x.shape, y.shape) == ((20_000, 20), (20_000, 10))
    residual = y - x @ found.weights[1].T
    assert residual.std() == pytest.approx(0.5, rel=0.01)
    np.testing.assert_allclose(np.cov(x.T), np.eye(20), atol=0.05)
    np.testing.assert_allclose(x.T @ residual / len(x), 0, atol=0.02)
    for other in (found.samples(1, "test")[0], found.samples(2)[0]):
        assert abs(np.mean(x * other)) < 4 / np.sqrt(x.size)
    np.testing.assert_array_equal(found.samples(1, "test", 7)[0].shape, (7, 20))


def test_without_noise_least_squares_finds_the_matrix() -> None:
    found = generate(0, 3, 1, noise=0.0, n=20)
    for k in range(3):
        np.testing.assert_allclose(found.ols(k), found.weights[k], atol=1e-10)


def test_the_reference_simulation() -> None:
    """n=200, p=20, q=10, r=2, K=10, 1 bad: local 1.14, FedAvg over benign 1.72 (METHODS, CLAIR)."""
    local, mean = [], []
    for seed in range(60):
        found = generate(seed, 10, 1)
        fits = np.stack([found.ols(k) for k in range(9)])
        local.append(np.sum((fits - found.weights[:9]) ** 2, axis=(1, 2)).mean())
        mean.append(np.sum((fits.mean(axis=0) - found.weights[:9]) ** 2, axis=(1, 2)).mean())
    # E(XᵀX)⁻¹ = I/(n − p − 1) for Gaussian X (inverse Wishart), hence p q σ²/(n − p − 1)
    assert np.mean(local) == pytest.approx(20 * 10 / 179, rel=0.02)
    assert np.mean(mean) == pytest.approx(1.72, abs=4 * np.std(mean) / np.sqrt(60))


@pytest.mark.parametrize(
    ("contaminated", "expected"),
    [(0, []), (2, [18, 19]), (0.45, range(11, 20)), (0.0, []), ([0, 7], [0, 7]), ([], []), (0.1, [18, 19])],
)
def test_contaminated_is_a_count_a_share_or_a_list(contaminated: Any, expected: Any) -> None:
    assert members(contaminated, 20) == frozenset(expected)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cid", [0, 9])
def test_a_client_sends_its_least_squares_fit_whatever_it_received(cid: int) -> None:
    of = task(dataset__contaminated=1)
    x, y = of.problem.samples(cid)
    normal = np.linalg.solve(x.T @ x, x.T @ y).T  # the normal equations
    found, metrics = fit(of, cid)
    np.testing.assert_allclose(found, normal, rtol=0, atol=1e-6)
    assert metrics["train_loss"] == pytest.approx(np.mean((y - x @ normal.T) ** 2))
    assert (metrics["local_steps"], metrics["step_weight"]) == (1, 1)
    elsewhere = of.new_model()
    set_arrays(elsewhere, [np.full((10, 20), 9.0)])
    of.train(elsewhere, cid, 5)
    np.testing.assert_array_equal(weight_of(elsewhere), found)


def test_sgd_with_the_whole_batch_is_gradient_descent() -> None:
    of = task("sgd", client__batch_size=200, client__local_epochs=3, client__lr=0.5)
    x, y = of.problem.samples(2)
    weight = weight_of(of.new_model())
    losses = []
    for _ in range(3):
        residual = x @ weight.T - y
        losses.append(np.mean(residual**2))
        weight = weight - 0.5 * 2 * residual.T @ x / residual.size  # of the mean over samples and responses
    found, metrics = fit(of, 2)
    np.testing.assert_allclose(found, weight, rtol=0, atol=1e-5)
    assert metrics["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["local_steps"] == 3


def test_sgd_comes_close_to_least_squares_and_stays_where_fedprox_pulls_it() -> None:
    changes: dict[str, Any] = {"client__local_epochs": 60, "client__batch_size": 50, "client__lr": 0.5}
    found, _ = fit(task("sgd", **changes), 2)
    best, start = task().problem.ols(2), weight_of(task().new_model())
    assert np.linalg.norm(found - best) < 0.15 * np.linalg.norm(start - best)
    near, _ = fit(task("sgd", **changes), 2, proximal_mu=1.5)
    assert np.linalg.norm(near - start) < 0.3 * np.linalg.norm(found - start)


def test_a_ditto_model_is_pulled_to_the_global_one() -> None:
    # lr (λ + curvature) < 2: the pull of λ = 1.5 to w leaves a small part of the way to the client's own optimum
    of = task("sgd", client__ditto_lambda=1.5, client__lr=0.5, client__ditto_epochs=20)
    model, center = of.new_model(), torch.zeros(10, 20)
    of.train_personal(model, [center], 0, 1)
    best = of.problem.ols(0)
    assert 0 < np.linalg.norm(weight_of(model)) < 0.3 * np.linalg.norm(best)


def test_training_does_not_depend_on_who_else_trains() -> None:
    of = task("sgd")
    alone = fit(of, 3)[0]
    fit(of, 4)
    np.testing.assert_array_equal(fit(of, 3)[0], alone)
    assert not np.array_equal(fit(of, 3, server_round=2)[0], alone)


def test_shuffled_responses_are_the_attackers_training_samples_alone() -> None:
    of = task(client__attack="shuffled_labels", client__attackers=1, dataset__contaminated=[0])
    assert of.attackers == {0, 9}
    np.testing.assert_array_equal(fit(of, 0)[0], fit(task(dataset__contaminated=[0]), 0)[0])  # not by this attack
    found = fit(of, 9)[0]
    # Responses of others say nothing of a sample: all that is left of W is noise.
    assert np.linalg.norm(found) < 0.6 * np.linalg.norm(of.problem.weights[9])
    np.testing.assert_array_equal(found, fit(of, 9, server_round=2)[0])
    model = of.new_model()
    honest = task(dataset__contaminated=[0])
    assert of.evaluate(model, [9]).loss_sum == honest.evaluate(model, [9]).loss_sum
    assert of.evaluate(model, [9], "train").loss_sum != honest.evaluate(model, [9], "train").loss_sum


def test_stale_answers_and_attacks_work_here_as_elsewhere() -> None:
    of = task(client__stale_update=1.0, client__attack="sign_flip", client__attackers=1)
    client, start = TaskClient(of, 9), get_arrays(of.new_model())
    first = client.fit(FitIns(ndarrays_to_parameters(start), {"server_round": 1}))
    expected = 2 * start[0].astype(np.float64) - of.problem.ols(9)
    np.testing.assert_allclose(parameters_to_ndarrays(first.parameters)[0], expected, rtol=0, atol=1e-5)
    second = client.fit(FitIns(ndarrays_to_parameters([start[0] + 1]), {"server_round": 2}))
    np.testing.assert_array_equal(parameters_to_ndarrays(second.parameters)[0], start[0])


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_r2_is_scikit_learns_and_the_truth_is_known() -> None:
    from sklearn.metrics import r2_score

    of = task(dataset__contaminated=1)
    model = of.new_model()
    set_arrays(model, [of.problem.weights[0]])
    weight = weight_of(model)
    found = of.evaluate(model, range(10))
    scores, details = of.scores(found), of.details(found)
    for k in range(10):
        x, y = of.problem.samples(k, "test", 200)
        # variance-weighted: the responses' errors and variances are summed before they are divided
        assert scores[k] == pytest.approx(max(0.0, r2_score(y, x @ weight.T, multioutput="variance_weighted")))
        assert found.loss_sum[k] / 200 == pytest.approx(np.mean((y - x @ weight.T) ** 2))
    truth = np.sum((weight - of.problem.weights) ** 2, axis=(1, 2))
    np.testing.assert_allclose(details["estimation_error"], truth)
    assert details["estimation_error"][0] < 1e-10
    assert of.summary(found)["estimation_error"] == pytest.approx(truth.mean())


def test_each_client_is_judged_by_its_own_truth_whichever_are_asked() -> None:
    made = task()
    model = made.new_model()
    found = made.evaluate(model, [7, 2])
    expected = [np.square(weight_of(model) - made.problem.weights[cid]).sum() for cid in (7, 2)]
    np.testing.assert_allclose(found.sums["estimation_error"], expected)


def test_a_model_worse_than_the_mean_has_an_r2_of_0() -> None:
    of = task()
    model = of.new_model()
    set_arrays(model, [np.full((10, 20), 1e3)])
    np.testing.assert_array_equal(of.scores(of.evaluate(model, [0, 1])), 0)


def test_a_client_reports_what_the_server_counts() -> None:
    of = task()
    model = of.new_model()
    ins = EvaluateIns(ndarrays_to_parameters(get_arrays(model)), {})
    metrics, found = TaskClient(of, 4).evaluate(ins).metrics, of.evaluate(model, [4])
    assert {key: metrics[key] for key in of.sums} == {key: float(found.sums[key][0]) for key in of.sums}
    assert metrics["r2"] == of.scores(found)[0]


def test_initial_loss_is_the_received_models_mean_squared_error() -> None:
    of = task()
    x, y = of.problem.samples(1)
    expected = np.mean((y - x @ weight_of(of.new_model()).T) ** 2)
    assert fit(of, 1, initial_loss=True)[1]["initial_loss"] == pytest.approx(expected)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__contaminated": 11}, "contaminated=11 does not fit num_clients=10"),
        ({"dataset__contaminated": [10]}, "does not fit num_clients=10"),
        ({"dataset__contaminated": [-1]}, "dataset.contaminated: each"),
        ({"dataset__contaminated": -1}, "dataset.contaminated"),
        ({"dataset__contaminated": 1.5}, "dataset.contaminated"),
        ({"dataset__contaminated": "all"}, "dataset.contaminated"),
        ({"dataset__contaminated": True}, "dataset.contaminated"),
        ({"dataset__contaminated": None}, "dataset.contaminated"),
        ({"dataset__contaminated": 10}, "leaves none of num_clients=10 benign"),
        ({"dataset__rank": 11}, "dataset.rank=11 exceeds"),
        ({"dataset__rank": 0}, "dataset.rank"),
        ({"dataset__n": 19}, "dataset.n=19 samples do not determine"),
        ({"dataset__test_samples": 1}, "dataset.test_samples"),
        ({"dataset__noise": -1}, "dataset.noise"),
        ({"dataset__signal": 0}, "dataset.signal"),
        ({"dataset__signal": 1e200}, "dataset.signal"),
        ({"dataset__contamination": -1.0}, "dataset.contamination"),
        ({"dataset__heterogeneity": "much"}, "dataset.heterogeneity"),
        ({"dataset__p": 2.5}, "dataset.p"),
        ({"dataset__speed": 9}, "speed is not a known key"),
        ({"task__solver": "magic"}, "task.solver must be one of ols, sgd"),
        ({"task__speed": 9}, "task.speed is not a known key"),
        ({"model": {"name": "mlp", "hidden": [3]}}, "use model=linear"),
        ({"model": {"name": "linear", "bias": True}}, "model.bias is not a known key"),
        ({"client__vectorize": True}, "vectorize=true is not for dataset=linear"),
        ({"client__ditto_lambda": 1.0}, "ditto_lambda needs task.solver=sgd"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        build(config(**changes))
    assert "\n" not in str(error.value)


def test_a_proximal_term_needs_steps() -> None:
    with pytest.raises(ConfigError, match=r"needs task\.solver=sgd"):
        fit(task(), 0, proximal_mu=0.1)


def test_there_is_no_eleventh_client() -> None:
    of = task()
    for call in (lambda: of.train(of.new_model(), 10, 1), lambda: of.evaluate(of.new_model(), [10])):
        with pytest.raises(ConfigError, match="There is no client 10"):
            call()


def test_few_samples_are_for_sgd_and_of_several_fits_least_squares_is_the_shortest() -> None:
    of = task("sgd", dataset__n=10)
    assert of.train_size(0) == 10
    x, y = of.problem.samples(0)
    shortest = (np.linalg.pinv(x) @ y).T
    np.testing.assert_allclose(least_squares(x, y), shortest, atol=1e-10)
