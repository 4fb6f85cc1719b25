"""Many clients trained in one call, each as if by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.common import (
    Code,
    Context,
    FitIns,
    GetParametersIns,
    RecordDict,
    ndarrays_to_parameters,
)
from flwr.supercore.task_identity import TaskIdentity

from client_apps import app as app_module
from client_apps import make_client_app
from client_apps.app import TaskClient, TaskClientApp
from client_apps.arrays import get_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask
from client_apps.wire import encode

from .configs import config


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("_task_id", "_run_id", "_node_id"):  # what Flower sets in every process that sends messages
        monkeypatch.setattr(TaskIdentity, key, 1)


def arrays(shift: float = 0.0) -> list[np.ndarray]:
    return [array + np.float32(shift) for array in get_arrays(ClassificationTask(config()).new_model())]


def contexts(cids: list[Any], **node: Any) -> list[Context]:
    return [
        Context(run_id=1, node_id=1, node_config={"partition-id": cid} | node, state=RecordDict(), run_config={})
        for cid in cids
    ]


def fit_ins(**settings: Any) -> FitIns:
    return FitIns(ndarrays_to_parameters(arrays()), {"server_round": 1} | settings)


@pytest.mark.parametrize("changes", [{}, {"client__momentum": 0.9, "client__local_epochs": 2}], ids=str)
def test_many_are_trained_as_each_alone(changes: dict[str, Any]) -> None:
    app = make_client_app(config(**changes))
    results = app.fit_many(fit_ins(), contexts([3, 0, 9, 4]))
    assert results is not None
    for cid, result in zip([3, 0, 9, 4], results, strict=True):
        assert result == TaskClient(ClassificationTask(config(**changes)), cid).fit(fit_ins())


def test_what_cannot_be_trained_at_once_is_left_to_the_caller(tmp_path: Any) -> None:
    assert make_client_app(config(client__vectorize=False)).fit_many(fit_ins(), contexts([1, 2])) is None
    assert make_client_app(config()).fit_many(fit_ins(), []) is None
    mods = TaskClientApp(config(), mods=[lambda message, context, call_next: call_next(message, context)])
    assert mods.fit_many(fit_ins(), contexts([1, 2])) is None
    # A node with data of its own has another task.
    nodes = [*contexts([1, 2]), *contexts([3], **{"data-dir": str(tmp_path)})]
    assert make_client_app(config()).fit_many(fit_ins(), nodes) is None


def test_a_client_that_is_none_of_the_tasks_raises() -> None:
    with pytest.raises(ConfigError, match="partition-id=10 is outside"):
        make_client_app(config()).fit_many(fit_ins(), contexts([1, 10]))
    with pytest.raises(ConfigError, match="server_round"):
        make_client_app(config()).fit_many(fit_ins(server_round=True), contexts([1]))


def test_many_are_trained_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(app_module, "_single_thread", lambda: calls.append(True))
    make_client_app(config()).fit_many(fit_ins(), contexts([1]))
    assert calls


def test_replies_hold_what_numpy_saves() -> None:
    task = ClassificationTask(config())
    client = TaskClient(task, 3)
    result = client.fit(FitIns(ndarrays_to_parameters(arrays()), {"server_round": 1}))
    model = task.new_model()
    task.train(model, 3, 1)
    assert result.parameters.tensors == ndarrays_to_parameters(get_arrays(model)).tensors
    assert result.parameters.tensors == [encode(array) for array in get_arrays(model)]
    assert result.parameters.tensor_type == "numpy.ndarray"


def test_parameters_are_not_for_the_asking() -> None:
    client = TaskClient(ClassificationTask(config()), 3)
    assert client.get_parameters(GetParametersIns({})).status.code == Code.GET_PARAMETERS_NOT_IMPLEMENTED
