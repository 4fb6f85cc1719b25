"""What a fit config may ask of a client: FedProx's pull, and the loss before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.common import Context, FitIns, FitRes, RecordDict, ndarrays_to_parameters, parameters_to_ndarrays
from torch import nn

from client_apps import make_client_app
from client_apps.app import TaskClient, _client
from client_apps.arrays import get_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask

from .configs import config

# Stacked chains, torch.func, and one by one; for the last with images that training augments.
VECTORIZED = {"client__momentum": 0.5}
ALONE = {"client__vectorize": False, "dataset__augment": "crop_flip"}


def context(cid: int) -> Context:
    return Context(run_id=1, node_id=1, node_config={"partition-id": cid}, state=RecordDict(), run_config={})


def fit_ins(**settings: Any) -> FitIns:
    start = get_arrays(ClassificationTask(config()).new_model())
    return FitIns(ndarrays_to_parameters(start), {"server_round": 2} | settings)


def fit(cid: int, changes: dict[str, Any], **settings: Any) -> FitRes:
    return _client(config(**changes), context(cid)).fit(fit_ins(**settings))


@pytest.mark.parametrize(
    "value",
    [-1.0, float("nan"), float("inf"), "1", True, b"1"],
    ids=["negative", "nan", "inf", "text", "bool", "bytes"],
)
@pytest.mark.parametrize("changes", [VECTORIZED, ALONE], ids=["stack", "alone"])
def test_a_pull_is_a_number_of_at_least_zero(changes: dict[str, Any], value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^The fit config's proximal_mu must be a number of at least 0 and .*\.$"):
        fit(3, changes, proximal_mu=value)


@pytest.mark.parametrize("value", [1, 0.0, "yes"], ids=repr)
def test_whether_to_report_the_initial_loss_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^The fit config's initial_loss must be true or false, not [^ ]*\.$"):
        fit(3, {}, initial_loss=value)


@pytest.mark.parametrize("changes", [VECTORIZED, ALONE], ids=["stack", "alone"])
def test_a_pull_reaches_the_training(changes: dict[str, Any]) -> None:
    start = parameters_to_ndarrays(fit_ins().parameters)

    def moved(result: FitRes) -> float:
        return sum(float(np.square(a - b).sum()) for a, b in zip(_arrays(result), start, strict=True)) ** 0.5

    free, none, pulled = (fit(3, changes, **s) for s in ({}, {"proximal_mu": 0}, {"proximal_mu": 8}))
    assert none == free
    assert moved(pulled) < 0.8 * moved(free)
    assert pulled.metrics["step_weight"] < free.metrics["step_weight"]


def _arrays(result: FitRes) -> list[np.ndarray]:
    return parameters_to_ndarrays(result.parameters)


@pytest.mark.parametrize("changes", [VECTORIZED, ALONE], ids=["stack", "alone"])
def test_the_initial_loss_is_the_received_models_on_all_training_samples(changes: dict[str, Any]) -> None:
    task = ClassificationTask(config(**changes))
    images, labels = task._tensors(task._splits[3].train)
    assert len(labels) > task.eval_batch_size  # several batches
    with torch.no_grad():
        logits = task.new_model()(task._normalise(images))
    expected = F.cross_entropy(logits.double(), labels).item()
    assert fit(3, changes, initial_loss=True).metrics["initial_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"initial_loss": False}], ids=str)
def test_the_initial_loss_is_not_reported_unasked(settings: dict[str, Any]) -> None:
    assert "initial_loss" not in fit(3, {}, **settings).metrics


@pytest.mark.parametrize("changes", [VECTORIZED, ALONE], ids=["stack", "alone"])
def test_asking_for_the_initial_loss_changes_no_bit_of_the_training(changes: dict[str, Any]) -> None:
    asked, unasked = fit(3, changes, initial_loss=True), fit(3, changes)
    assert isinstance(asked.metrics.pop("initial_loss"), float)
    assert asked == unasked


def test_the_initial_loss_is_without_dropout_and_training_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(_: ClassificationTask) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    monkeypatch.setattr(ClassificationTask, "new_model", model)
    task = ClassificationTask(config())
    assert not task.vectorized
    ins = FitIns(ndarrays_to_parameters(get_arrays(task.new_model())), {"server_round": 1})
    plain = TaskClient(task, 3).fit(ins)
    found = TaskClient(task, 3).fit(FitIns(ins.parameters, ins.config | {"initial_loss": True}))
    result = task.evaluate(task.new_model(), [3], "train")
    assert found.metrics["initial_loss"] == result.loss_sum[0] / result.num_examples[0]
    assert found.parameters == plain.parameters


@pytest.mark.parametrize("settings", [{"initial_loss": True}, {"initial_loss": True, "proximal_mu": 0.5}], ids=str)
def test_many_report_bit_for_bit_what_each_reports_alone(settings: dict[str, Any]) -> None:
    app, cids = make_client_app(config(num_clients=60, **VECTORIZED)), [3, 0, 41, 4]
    results = app.fit_many(fit_ins(**settings), [context(cid) for cid in cids])
    assert results is not None
    for cid, result in zip(cids, results, strict=True):
        assert result == fit(cid, {"num_clients": 60} | VECTORIZED, **settings)
        assert result.metrics["initial_loss"] > 0


def test_training_splits_are_evaluated_as_test_splits_are() -> None:
    task = ClassificationTask(config())
    model = task.new_model()
    train, test = task.evaluate(model, [4, 2], "train"), task.evaluate(model, [4, 2])
    assert train.num_examples.tolist() == [task.train_size(4), task.train_size(2)]
    assert test.num_examples.tolist() == [task.test_size(4), task.test_size(2)]
    assert train.loss_sum[0] == pytest.approx(task.evaluate(model, [4], "train").loss_sum[0], rel=1e-6)
