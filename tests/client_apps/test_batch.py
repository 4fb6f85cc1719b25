"""Many clients' messages in one call: the replies, and the failures, of each client by itself."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    Context,
    EvaluateIns,
    FitIns,
    GetParametersIns,
    Message,
    RecordDict,
    ndarrays_to_parameters,
)
from flwr.compat.common import recorddict_compat as compat
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


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The clients of every call that trains some at once."""
    calls: list[list[int]] = []
    original = ClassificationTask.train_many

    def train_many(self: ClassificationTask, state: Any, cids: Any, *rest: Any) -> Any:
        calls.append(list(cids))
        return original(self, state, cids, *rest)

    monkeypatch.setattr(ClassificationTask, "train_many", train_many)
    return calls


def arrays(shift: float = 0.0) -> list[np.ndarray]:
    return [array + np.float32(shift) for array in get_arrays(ClassificationTask(config()).new_model())]


def train(values: list[np.ndarray], **settings: Any) -> Message:
    ins = FitIns(ndarrays_to_parameters(values), {"server_round": 1} | settings)
    return Message(compat.fitins_to_recorddict(ins, keep_input=True), dst_node_id=1, message_type="train")


def evaluate(values: list[np.ndarray]) -> Message:
    ins = EvaluateIns(ndarrays_to_parameters(values), {})
    return Message(compat.evaluateins_to_recorddict(ins, keep_input=True), dst_node_id=1, message_type="evaluate")


def contexts(cids: list[Any], **node: Any) -> list[Context]:
    return [
        Context(run_id=1, node_id=1, node_config={"partition-id": cid} | node, state=RecordDict(), run_config={})
        for cid in cids
    ]


def assert_same_reply(one: Message | Exception, other: Message | Exception) -> None:
    if isinstance(one, Exception) or isinstance(other, Exception):
        assert (type(one), str(one)) == (type(other), str(other))
        return
    assert list(one.content) == list(other.content)
    assert one.content == other.content
    assert one.metadata.message_type == other.metadata.message_type
    assert one.metadata.reply_to_message_id == other.metadata.reply_to_message_id


def single(app: ClientApp, message: Message, context: Context) -> Message | Exception:
    try:
        return app(message, context)
    except Exception as error:  # noqa: BLE001 - compared
        return error


def assert_batch_is_single(app: TaskClientApp, messages: list[Message], nodes: list[Context]) -> list[Any]:
    replies = app.batch(messages, nodes)
    assert len(replies) == len(messages)
    for reply, message, node in zip(replies, messages, nodes, strict=True):
        assert_same_reply(reply, single(app, message, node))
    return replies


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("changes", [{}, {"client__momentum": 0.9, "client__local_epochs": 2}], ids=str)
def test_a_batch_answers_as_each_client_does(
    vectorize: Any, changes: dict[str, Any], together: list[list[int]]
) -> None:
    app = make_client_app(config(client__vectorize=vectorize, **changes))
    values = arrays()
    replies = app.batch([train(values) for _ in range(4)], contexts([3, 0, 9, 4]))
    assert together == ([[3, 0, 9, 4]] if vectorize else [])
    assert list(replies[0].content) == ["fitres.metrics", "fitres.num_examples", "fitres.parameters", "fitres.status"]
    assert_batch_is_single(app, [train(values) for _ in range(4)], contexts([3, 0, 9, 4]))


def test_one_set_of_bytes_is_shared_by_its_messages(together: list[list[int]]) -> None:
    message = train(arrays())
    assert_batch_is_single(make_client_app(config()), [message, message], contexts([1, 2]))
    assert together[0] == [1, 2]


def test_mixed_messages_are_told_apart(together: list[list[int]]) -> None:
    one, other = arrays(), arrays(0.125)
    messages = [train(one), evaluate(one), train(other), train(one), train(one, server_round=2), train(other)]
    assert_batch_is_single(make_client_app(config()), messages, contexts([0, 1, 2, 3, 4, 5]))
    assert together[:3] == [[0, 3], [2, 5], [4]]


def test_wrong_clients_and_messages_fail_alone(together: list[list[int]]) -> None:
    values = arrays()
    wrong_type = Message(RecordDict(), dst_node_id=1, message_type="query")
    messages = [
        train(values),
        train(values),  # of a client that does not exist
        train(values),
        train(values[:3]),
        train(values, server_round=True),  # equal to 1, and no round
        train(values, server_round=0),
        Message(RecordDict(), dst_node_id=1, message_type="train"),
        wrong_type,
        train(values),
        train(values),  # of a node without a number
    ]
    nodes = contexts([0, 10, 2, 3, 4, 5, 6, 7, 8, None])
    replies = assert_batch_is_single(make_client_app(config()), messages, nodes)
    assert [isinstance(reply, Message) for reply in replies] == [i in (0, 2, 8) for i in range(10)]
    assert [0, 2, 8] in together
    assert isinstance(replies[1], ConfigError)
    assert "Received 3 arrays for a model of 4 tensors" in str(replies[3])


def test_a_client_that_raises_in_a_group_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ClassificationTask._work

    def work(self: ClassificationTask, cid: int, server_round: int) -> Any:
        if cid == 2:
            raise RuntimeError("client 2 lost its data")
        return original(self, cid, server_round)

    monkeypatch.setattr(ClassificationTask, "_work", work)
    replies = assert_batch_is_single(make_client_app(config()), [train(arrays())] * 4, contexts([1, 2, 3, 4]))
    assert str(replies.pop(1)) == "client 2 lost its data"
    assert all(isinstance(reply, Message) for reply in replies)


def test_nodes_with_data_of_their_own_are_other_tasks(together: list[list[int]], tmp_path: Any) -> None:
    nodes = [*contexts([1, 2]), *contexts([3], **{"data-dir": str(tmp_path)})]
    assert_batch_is_single(make_client_app(config()), [train(arrays())] * 3, nodes)
    assert together[:2] == [[1, 2], [3]]


def test_a_batch_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(app_module, "_single_thread", lambda: calls.append(True))
    make_client_app(config()).batch([train(arrays())], contexts([1]))
    assert calls


def test_no_messages_no_replies() -> None:
    assert make_client_app(config()).batch([], []) == []


def test_mods_see_every_message(together: list[list[int]]) -> None:
    seen: list[int] = []

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(int(context.node_config["partition-id"]))
        return call_next(message, context)

    replies = TaskClientApp(config(), mods=[mod]).batch([train(arrays())] * 2, contexts([1, 2]))
    assert seen == [1, 2]
    assert together == [[1], [2]]
    assert all(isinstance(reply, Message) for reply in replies)


def test_a_batch_works_after_the_journey_to_another_process() -> None:
    app = make_client_app(config())
    travelled = cloudpickle.loads(cloudpickle.dumps(app))
    message = train(arrays())
    for one, other in zip(travelled.batch([message], contexts([1])), app.batch([message], contexts([1])), strict=True):
        assert_same_reply(one, other)


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
