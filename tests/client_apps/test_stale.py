"""Stale answers: whose turn it is, what is sent then, what is kept, and that nothing else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    parameters_to_ndarrays,
)
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from torch import nn

from client_apps import kept, make_client_app, personal, stale
from client_apps.app import TaskClient
from client_apps.arrays import get_arrays
from client_apps.config import ClientConfig
from client_apps.errors import ConfigError
from client_apps.tasks import ClassificationTask
from client_apps.training import TrainResult
from client_apps.wire import encode

from .configs import config

WAYS = pytest.mark.parametrize("vectorize", ["auto", False], ids=["stack", "alone"])
SAMPLED = (1, 2, 5, 9)  # the rounds in which a client is asked


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a client app sets for its clients; those made by hand, as here, have whatever there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def task(probability: float = 1.0, **changes: Any) -> ClassificationTask:
    return ClassificationTask(config(client__stale_update=probability, **changes))


def fit_ins(server_round: int, dtype: type = np.float32, **settings: Any) -> FitIns:
    """What clients receive in a round: another global model in each."""
    rng = np.random.default_rng(server_round)
    start = [a + rng.normal(0, 0.1, a.shape) for a in get_arrays(task().new_model())]
    return FitIns(ndarrays_to_parameters([a.astype(dtype) for a in start]), {"server_round": server_round} | settings)


def kept_by(client: TaskClient) -> list[bytes]:
    record = client.state[stale.KEY]
    assert isinstance(record, ArrayRecord)
    return [record[name].data for name in client.task.new_model().state_dict()]


def turns(cids: Sequence[int], rounds: Sequence[int], probability: float, seed: int = 0) -> np.ndarray:
    return np.array([[stale.drawn(probability, seed, cid, number) for number in rounds] for cid in cids])


# ---- whose turn it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_so_many_are_stale_and_neighbours_do_not_depend_on_each_other(probability: float) -> None:
    found = turns(range(100), range(1, 101), probability)
    deviation = (probability * (1 - probability)) ** 0.5

    def within(sample: np.ndarray, mean: float) -> bool:
        return bool(abs(sample.mean() - mean) < 4 * deviation / sample.size**0.5)

    assert within(found, probability)
    assert all(within(row, probability) for row in [*found, *found.T])
    # Independent: with the next round, the next client, and the next seed both are stale with probability π².
    for one, other in (
        (found[:, 1:], found[:, :-1]),
        (found[1:], found[:-1]),
        (found, turns(range(100), range(1, 101), probability, seed=1)),
    ):
        assert abs(np.mean(one & other) - probability**2) < 0.02


def test_always_never_and_the_more_probable_the_more() -> None:
    always, much, little, never = (turns(range(30), range(1, 31), p) for p in (1.0, 0.6, 0.2, 0.0))
    assert always.all()
    assert not never.any()
    assert (much | ~little).all()  # who is stale with .2 is with .6


def test_large_seeds_are_seeds() -> None:
    assert turns(range(20), range(1, 21), 0.5, seed=2**63 - 1).any()


# ---- what is sent ------------------------------------------------------------------------------------------------


@WAYS
def test_from_the_second_time_on_the_answer_is_what_was_received_the_time_before(vectorize: Any) -> None:
    of = task(client__vectorize=vectorize)
    client, honest = TaskClient(of, 3), TaskClient(task(0.0, client__vectorize=vectorize), 3)
    before = None
    for number in SAMPLED:
        received = fit_ins(number)
        found, expected = client.fit(received), honest.fit(received)
        # Bit for bit an honest client's answer but for the arrays: the time it took went into training, too.
        assert found.metrics.pop("stale") == int(before is not None)
        arrays = expected.parameters if before is None else before.parameters
        assert found == FitRes(expected.status, arrays, expected.num_examples, expected.metrics)
        assert arrays is expected.parameters or arrays != expected.parameters
        before = received
    assert dict(honest.state) == {}


@WAYS
def test_in_other_rounds_it_is_honest(vectorize: Any) -> None:
    changes: dict[str, Any] = {"client__vectorize": vectorize, "client__momentum": 0.5}
    of, honest = task(0.5, **changes), TaskClient(task(0.0, **changes), 4)
    client, number_stale = TaskClient(of, 4), 0
    for number in range(1, 11):
        received = fit_ins(number)
        found, expected = client.fit(received), honest.fit(received)
        turn = number > 1 and stale.drawn(0.5, 0, 4, number)
        assert found.metrics["stale"] == turn
        assert found.parameters == (fit_ins(number - 1) if turn else expected).parameters
        number_stale += turn
    assert 0 < number_stale < 9


@WAYS
@pytest.mark.parametrize("settings", [{}, {"proximal_mu": 0.5, "initial_loss": True}], ids=str)
def test_without_it_nothing_is_stored_reported_or_read(vectorize: Any, settings: dict[str, Any]) -> None:
    plain = ClassificationTask(config(client__vectorize=vectorize))  # a configuration of before there was the option
    client, off = TaskClient(plain, 3), TaskClient(task(0.0, client__vectorize=vectorize), 3)
    off.state[stale.KEY] = ConfigRecord({"left": "over"})
    for number in (1, 2):
        found = off.fit(fit_ins(number, **settings))
        assert "stale" not in found.metrics
        assert found == client.fit(fit_ins(number, **settings))
    assert dict(client.state) == {}
    assert dict(off.state) == {stale.KEY: ConfigRecord({"left": "over"})}


@WAYS
def test_the_order_of_clients_does_not_matter_nor_who_drew_before(vectorize: Any) -> None:
    cids = [3, 0, 9, 4]

    def answers(order: list[int]) -> dict[tuple[int, int], FitRes]:
        of = task(0.5, client__vectorize=vectorize)
        clients = {cid: TaskClient(of, cid) for cid in order}
        found = {}
        for number in (1, 2, 3):
            for cid in order:
                torch.manual_seed(len(found))
                np.random.seed(len(found))  # noqa: NPY002  the generator that nothing here may read
                found[cid, number] = clients[cid].fit(fit_ins(number))
        return found

    assert answers(cids) == answers(cids[::-1])


def test_many_answer_as_each_alone() -> None:
    cfg = config(num_clients=60, client__stale_update=0.5, client__momentum=0.5)
    app, cids = make_client_app(cfg), [3, 0, 41, 4]
    of = ClassificationTask(cfg)
    contexts = [Context(1, 1, {"partition-id": cid}, RecordDict(), {}) for cid in cids]
    singles = [TaskClient(of, cid) for cid in cids]
    seen = []
    for number, together in ((1, [0, 2]), (2, [0, 1, 2, 3]), (3, [1, 3]), (4, [0, 1, 2, 3])):
        results = app.fit_many(fit_ins(number), [contexts[i] for i in together])
        assert results is not None
        for i, result in zip(together, results, strict=True):
            before = dict(singles[i].state)
            assert result == singles[i].fit(fit_ins(number))
            assert contexts[i].state == singles[i].state
            # Replaced and not changed: whoever holds on to the old record still has it.
            assert singles[i].state[stale.KEY] is not before.get(stale.KEY)
            seen.append(result.metrics["stale"])
        records = [contexts[i].state[stale.KEY] for i in together]
        assert len({id(record) for record in records}) == len(together)  # each has its own
    assert {0, 1} == set(seen)


@WAYS
def test_buffers_are_stale_too(vectorize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(_: ClassificationTask) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    monkeypatch.setattr(ClassificationTask, "new_model", model)
    of = task(client__vectorize=vectorize)
    place = list(of.new_model().state_dict()).index("2.num_batches_tracked")
    client, sent = TaskClient(of, 3), []
    for number in (1, 2):
        arrays = [a + a.dtype.type(number) for a in get_arrays(of.new_model())]
        sent.append(ndarrays_to_parameters(arrays))
        found = client.fit(FitIns(sent[-1], {"server_round": number}))
    assert found.parameters == sent[0]
    counter = np.load(BytesIO(found.parameters.tensors[place]))
    assert (counter.shape, counter.dtype, int(counter)) == ((), np.int64, 1)


@WAYS
def test_the_answer_is_of_the_models_dtypes_whatever_the_server_sent(vectorize: Any) -> None:
    of = task(client__vectorize=vectorize)
    client = TaskClient(of, 3)
    client.fit(fit_ins(1, np.float64))
    found = parameters_to_ndarrays(client.fit(fit_ins(2, np.float64)).parameters)
    for array, sent in zip(found, parameters_to_ndarrays(fit_ins(1, np.float64).parameters), strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, sent.astype(np.float32))


class Drift:
    """A task that is no classification: each client moves the model by its number."""

    seed, num_clients, vectorized, personal = 7, 3, False, False
    client = ClientConfig(lr=1.0, batch_size=1, stale_update=1.0)

    def new_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train(self, model: nn.Module, cid: int, server_round: int, proximal_mu: float = 0.0) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += cid + 1
        return TrainResult(5, 0.25, 1, 1.0)


def test_any_task_will_do() -> None:
    client: TaskClient = TaskClient(Drift(), 1)  # type: ignore[arg-type]
    for number in (1, 2, 3):
        received = [np.full((1, 2), number, np.float32), np.full(1, -number, np.float32)]
        found = client.fit(FitIns(ndarrays_to_parameters(received), {"server_round": number}))
        shift = 2 if number == 1 else -1  # trained, and then what came the time before
        expected = [received[0] + shift, received[1] + (2 if number == 1 else 1)]
        for array, other in zip(parameters_to_ndarrays(found.parameters), expected, strict=True):
            np.testing.assert_array_equal(array, other)
        assert (found.num_examples, found.metrics["train_loss"]) == (5, 0.25)


# ---- what is kept ------------------------------------------------------------------------------------------------


@WAYS
def test_what_was_received_is_kept_without_a_copy(vectorize: Any) -> None:
    of = task(client__vectorize=vectorize)
    received = fit_ins(1)
    clients = [TaskClient(of, cid) for cid in (3, 4)]
    for client in clients:
        client.fit(received)
        assert all(a is b for a, b in zip(kept_by(client), received.parameters.tensors, strict=True))


@WAYS
def test_what_is_kept_survives_flowers_serialisation(vectorize: Any) -> None:
    of = task(client__vectorize=vectorize)
    client = TaskClient(of, 3)
    client.fit(fit_ins(1))
    assert kept_by(client) == fit_ins(1).parameters.tensors
    again = TaskClient(of, 3, recorddict_from_proto(recorddict_to_proto(client.state)))
    for number in (2, 3):
        assert again.fit(fit_ins(number)) == client.fit(fit_ins(number))
    assert again.state == client.state


@WAYS
def test_ditto_does_not_notice(vectorize: Any) -> None:
    changes = {"client__vectorize": vectorize, "client__ditto_lambda": 0.7}
    both, alone = TaskClient(task(1.0, **changes), 3), TaskClient(task(0.0, **changes), 3)
    for number in SAMPLED:
        found, expected = both.fit(fit_ins(number)), alone.fit(fit_ins(number))
        assert found.metrics == expected.metrics | {"stale": int(number > 1)}  # personal_loss among them
        assert both.state[personal.KEY] == alone.state[personal.KEY]
        received = EvaluateIns(fit_ins(number).parameters, {})
        assert both.evaluate(received) == alone.evaluate(received)
    assert both.state.keys() == {stale.KEY, personal.KEY}


def _damaged(change: Callable[[dict[str, Array]], Any]) -> Callable[[ArrayRecord], Any]:
    def damaged(record: ArrayRecord) -> Any:
        arrays = dict(record)
        change(arrays)
        return ArrayRecord(arrays)

    return damaged


BIAS = "layers.3.bias"


def _put(data: bytes, stype: str = "numpy.ndarray") -> Callable[[ArrayRecord], Any]:
    return _damaged(lambda arrays: arrays.update({BIAS: Array("float32", (10,), stype, data)}))


DAMAGE = pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: ConfigRecord({"a": 1}), "it is a ConfigRecord, not an ArrayRecord"),
        (_damaged(lambda arrays: arrays.pop(BIAS)), f"{BIAS} is in one of them only"),
        (_put(encode(np.zeros(9, np.float32))), rf"{BIAS} is of shape \(9,\) and torch.float32"),
        (_put(encode(np.zeros(10))), rf"{BIAS} is of shape \(10,\) and torch.float64"),
        (_put(b"no array"), "no .npy array"),
        (_put(encode(np.zeros(10, np.float32))[:-1]), "takes 40"),
        (_put(encode(np.zeros(10, np.float32)), "pickle"), f"{BIAS} is serialized as 'pickle'"),
    ],
    ids=["type", "missing", "shape", "dtype", "bytes", "short", "serialization"],
)


@WAYS
@DAMAGE
def test_a_damaged_model_is_named_in_a_sentence(vectorize: Any, damage: Any, reason: str) -> None:
    of = task(client__vectorize=vectorize)
    client = TaskClient(of, 3)
    client.fit(fit_ins(1))
    record = client.state[stale.KEY]
    assert isinstance(record, ArrayRecord)
    client.state[stale.KEY] = damage(record)
    before = dict(client.state)
    with pytest.raises(ConfigError, match=f"^The stale model kept by client 3 under fedconcord.stale .*{reason}") as e:
        client.fit(fit_ins(2))
    assert str(e.value).endswith("or set client.stale_update=null.")
    assert "\n" not in str(e.value)
    assert str(e.value).count(";") == 1
    assert dict(client.state) == before


def test_a_damaged_model_of_one_client_leaves_the_others_of_its_group_as_they_were() -> None:
    app = make_client_app(config(client__stale_update=1.0, client__ditto_lambda=1.0))
    contexts = [Context(1, 1, {"partition-id": cid}, RecordDict(), {}) for cid in (1, 2)]
    assert app.fit_many(fit_ins(1), contexts) is not None
    contexts[1].state[stale.KEY] = ConfigRecord({})
    before = [dict(context.state) for context in contexts]
    with pytest.raises(ConfigError, match="kept by client 2"):
        app.fit_many(fit_ins(2), contexts)
    assert [dict(context.state) for context in contexts] == before


def test_a_model_that_is_not_sent_is_not_read() -> None:
    of = task(0.5)
    cid = next(cid for cid in range(10) if not stale.drawn(0.5, 0, cid, 2))
    client = TaskClient(of, cid, RecordDict({stale.KEY: ConfigRecord({})}))
    assert client.fit(fit_ins(2)).metrics["stale"] == 0
    assert kept_by(client) == fit_ins(2).parameters.tensors


def test_a_model_that_has_diverged_is_sent_as_it_is() -> None:
    of = task()
    tensors = [torch.full_like(tensor, torch.nan) for tensor in of.new_model().state_dict().values()]
    record = kept.record(of.new_model().state_dict(), tensors)
    found = TaskClient(of, 3, RecordDict({stale.KEY: record})).fit(fit_ins(2))
    assert found.parameters.tensors == [encode(tensor.numpy()) for tensor in tensors]


# ---- the option --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.5", True], ids=repr)
def test_what_is_no_probability_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^client\.stale_update must be a number from 0 to 1, not .*\.$"):
        task(value)


@pytest.mark.parametrize("value", [0, 1, 0.0, 0.25, 1.0, None], ids=repr)
def test_probabilities_are_numbers_from_0_to_1(value: Any) -> None:
    assert task(value).client.stale_update == value
