"""Ditto: the personal model's steps, how it is kept, and that the global model never notices."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    EvaluateIns,
    FitIns,
    FitRes,
    RecordDict,
    ndarrays_to_parameters,
)
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from torch import Tensor, nn

from client_apps import make_client_app, personal
from client_apps.app import TaskClient
from client_apps.arrays import get_arrays, set_arrays
from client_apps.errors import ConfigError
from client_apps.kept import record
from client_apps.tasks import ClassificationTask
from client_apps.wire import encode

from .configs import config

WAYS = pytest.mark.parametrize("vectorize", ["auto", False], ids=["stack", "alone"])
EVERYTHING = 10_000  # as a batch size: all samples, in whatever order


def task(ditto_lambda: float | None = 1.0, **changes: Any) -> ClassificationTask:
    return ClassificationTask(config(client__ditto_lambda=ditto_lambda, **changes))


def arrays(of: ClassificationTask, seed: int = 0) -> list[np.ndarray]:
    """A model that is none of the initial ones."""
    rng = np.random.default_rng(seed)
    return [a + rng.normal(0, 0.1, a.shape).astype(np.float32) for a in get_arrays(of.new_model())]


def fit_ins(of: ClassificationTask, server_round: int = 1, **settings: Any) -> FitIns:
    """What clients receive in a round: another global model in each."""
    model = ndarrays_to_parameters(arrays(of, server_round))
    return FitIns(model, {"server_round": server_round} | settings)


def kept(client: TaskClient) -> list[np.ndarray]:
    record = client.state[personal.KEY]
    assert isinstance(record, ArrayRecord)
    assert list(record) == list(client.task.new_model().state_dict())
    return record.to_numpy_ndarrays()


def distance(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return sum(float(np.square(a - b).sum()) for a, b in zip(ours, theirs, strict=True)) ** 0.5


@WAYS
def test_a_step_by_hand(vectorize: Any) -> None:
    # A linear classifier and all samples in one batch: the gradient is (p − y)ᵀ x / n.
    linear = task(
        0.5, model={"name": "mlp", "hidden": []}, client__batch_size=EVERYTHING, client__vectorize=vectorize,
        client__lr_decay=0.5,
    )  # fmt: skip
    client = TaskClient(linear, 3)
    client.fit(fit_ins(linear, 1))  # gives the client a v of its own
    v = [a.astype(np.float64) for a in kept(client)]
    w = [a.astype(np.float64) for a in arrays(linear, 3)]
    images, labels = linear._tensors(linear._splits[3].train)
    x = linear._normalise(images).flatten(1).double().numpy()
    logits = x @ v[0].T + v[1]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = (p - np.eye(10)[labels.numpy()]) / len(labels)
    loss = -np.log(p[np.arange(len(labels)), labels.numpy()]).mean()
    # v <- v − lr (∇F(v) + λ (v − w)), in round 3 with lr = .1 · .5².
    expected = [b - 0.025 * (g + 0.5 * (b - c)) for b, c, g in zip(v, w, (error.T @ x, error.sum(0)), strict=True)]
    result = client.fit(fit_ins(linear, 3))
    for found, tensor in zip(kept(client), expected, strict=True):
        np.testing.assert_allclose(found, tensor, rtol=0, atol=1e-6)
    assert result.metrics["personal_loss"] == pytest.approx(loss, rel=1e-5)


@WAYS
def test_without_a_pull_it_is_local_training_that_goes_on_from_round_to_round(vectorize: Any) -> None:
    free = task(0.0, client__batch_size=EVERYTHING, client__local_epochs=3, client__vectorize=vectorize)
    client, model = TaskClient(free, 3), free.new_model()
    set_arrays(model, arrays(free, 1))  # the first global model that the client receives
    for number in (1, 2, 3):
        client.fit(fit_ins(free, number))
        free.train(model, 3, number)
        for found, expected in zip(kept(client), get_arrays(model), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@WAYS
def test_the_stronger_the_pull_the_closer_to_the_global_model(vectorize: Any) -> None:
    distances = []
    for strength in (0.0, 1.0, 9.0):  # lr · λ = .9: nearly all of the distance in each step
        ditto = task(strength, client__vectorize=vectorize)
        client = TaskClient(ditto, 3)
        for number in (1, 2):
            client.fit(fit_ins(ditto, number))
        distances.append(distance(kept(client), arrays(ditto, 2)))
    assert distances[0] > distances[1] > 5 * distances[2]
    assert distances[2] < 0.4


@WAYS
@pytest.mark.parametrize("settings", [{}, {"proximal_mu": 0.5, "initial_loss": True}], ids=str)
def test_the_global_model_does_not_notice(vectorize: Any, settings: dict[str, Any]) -> None:
    other = {"client__vectorize": vectorize, "client__momentum": 0.9, "dataset__augment": "crop_flip"}
    on, off = TaskClient(task(1.0, **other), 3), TaskClient(task(None, **other), 3)
    for number in (1, 2):
        with_ditto = on.fit(fit_ins(on.task, number, **settings))
        assert isinstance(with_ditto.metrics.pop("personal_loss"), float)
        assert with_ditto == off.fit(fit_ins(off.task, number, **settings))
    assert personal.KEY not in off.state


@WAYS
def test_personal_training_has_a_random_stream_of_its_own(vectorize: Any) -> None:
    ditto = task(0.0, client__vectorize=vectorize)
    client = TaskClient(ditto, 3)
    result = client.fit(fit_ins(ditto))
    # Same start, same data, no pull: the order of the samples tells the two apart, and only that, as batches of all
    # samples show above.
    trained = [np.load(_file(data)) for data in result.parameters.tensors]
    assert distance(kept(client), trained) > 0.01
    again = TaskClient(ditto, 3)
    torch.manual_seed(99)
    assert again.fit(fit_ins(ditto)) == result
    assert again.state == client.state


def _file(data: Any) -> Any:
    return BytesIO(data)


@WAYS
def test_epochs_of_its_own(vectorize: Any) -> None:
    for epochs, expected in ((None, 2), (5, 5)):
        ditto = task(
            client__local_epochs=2, client__ditto_epochs=epochs, client__batch_size=EVERYTHING,
            client__vectorize=vectorize,
        )  # fmt: skip
        model = ditto.new_model()
        center = [tensor.clone() for tensor in model.state_dict().values()]
        assert ditto.train_personal(model, center, 3, 1).local_steps == expected
        assert ditto.train(ditto.new_model(), 3, 1).local_steps == 2


def test_many_are_trained_as_each_alone() -> None:
    cfg = config(num_clients=60, client__ditto_lambda=0.7, client__momentum=0.5)
    app, cids = make_client_app(cfg), [3, 0, 41, 4]
    of = ClassificationTask(cfg)
    contexts = [Context(1, 1, {"partition-id": cid}, RecordDict(), {}) for cid in cids]
    singles = [TaskClient(of, cid) for cid in cids]
    for number, together in ((1, [0, 2]), (2, [0, 1, 2, 3]), (3, [1, 3])):  # some have a model by then, some not
        results = app.fit_many(fit_ins(of, number), [contexts[i] for i in together])
        assert results is not None
        for i, result in zip(together, results, strict=True):
            before = dict(singles[i].state)
            assert result == singles[i].fit(fit_ins(of, number))
            assert contexts[i].state == singles[i].state
            # Replaced and not changed: whoever holds on to the old record still has it.
            assert singles[i].state[personal.KEY] is not before.get(personal.KEY)


def test_both_ways_of_training_agree() -> None:
    found = []
    for vectorize in ("auto", False):
        ditto = task(0.7, client__vectorize=vectorize, client__momentum=0.5, client__weight_decay=0.01)
        client = TaskClient(ditto, 3)
        results = [client.fit(fit_ins(ditto, number)) for number in (1, 2)]
        found.append((kept(client), results[-1].metrics["personal_loss"]))
    for one, two in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


@WAYS
def test_evaluation_reports_both_models(vectorize: Any) -> None:
    ditto = task(0.1, client__local_epochs=5, client__vectorize=vectorize)
    client = TaskClient(ditto, 3)
    received = EvaluateIns(fit_ins(ditto).parameters, {})
    never = client.evaluate(received)
    for key in ("accuracy", "correct", "loss_sum"):
        assert never.metrics[f"personal_{key}"] == never.metrics[key]
    client.fit(fit_ins(ditto))
    state = dict(client.state)
    trained = client.evaluate(received)
    model = ditto.new_model()
    set_arrays(model, kept(client))
    expected = ditto.evaluate(model, [3])
    assert trained.metrics["personal_correct"] == expected.sums["correct"][0]
    assert trained.metrics["personal_accuracy"] == expected.sums["correct"][0] / expected.num_examples[0]
    assert trained.metrics["personal_loss_sum"] == pytest.approx(expected.loss_sum[0])
    assert trained.metrics["personal_correct"] > trained.metrics["correct"]
    # The rest is the global model's, as before; and evaluating changes nothing.
    assert (trained.loss, trained.num_examples) == (never.loss, never.num_examples)
    assert {k: trained.metrics[k] for k in ("accuracy", "correct", "loss_sum")} == {
        k: never.metrics[k] for k in ("accuracy", "correct", "loss_sum")
    }
    assert dict(client.state) == state


def test_without_ditto_nothing_is_reported_of_it() -> None:
    plain = task(None)
    client = TaskClient(plain, 3)
    client.state[personal.KEY] = ConfigRecord({"left": "over"})  # and nothing is read
    results = client.fit(fit_ins(plain)).metrics, client.evaluate(EvaluateIns(fit_ins(plain).parameters, {})).metrics
    assert not [key for metrics in results for key in metrics if key.startswith("personal_")]


def test_what_is_kept_is_numpys_own_format_and_survives_flowers() -> None:
    ditto = task()
    client = TaskClient(ditto, 3)
    client.fit(fit_ins(ditto))
    state = recorddict_from_proto(recorddict_to_proto(client.state))
    again = TaskClient(ditto, 3, state)
    assert again.fit(fit_ins(ditto, 2)) == client.fit(fit_ins(ditto, 2))
    assert again.state == client.state


def test_a_personal_model_that_diverged_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    of = task()
    broken = [np.full_like(a, np.nan) for a in arrays(of)]
    client, fresh = TaskClient(of, 0), TaskClient(of, 0)
    client.state[personal.KEY] = record(of.new_model().state_dict(), [torch.tensor(a) for a in broken])
    client.fit(fit_ins(of))
    fresh.fit(fit_ins(of))
    for a, b in zip(kept(client), kept(fresh), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "diverged" in caplog.text


def test_integer_buffers_and_scalars_are_kept() -> None:
    tensors = {"weight": torch.randn(2, 3), "count": torch.tensor(7), "mean": torch.tensor(0.5, dtype=torch.float64)}
    state = RecordDict({personal.KEY: record(tensors, list(tensors.values()))})
    found = personal.load(state, tensors, 0)
    assert found is not None
    for one, two in zip(found, tensors.values(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert personal.load(RecordDict(), tensors, 0) is None


def _damage(change: Callable[[dict[str, Array]], Any]) -> Callable[[ArrayRecord], Any]:
    def damaged(record: ArrayRecord) -> Any:
        arrays = dict(record)
        replaced = change(arrays)
        return ArrayRecord(arrays) if replaced is None else replaced

    return damaged


def _put(name: str, data: bytes, stype: str = "numpy.ndarray") -> Callable[[ArrayRecord], Any]:
    return _damage(lambda arrays: arrays.update({name: Array("float32", (10,), stype, data)}))


BIAS = "layers.3.bias"


def _pickled() -> bytes:
    file = BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    return file.getvalue()


@WAYS
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: ConfigRecord({"a": 1}), "it is a ConfigRecord, not an ArrayRecord"),
        (_damage(lambda arrays: arrays.pop(BIAS) and None), f"{BIAS} is in one of them only"),
        (_damage(lambda arrays: arrays.update(more=arrays[BIAS])), "more is in one of them only"),
        (_put(BIAS, encode(np.zeros(9, np.float32))), rf"{BIAS} is of shape \(9,\) and torch.float32"),
        (_put(BIAS, encode(np.zeros(10))), rf"{BIAS} is of shape \(10,\) and torch.float64"),
        (_put(BIAS, b"no array"), "no .npy array"),
        (_put(BIAS, encode(np.zeros(10, np.float32))[:-1]), "takes 40"),
        (_put(BIAS, encode(np.array(["text"] * 10))), "<U4"),
        (_put(BIAS, _pickled()), "never unpickled"),
        (_put(BIAS, encode(np.zeros(10, np.float32)), "pickle"), f"{BIAS} is serialized as 'pickle'"),
    ],
    ids=["type", "missing", "more", "shape", "dtype", "bytes", "short", "text", "objects", "serialization"],
)
def test_a_damaged_state_is_named_in_a_sentence(vectorize: Any, damage: Any, reason: str) -> None:
    ditto = task(client__vectorize=vectorize)
    client = TaskClient(ditto, 3)
    client.fit(fit_ins(ditto))
    record = client.state[personal.KEY]
    assert isinstance(record, ArrayRecord)
    client.state[personal.KEY] = damage(record)
    for use in (
        lambda: client.fit(fit_ins(ditto)),
        lambda: client.evaluate(EvaluateIns(fit_ins(ditto).parameters, {})),
    ):
        with pytest.raises(
            ConfigError, match=f"^The personal model kept by client 3 .*{reason}.*; start a new run"
        ) as e:
            use()
        assert "\n" not in str(e.value)
        assert str(e.value).count(";") == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ditto_lambda", -1, "client.ditto_lambda must be a number of at least 0, not -1"),
        ("ditto_lambda", float("nan"), "client.ditto_lambda must be a number of at least 0, not nan"),
        ("ditto_lambda", True, "client.ditto_lambda must be a number of at least 0, not True"),
        ("ditto_lambda", "1", "client.ditto_lambda must be a number of at least 0, not '1'"),
        ("ditto_epochs", 0, "client.ditto_epochs must be an integer of at least 1, not 0"),
        ("ditto_epochs", 1.5, "client.ditto_epochs must be an integer of at least 1, not 1.5"),
    ],
)
def test_options_out_of_range_are_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClassificationTask(config(**{f"client__{key}": value}))


def test_personal_training_is_refused_where_there_is_none() -> None:
    plain = task(None)
    assert not plain.personal
    state: list[Tensor] = list(plain.new_model().state_dict().values())
    with pytest.raises(ConfigError, match=r"only where client\.ditto_lambda is a number"):
        plain.train_personal_many(state, [None], [3], 1, lambda _: None)


def test_batch_norm_models_have_personal_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(_: ClassificationTask) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    monkeypatch.setattr(ClassificationTask, "new_model", model)
    ditto = task(1.0)
    client = TaskClient(ditto, 3)
    start = ndarrays_to_parameters(get_arrays(ditto.new_model()))
    steps = -(-ditto.train_size(3) // 20)
    results: list[FitRes] = [client.fit(FitIns(start, {"server_round": number})) for number in (1, 2)]
    place = list(ditto.new_model().state_dict()).index("2.num_batches_tracked")
    assert kept(client)[place] == 2 * steps  # goes on, while the global model's began anew
    assert np.load(_file(results[1].parameters.tensors[place])) == steps
