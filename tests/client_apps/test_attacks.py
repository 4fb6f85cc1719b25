"""Contaminated clients: what each attack sends, that nothing else notices, and what shuffled labels touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays

from client_apps import attacks
from client_apps.app import TaskClient, make_client_app
from client_apps.arrays import get_arrays
from client_apps.config import ClientConfig
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask, build

from .configs import config

WAYS = pytest.mark.parametrize("vectorize", ["auto", False], ids=["stack", "alone"])
LAST = 9  # of ten clients, the contaminated one
DRAWN: dict[str, int] = {"seed": 3, "cid": 4, "server_round": 5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a client app sets for its clients; those made by hand, as here, have whatever there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def options(attack: str, strength: float = 1.0) -> ClientConfig:
    return ClientConfig(lr=0.1, batch_size=10, attack=attack, attackers=1, attack_strength=strength)


def models(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A model before and after training: matrix, vector, kernel, scalar, half precision, counter."""
    rng = np.random.default_rng(seed)
    shapes = [(6, 9), (7,), (4, 3, 3, 3), (), (5, 8)]
    dtypes = [np.float32, np.float64, np.float32, np.float32, np.float16]

    def one() -> list[np.ndarray]:
        return [np.asarray(rng.normal(size=s)).astype(t) for s, t in zip(shapes, dtypes, strict=True)]

    return [*one(), np.array(3)], [*one(), np.array(17)]


def sent(attack: str, strength: float = 1.0, **drawn: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The updates sent and the honest ones, in float64, without the counter."""
    received, trained = models()
    found = attacks.contaminate(options(attack, strength), received, trained, **{**DRAWN, **drawn})
    assert [a.dtype for a in found] == [a.dtype for a in trained]
    assert [a.shape for a in found] == [a.shape for a in trained]
    assert found[-1] == trained[-1] == 17
    start = [a.astype(np.float64) for a in received[:-1]]
    updates = [a.astype(np.float64) - s for a, s in zip(found[:-1], start, strict=True)]
    honest = [a.astype(np.float64) - s for a, s in zip(trained[:-1], start, strict=True)]
    return updates, honest


def precision(array: np.ndarray, position: int) -> float:
    return {4: 2e-2, 1: 1e-12}.get(position, 1e-5) * max(1.0, float(np.abs(array).max()))


# ---- what is sent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_a_flipped_update_is_the_honest_one_times_minus_the_strength(strength: float) -> None:
    for position, (found, honest) in enumerate(zip(*sent("sign_flip", strength), strict=True)):
        np.testing.assert_allclose(found, -strength * honest, rtol=0, atol=3 * precision(honest, position))


@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_noise_has_the_length_of_the_update_and_nothing_of_its_direction(strength: float) -> None:
    for found, honest in zip(*sent("scaled_noise", strength), strict=True):
        assert np.linalg.norm(found) == pytest.approx(strength * np.linalg.norm(honest), rel=1e-2)
    # The cosine of two independent directions in d dimensions has mean 0 and deviation 1/√d.
    matrix = [sent("scaled_noise", server_round=number) for number in range(1, 201)]
    cosines = [np.vdot(a[0], b[0]) / np.linalg.norm(a[0]) / np.linalg.norm(b[0]) for a, b in matrix]
    assert abs(np.mean(cosines)) < 4 / np.sqrt(54 * 200)
    assert np.std(cosines) == pytest.approx(1 / np.sqrt(54), rel=0.2)


@pytest.mark.parametrize("strength", [1.0, 3.0])
def test_another_subspace_keeps_the_singular_values_and_turns_the_row_space(strength: float) -> None:
    rng = np.random.default_rng(0)
    received = [np.zeros((12, 30)), np.zeros(4)]
    update = rng.normal(size=(12, 2)) @ rng.normal(size=(2, 30))
    trained = [update, np.arange(4.0)]
    found = attacks.contaminate(options("other_subspace", strength), received, trained, **DRAWN)
    np.testing.assert_allclose(
        np.linalg.svd(found[0], compute_uv=False)[:2], strength * np.linalg.svd(update, compute_uv=False)[:2]
    )
    # The row spaces' principal angles (Björck and Golub 1973): all cosines would be 1 for the same space.
    rows = [np.linalg.svd(matrix)[2][:2] for matrix in (update, found[0])]
    assert np.linalg.svd(rows[0] @ rows[1].T, compute_uv=False).max() < 0.8
    np.testing.assert_allclose(found[1], strength * trained[1])  # no matrix
    # Orthogonal: the same map keeps the inner product of any two updates.
    again = attacks.contaminate(options("other_subspace"), received, [2 * update + 1, trained[1]], **DRAWN)[0]
    np.testing.assert_allclose(np.sum(again * found[0]), strength * np.sum((2 * update + 1) * update))


def test_the_subspace_is_a_clients_own_and_always_the_same() -> None:
    found = sent("other_subspace")[0]
    for one, other in zip(found, sent("other_subspace", server_round=6)[0], strict=True):
        np.testing.assert_array_equal(one, other)
    for another in ({"cid": 5}, {"seed": 4}):
        assert not np.array_equal(found[0], sent("other_subspace", **another)[0][0])


def test_noise_is_another_in_each_round_and_of_each_client() -> None:
    found = sent("scaled_noise")[0]
    np.testing.assert_array_equal(found[0], sent("scaled_noise")[0][0])
    for another in ({"server_round": 6}, {"cid": 5}, {"seed": 4}):
        assert not np.array_equal(found[0], sent("scaled_noise", **another)[0][0])


@pytest.mark.parametrize("attack", ["scaled_noise", "sign_flip", "other_subspace"])
def test_what_overflows_or_has_diverged_is_sent_as_such(attack: str) -> None:
    received = [np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros((0, 2))]
    trained = [np.full((2, 3), 1e38, np.float32), np.full(3, np.nan, np.float32), *received[2:]]
    found = attacks.contaminate(options(attack, 1e300), received, trained, **DRAWN)
    assert np.isinf(found[0]).all()
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[2], received[2])  # no update, nothing of its length
    assert [a.dtype for a in found] == [a.dtype for a in received]


# ---- clients -----------------------------------------------------------------------------------------------------


def task(attack: str | None, strength: float = 2.0, **changes: Any) -> ClassificationTask:
    attackers = {"client__attack": attack, "client__attackers": 1, "client__attack_strength": strength}
    return ClassificationTask(config(**attackers, **changes))


def fit_ins(dtype: type = np.float32, **settings: Any) -> FitIns:
    start = [a.astype(dtype) for a in get_arrays(ClassificationTask(config()).new_model())]
    return FitIns(ndarrays_to_parameters(start), {"server_round": 2} | settings)


@WAYS
@pytest.mark.parametrize("attack", ["scaled_noise", "sign_flip", "other_subspace"])
def test_only_contaminated_clients_answer_otherwise_and_only_with_their_arrays(attack: str, vectorize: Any) -> None:
    honest, bad = task(None, client__vectorize=vectorize), task(attack, client__vectorize=vectorize)
    for cid in (0, LAST):
        expected, found = TaskClient(honest, cid).fit(fit_ins()), TaskClient(bad, cid).fit(fit_ins())
        assert "attacked" not in expected.metrics
        assert found.metrics.pop("attacked") == int(cid == LAST)
        assert found.metrics == expected.metrics  # train_loss among them
        assert found.num_examples == expected.num_examples
        assert (found.parameters == expected.parameters) == (cid != LAST)
    start, trained, answer = (
        parameters_to_ndarrays(p) for p in (fit_ins().parameters, expected.parameters, found.parameters)
    )
    by_hand = attacks.contaminate(bad.client, start, trained, seed=0, cid=LAST, server_round=2)
    for one, other in zip(answer, by_hand, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("attack", ["scaled_noise", "sign_flip", "other_subspace", "shuffled_labels"])
def test_together_they_answer_as_alone(attack: str) -> None:
    class Node:
        def __init__(self, cid: int) -> None:
            self.node_config, self.state = {"partition-id": cid}, None

    cfg = config(client__attack=attack, client__attackers=[2, LAST])
    together = make_client_app(cfg).fit_many(fit_ins(), [Node(cid) for cid in range(10)])  # type: ignore[misc]
    assert together == [TaskClient(build(cfg), cid).fit(fit_ins()) for cid in range(10)]
    assert [res.metrics["attacked"] for res in together] == [int(cid in (2, LAST)) for cid in range(10)]


def test_a_model_received_in_another_precision_is_what_training_began_with() -> None:
    trained = parameters_to_ndarrays(TaskClient(task(None), LAST).fit(fit_ins(np.float64)).parameters)
    found = parameters_to_ndarrays(TaskClient(task("sign_flip", 1.0), LAST).fit(fit_ins(np.float64)).parameters)
    for start, honest, flipped in zip(parameters_to_ndarrays(fit_ins().parameters), trained, found, strict=True):
        assert flipped.dtype == np.float32
        np.testing.assert_allclose(flipped, 2 * start.astype(np.float64) - honest, rtol=0, atol=1e-6)


def test_a_stale_answer_of_a_contaminated_client_is_stale() -> None:
    client = TaskClient(task("sign_flip", client__stale_update=1.0), LAST)
    first = fit_ins()
    client.fit(first)
    answer = client.fit(
        FitIns(ndarrays_to_parameters([a + 1 for a in parameters_to_ndarrays(first.parameters)]), {"server_round": 3})
    )
    assert answer.parameters == first.parameters
    assert (answer.metrics["stale"], answer.metrics["attacked"]) == (1, 1)


@pytest.mark.parametrize("attack", ["sign_flip", "shuffled_labels"])
def test_an_attack_without_attackers_changes_nothing(attack: str) -> None:
    expected = TaskClient(task(None), LAST).fit(fit_ins())
    found = TaskClient(ClassificationTask(config(client__attack=attack)), LAST).fit(fit_ins())
    assert found.metrics.pop("attacked") == 0
    assert found == FitRes(expected.status, expected.parameters, expected.num_examples, expected.metrics)


def test_attackers_without_an_attack_are_honest() -> None:
    found = ClassificationTask(config(client__attackers=3))
    assert not found.attackers
    assert TaskClient(found, LAST).fit(fit_ins()) == TaskClient(task(None), LAST).fit(fit_ins())


# ---- shuffled labels ---------------------------------------------------------------------------------------------


def labels_of(of: ClassificationTask, cid: int) -> np.ndarray:
    return of._work(cid, 1).labels.numpy()


def test_labels_are_permuted_in_the_training_split_alone_and_once_and_for_all() -> None:
    honest, bad = task(None), task("shuffled_labels")
    for cid in range(10):
        one, other = labels_of(honest, cid), labels_of(bad, cid)
        np.testing.assert_array_equal(np.sort(one), np.sort(other))  # the same labels
        assert np.array_equal(one, other) == (cid != LAST)
        assert torch.equal(honest._work(cid, 1).images, bad._work(cid, 1).images)
    agree = labels_of(honest, LAST) == labels_of(bad, LAST)
    assert agree.mean() < 0.3  # by chance one of ten
    np.testing.assert_array_equal(labels_of(bad, LAST), bad._work(LAST, 7).labels.numpy())
    # A task made later does not see the shuffled ones: the samples are shared.
    np.testing.assert_array_equal(labels_of(task(None), LAST), labels_of(honest, LAST))


@WAYS
def test_shuffled_labels_are_trained_on_and_tests_are_honest(vectorize: Any) -> None:
    honest, bad = task(None, client__vectorize=vectorize), task("shuffled_labels", client__vectorize=vectorize)
    asked = fit_ins(initial_loss=True)
    for cid in (0, LAST):
        expected, found = TaskClient(honest, cid).fit(asked), TaskClient(bad, cid).fit(asked)
        assert (found.parameters == expected.parameters) == (cid != LAST)
        assert (found.metrics["initial_loss"] == expected.metrics["initial_loss"]) == (cid != LAST)
    model = honest.new_model()
    for split, same in (("test", True), ("train", False)):
        one, other = (of.evaluate(model, [LAST], split) for of in (honest, bad))  # type: ignore[arg-type]
        assert (one.loss_sum[0] == other.loss_sum[0]) is np.bool_(same)


def test_personal_models_of_contaminated_clients_learn_shuffled_labels_too() -> None:
    changes: dict[str, Any] = {"client__ditto_lambda": 0.01, "client__ditto_epochs": 60, "client__lr": 0.3}
    accuracy = []
    for attack in (None, "shuffled_labels"):
        of = task(attack, **changes)
        client = TaskClient(of, LAST)
        client.fit(fit_ins())
        found = client.evaluate(fit_ins())  # type: ignore[arg-type]
        accuracy.append(found.metrics["personal_accuracy"])
    assert accuracy[0] > 0.7
    assert accuracy[1] < 0.5


# ---- refused -----------------------------------------------------------------------------------------------------


def test_segmentation_has_no_labels_to_shuffle() -> None:
    pytest.importorskip("monai")
    cfg = config(client__attack="shuffled_labels", client__attackers=1, model={"name": "unet3d"})
    cfg["dataset"] = {"name": "fets2022", "partition": {"kind": "natural"}}
    with pytest.raises(ConfigError, match="shuffled_labels is not for dataset=fets2022"):
        build(cfg)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client__attack": "warp"}, "client.attack must be one of"),
        ({"client__attack": "sign_flip", "client__attackers": 11}, "does not fit num_clients=10"),
        ({"client__attack": "sign_flip", "client__attackers": [10]}, "does not fit num_clients=10"),
        ({"client__attack": "sign_flip", "client__attackers": [-1]}, "client.attackers: each"),
        ({"client__attack": "sign_flip", "client__attackers": "all"}, "client.attackers"),
        ({"client__attack": "sign_flip", "client__attack_strength": 0}, "client.attack_strength"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClassificationTask(config(**changes))
