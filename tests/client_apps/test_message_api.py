"""Clients answer servers of both of Flower's APIs, each in the form in which it asks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod
from flwr.common import EvaluateIns, FitIns, GetPropertiesIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.serverapp.strategy import FedProx

from client_apps import personal, stale
from client_apps.app import TaskClientApp
from client_apps.app import app as bundled
from client_apps.errors import ConfigError
from client_apps.tasks import build
from experiments.engine import SerialGrid
from experiments.engine.internals import identify, name

from .configs import config


@pytest.fixture(autouse=True)
def _identity() -> None:
    identify(1)


def start(**changes: Any) -> dict[str, np.ndarray]:
    return {key: tensor.numpy().copy() for key, tensor in build(config(**changes)).new_model().state_dict().items()}


def context(cid: int = 3) -> Context:
    node = {"partition-id": cid, "num-partitions": 10}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})


def message(arrays: dict[str, np.ndarray], kind: str = "train", server_round: int = 1, **asked: Any) -> Message:
    content = {
        "arrays": ArrayRecord({key: Array(a) for key, a in arrays.items()}),
        "config": ConfigRecord({"server-round": server_round, **{k.replace("_", "-"): v for k, v in asked.items()}}),
    }
    made = Message(RecordDict(content), 1, kind)
    name(made)
    return made


def legacy(arrays: dict[str, np.ndarray], kind: str = "train", **asked: Any) -> Message:
    parameters, settings = ndarrays_to_parameters(list(arrays.values())), {"server_round": 1, **asked}
    if kind == "train":
        return Message(compat.fitins_to_recorddict(FitIns(parameters, settings), True), 1, kind)
    return Message(compat.evaluateins_to_recorddict(EvaluateIns(parameters, settings), True), 1, kind)


@pytest.mark.parametrize("asked", [{}, {"proximal_mu": 0.5, "initial_loss": True}], ids=["plain", "asked"])
def test_training_is_the_same_through_both(asked: dict[str, Any]) -> None:
    app = TaskClientApp(config())
    expected = compat.recorddict_to_fitres(app(legacy(start(), **asked), context()).content, True)
    found = app(message(start(), **asked), context()).content
    assert set(found) == {"arrays", "metrics"}
    assert list(found["arrays"]) == list(start())
    assert [a.data for a in found["arrays"].values()] == expected.parameters.tensors
    for array in found["arrays"].values():
        assert (array.dtype, array.shape) == (str(array.numpy().dtype), array.numpy().shape)
    assert dict(found["metrics"]) == {"num-examples": expected.num_examples, **expected.metrics}
    assert ("initial_loss" in found["metrics"]) == bool(asked)


def test_evaluation_is_the_same_through_both_and_texts_travel_as_a_config() -> None:
    app = TaskClientApp(config())
    expected = compat.recorddict_to_evaluateres(app(legacy(start(), "evaluate"), context()).content)
    found = app(message(start(), "evaluate"), context()).content
    assert set(found) == {"metrics", "config"}
    assert dict(found["config"]) == {k: v for k, v in expected.metrics.items() if isinstance(v, str)} != {}
    numbers = {k: v for k, v in expected.metrics.items() if not isinstance(v, str)}
    assert dict(found["metrics"]) == {"num-examples": expected.num_examples, "loss": expected.loss, **numbers}


@pytest.mark.parametrize(
    "changes", [{"client__ditto_lambda": 0.5}, {"client__stale_update": 0.9}], ids=["ditto", "stale"]
)
def test_what_a_client_keeps_is_the_same_through_both(changes: dict[str, Any]) -> None:
    app, contexts = TaskClientApp(config(**changes)), [context(), context()]
    for number in (1, 2, 3):
        arrays = {key: a + np.float32(number / 100) for key, a in start().items()}
        expected = compat.recorddict_to_fitres(app(legacy(arrays, server_round=number), contexts[0]).content, True)
        found = app(message(arrays, server_round=number), contexts[1]).content
        assert [a.data for a in found["arrays"].values()] == expected.parameters.tensors
    key = personal.KEY if "client__ditto_lambda" in changes else stale.KEY
    assert contexts[0].state[key] == contexts[1].state[key]


def test_tensors_are_told_by_their_names_or_numbers() -> None:
    app, arrays = TaskClientApp(config()), start()
    expected = app(message(arrays), context()).content["arrays"]
    turned = dict(reversed(arrays.items()))
    found = app(message(turned), context()).content["arrays"]
    assert list(found) == list(turned)
    assert found == expected
    numbered = app(message({str(i): a for i, a in enumerate(arrays.values())}), context()).content["arrays"]
    assert [*numbered.items()] == [(str(i), a) for i, a in enumerate(expected.values())]


def change(content: RecordDict, key: str, value: Array | None) -> None:
    if value is None:
        del content["arrays"][key]
    else:
        content["arrays"][key] = value


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: change(c, next(iter(start())), None), "only the configured model has"),
        (lambda c: change(c, "more", Array(np.zeros(1))), "only the message has more"),
        (lambda c: change(c, next(iter(start())), Array(np.zeros(1))), "Received an array of shape"),
        (lambda c: change(c, next(iter(start())), Array("float32", (1,), "pickle", b"")), "serialized as 'pickle'"),
        (lambda c: change(c, next(iter(start())), Array("float32", (1,), "numpy.ndarray", b"x" * 99)), "no .npy array"),
        (lambda c: c.pop("arrays"), "holds no ArrayRecord"),
        (lambda c: c.update(a=c["arrays"], b=c.pop("arrays")), r"holds 2 ArrayRecords \(a, b\) and none is called"),
        (lambda c: c.update(a=c["config"], b=c.pop("config")), "holds 2 ConfigRecords"),
        (lambda c: c.pop("config"), "must hold server_round"),
        (lambda c: c["config"].update({"proximal-mu": -1.0}), "proximal_mu"),
    ],
)
def test_messages_that_cannot_be_used_are_refused_in_one_sentence(spoil: Any, words: str) -> None:
    spoiled = message(start())
    spoil(spoiled.content)
    with pytest.raises((ConfigError, ValueError), match=words):
        TaskClientApp(config())(spoiled, context())


def test_mods_see_what_the_server_sent_and_gets() -> None:
    seen: list[tuple[set[str], set[str]]] = []

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        seen.append((set(message.content), set(reply.content)))
        return reply

    app = TaskClientApp(config(), mods=[watch])
    app(message(start()), context())
    app(legacy(start()), context())
    assert seen[0] == ({"arrays", "config"}, {"arrays", "metrics"})
    assert seen[1] == (
        {"fitins.parameters", "fitins.config"},
        {"fitres.parameters", "fitres.metrics", "fitres.num_examples", "fitres.status"},
    )


def test_mods_of_flower_work_on_messages() -> None:
    dp = LocalDpMod(clipping_norm=1e-3, sensitivity=1e-9, epsilon=1.0, delta=0.1)
    reply = TaskClientApp(config(), mods=[arrays_size_mod, dp])(message(start()), context())
    moved = sum(float(np.square(a.numpy() - start()[key]).sum()) for key, a in reply.content["arrays"].items())
    assert moved**0.5 == pytest.approx(1e-3, rel=0.05)


def test_other_messages_are_answered_as_ever() -> None:
    asked = Message(compat.getpropertiesins_to_recorddict(GetPropertiesIns({})), 1, "get_properties")
    reply = TaskClientApp(config())(asked, context())
    assert compat.recorddict_to_getpropertiesres(reply.content).properties == {"partition-id": 3}


def test_apps_travel_to_other_processes() -> None:
    app = cloudpickle.loads(cloudpickle.dumps(TaskClientApp(config())))
    expected = TaskClientApp(config())(message(start()), context())
    assert app(message(start()), context()).content == expected.content


def test_the_bundled_app_answers_messages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ModuleType("loader_of_the_message_test")
    loader.load = lambda values: config()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    where = context()
    where.run_config = {"config-loader": f"{loader.__name__}:load"}
    expected = TaskClientApp(config())(message(start()), context())
    assert bundled(message(start()), where).content == expected.content


def test_clients_work_with_strategies_of_flower() -> None:
    grid = SerialGrid(TaskClientApp(config()), 10)
    strategy = FedProx(proximal_mu=0.1, min_available_nodes=10)
    result = strategy.start(grid, ArrayRecord({key: Array(a) for key, a in start().items()}), num_rounds=2)
    losses = [result.evaluate_metrics_clientapp[number]["loss"] for number in (1, 2)]
    assert losses[1] < losses[0]
