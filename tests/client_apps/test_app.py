"""The ClientApp: a client's round trip, its travels to other processes, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import (
    Context,
    EvaluateIns,
    FitIns,
    GetPropertiesIns,
    Message,
    RecordDict,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
from flwr.supercore.task_identity import TaskIdentity

from client_apps import app as app_module
from client_apps import make_client_app
from client_apps.app import _client, _client_of_run
from client_apps.arrays import get_arrays, set_arrays
from client_apps.errors import ConfigError
from client_apps.models import build as build_model
from client_apps.tasks import ClassificationTask

from .configs import config


def context(run_config: dict[str, Any] | None = None, **node_config: Any) -> Context:
    node = {key.replace("_", "-"): value for key, value in node_config.items()}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run_config or {})


def client(cid: int = 3, **changes: Any) -> Client:
    return _client(config(**changes), context(partition_id=cid, num_partitions=10))


def fit(of: Client, arrays: list[np.ndarray], **settings: Any) -> tuple[list[np.ndarray], Any]:
    result = of.fit(FitIns(ndarrays_to_parameters(arrays), settings))
    return parameters_to_ndarrays(result.parameters), result


def test_a_client_trains_as_its_task_does() -> None:
    task = ClassificationTask(config())
    model = task.new_model()
    start = get_arrays(model)
    arrays, result = fit(client(3), start, server_round=2)
    expected = task.train(model, 3, 2)
    for one, other in zip(arrays, get_arrays(model), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert result.num_examples == expected.num_examples
    assert result.metrics == {
        "train_loss": expected.train_loss,
        "local_steps": expected.local_steps,
        "step_weight": expected.step_weight,
        "partition_id": 3,
    }


def test_nothing_is_left_over_from_the_client_before() -> None:
    start = get_arrays(ClassificationTask(config()).new_model())
    first, _ = fit(client(3), start, server_round=1)
    fit(client(4), start, server_round=1)
    again, _ = fit(client(3), start, server_round=1)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_client_evaluates_its_own_test_split() -> None:
    task = ClassificationTask(config())
    expected = task.evaluate(task.new_model(), [3])
    result = client(3).evaluate(EvaluateIns(ndarrays_to_parameters(get_arrays(task.new_model())), {}))
    assert result.num_examples == expected.num_examples[0] == task.test_size(3)
    assert result.loss == pytest.approx(expected.loss_sum[0] / expected.num_examples[0])
    assert result.metrics == {
        "accuracy": expected.sums["correct"][0] / expected.num_examples[0],
        "correct": expected.sums["correct"][0],
        "class_counts": json.dumps(expected.sums["class_counts"][0].tolist()),
        "loss_sum": pytest.approx(expected.loss_sum[0]),
        "partition_id": 3,
    }


def test_an_empty_test_split_weighs_nothing() -> None:
    arrays = get_arrays(ClassificationTask(config()).new_model())
    nothing = client(3, dataset__test_fraction=0)
    result = nothing.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), {}))
    assert (result.loss, result.num_examples, result.metrics["accuracy"]) == (0.0, 0, 0.0)


def test_a_client_tells_who_it_is() -> None:
    assert client(3).get_properties(GetPropertiesIns({})).properties == {"partition-id": 3}


def test_arrays_returned_do_not_alias_the_shared_model() -> None:
    task = ClassificationTask(config())
    model = task.new_model()
    arrays = get_arrays(model)
    before = [array.copy() for array in arrays]
    task.train(model, 0, 1)
    for array, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_batch_norm_state_survives_the_round_trip_with_dtype_and_shape() -> None:
    def model() -> Any:
        return build_model({"name": "resnet", "norm": "batch"}, channels=1, side=28, num_classes=62)

    source, target = model(), model()
    source.norm.num_batches_tracked.fill_(7)
    arrays = get_arrays(source)
    for array in arrays:
        array.setflags(write=False)  # as it comes out of Ray's object store
    set_arrays(target, arrays)
    names = list(source.state_dict())
    counter = arrays[names.index("norm.num_batches_tracked")]
    assert (counter.shape, counter.dtype, int(counter)) == ((), np.int64, 7)
    for one, other in zip(get_arrays(target), arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_foreign_arrays_are_refused_and_change_nothing() -> None:
    model = ClassificationTask(config()).new_model()
    arrays = get_arrays(model)
    with pytest.raises(ValueError, match="Received 3 arrays for a model of 4 tensors"):
        set_arrays(model, arrays[:3])
    wrong = [array + 1 for array in arrays[:3]] + [np.zeros(1, np.float32)]
    with pytest.raises(ValueError, match=r"shape \(1,\) for layers.3.bias, which has \(10,\)"):
        set_arrays(model, wrong)
    for one, other in zip(get_arrays(model), arrays, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("settings", [{}, {"server_round": 0}, {"server_round": 1.0}, {"server_round": True}], ids=str)
def test_fit_needs_the_round(settings: dict[str, Any]) -> None:
    arrays = get_arrays(ClassificationTask(config()).new_model())
    with pytest.raises(ConfigError, match="must hold server_round, an integer from 1"):
        fit(client(), arrays, **settings)


@pytest.mark.parametrize("cid", [None, "3", 1.0, True])
def test_a_node_without_partition_id_is_told_how_to_start(cid: Any) -> None:
    node = {} if cid is None else {"partition_id": cid}
    with pytest.raises(ConfigError, match="--node-config 'partition-id=0 num-partitions=10'"):
        _client(config(), context(**node))


@pytest.mark.parametrize("cid", [-1, 10])
def test_a_partition_id_out_of_range_is_refused(cid: int) -> None:
    with pytest.raises(ConfigError, match=f"partition-id={cid} is outside 0..9, as num_clients is 10"):
        _client(config(), context(partition_id=cid))


def test_a_nodes_own_data_folder_goes_first(tmp_path: Path) -> None:
    cfg = config(dataset__name="femnist", data_dir="/nowhere")
    node = context(partition_id=0, data_dir=str(tmp_path))
    arrays = get_arrays(ClassificationTask(cfg).new_model())
    with pytest.raises(ConfigError, match=f"No FEMNIST in {tmp_path}"):
        fit(_client(cfg, node), arrays, server_round=1)


def test_the_app_travels_by_reference_and_keeps_its_own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    app = make_client_app(cfg)
    cfg["client"]["lr"] = -1  # too late
    pickled = cloudpickle.dumps(app)
    assert len(pickled) < 20_000  # code by reference, no data
    for key in ("_task_id", "_run_id", "_node_id"):  # what Flower sets in every process that sends messages
        monkeypatch.setattr(TaskIdentity, key, 1)
    arrays = get_arrays(ClassificationTask(config()).new_model())
    ins = FitIns(ndarrays_to_parameters(arrays), {"server_round": 1})
    message = Message(fitins_to_recorddict(ins, keep_input=True), dst_node_id=1, message_type="train")
    reply = cloudpickle.loads(pickled)(message, context(partition_id=3))
    result = recorddict_to_fitres(reply.content, keep_input=True)
    expected, direct = fit(client(3), arrays, server_round=1)
    assert result.metrics == direct.metrics
    for one, other in zip(parameters_to_ndarrays(result.parameters), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_wrong_configuration_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"client.lr must be a number above 0"):
        make_client_app(config(client__lr=-1))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A module `composer` with a function `load`; the run configs it was called with."""
    calls: list[dict[str, Any]] = []

    def load(run_config: dict[str, Any]) -> dict[str, Any]:
        calls.append(run_config)
        return config(num_clients=run_config["clients"])

    module = ModuleType("composer")
    module.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "composer", module)
    app_module._compose.cache_clear()
    return calls


def test_the_entry_composes_once_per_run_config(loader: list[dict[str, Any]]) -> None:
    assert isinstance(app_module.app, ClientApp)
    run_config = {"config-loader": "composer:load", "clients": 10}
    arrays = get_arrays(ClassificationTask(config()).new_model())
    entry = _client_of_run(context(run_config, partition_id=3))
    _client_of_run(context(run_config, partition_id=4))
    assert loader == [run_config]
    one, _ = fit(entry, arrays, server_round=1)
    other, _ = fit(client(3), arrays, server_round=1)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    _client_of_run(context({**run_config, "clients": 20}, partition_id=15))
    assert len(loader) == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "config-loader must read 'module:function', not None"),
        ("composer", "must read 'module:function', not 'composer'"),
        ("no_such_module:load", "config-loader no_such_module:load cannot be imported"),
        ("composer:nothing", "config-loader composer:nothing cannot be imported"),
    ],
)
def test_a_wrong_config_loader_is_named(loader: list[dict[str, Any]], target: str | None, message: str) -> None:
    run_config = {} if target is None else {"config-loader": target}
    with pytest.raises(ConfigError, match=message):
        _client_of_run(context(run_config, partition_id=0))
