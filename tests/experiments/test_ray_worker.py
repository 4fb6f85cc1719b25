"""A worker's batches: the replies, and the failures, of each client as if it had run by itself."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.common import (
    Context,
    EvaluateIns,
    FitIns,
    Message,
    RecordDict,
    ndarrays_to_parameters,
)
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.task_identity import TaskIdentity

from client_apps import make_client_app
from client_apps.app import TaskClientApp
from client_apps.arrays import get_arrays
from client_apps.tasks import ClassificationTask
from experiments.engine import internals, wire
from experiments.engine.contents import Contents
from experiments.engine.ray_worker import ClientWorker, Job
from experiments.engine.virtual import FIRST_NODE
from tests.client_apps.configs import config


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
        assert str(one) == str(other)
        return
    assert list(one.content) == list(other.content)
    assert one.content == other.content
    assert one.metadata.message_type == other.metadata.message_type
    assert one.metadata.reply_to_message_id == other.metadata.reply_to_message_id


def single(app: ClientApp, message: Message, context: Context) -> Message | Exception:
    try:
        return app(message, context)
    except Exception as error:  # noqa: BLE001 - compared
        return RuntimeError(f"{type(error).__name__}: {error}")


def run(app: ClientApp, messages: list[Message], nodes: list[Context]) -> list[Message | Exception]:
    """Hand messages to a worker as the grid does, and put its outcomes together again."""
    worker = ClientWorker(app, 1, 10, {})
    contents = Contents()
    jobs = []
    for message, node in zip(messages, nodes, strict=True):
        internals.name(message)
        head = list(internals.head_of(message))
        head[internals.DESTINATION] = FIRST_NODE + node.node_config["partition-id"]
        records = []
        for name, record in contents.split(message):
            if isinstance(record, tuple):
                records.append(record)
            else:
                worker._contents[record.number] = [(*a[:4], a[4].tobytes()) for a in record.arrays]
                records.append((name, "r", record.number))
        jobs.append(Job(tuple(head), records, []))
    _, outcomes = worker.run(0, dict.fromkeys(worker._contents), jobs)
    assert sorted(o.number for o in outcomes) == list(range(len(messages)))
    replies: list[Message | Exception] = []
    for outcome in sorted(outcomes, key=lambda o: o.number):
        if outcome.error is not None:
            replies.append(RuntimeError(outcome.error[1]))
        else:
            replies.append(internals.message_of(outcome.head, wire.unpack(outcome.content)))
    return replies


def assert_batch_is_single(app: TaskClientApp, messages: list[Message], nodes: list[Context]) -> list[Any]:
    replies = run(app, messages, nodes)
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
    replies = run(app, [train(values) for _ in range(4)], contexts([3, 0, 9, 4]))
    assert together == ([[3, 0, 9, 4]] if vectorize else [])
    assert list(replies[0].content) == ["fitres.metrics", "fitres.num_examples", "fitres.parameters", "fitres.status"]
    assert_batch_is_single(app, [train(values) for _ in range(4)], contexts([3, 0, 9, 4]))


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
    ]
    nodes = contexts([0, 10, 2, 3, 4, 5, 6, 7, 8])
    replies = assert_batch_is_single(make_client_app(config()), messages, nodes)
    assert [isinstance(reply, Message) for reply in replies] == [i in (0, 2, 8) for i in range(9)]
    assert "ConfigError: This node's partition-id=10 is outside" in str(replies[1])
    assert "Received 3 arrays for a model of 4 tensors" in str(replies[3])


def test_a_client_that_raises_in_a_group_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ClassificationTask._work

    def work(self: ClassificationTask, cid: int, server_round: int) -> Any:
        if cid == 2:
            raise RuntimeError("client 2 lost its data")
        return original(self, cid, server_round)

    monkeypatch.setattr(ClassificationTask, "_work", work)
    replies = assert_batch_is_single(
        make_client_app(config()), [train(arrays()) for _ in range(4)], contexts([1, 2, 3, 4])
    )
    assert str(replies.pop(1)) == "RuntimeError: client 2 lost its data"
    assert all(isinstance(reply, Message) for reply in replies)


def test_mods_see_every_message(together: list[list[int]]) -> None:
    seen: list[int] = []

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(int(context.node_config["partition-id"]))
        return call_next(message, context)

    replies = run(TaskClientApp(config(), mods=[mod]), [train(arrays()), train(arrays())], contexts([1, 2]))
    assert seen == [1, 2]
    assert together == [[1], [2]]
    assert all(isinstance(reply, Message) for reply in replies)


def test_a_batch_works_after_the_journey_to_another_process() -> None:
    app = make_client_app(config())
    travelled = cloudpickle.loads(cloudpickle.dumps(app))
    message = train(arrays())
    assert_same_reply(run(travelled, [message], contexts([1]))[0], single(app, message, contexts([1])[0]))


class Asking(ClientApp):
    """An app whose second client has its own batch released while it runs."""

    worker: ClientWorker
    told: list[Any]

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_id == FIRST_NODE + 1:
            self.told.append(self.worker.release(0))
        return Message(RecordDict(), reply_to=message)


def test_a_released_batch_is_split_into_done_running_and_not_begun() -> None:
    app = Asking()
    app.told = []
    app.worker = worker = ClientWorker(app, 1, 10, {})
    jobs = [Job((1, str(i), 1, FIRST_NODE + i, "", "", 0.0, 60.0, "query", 1, None), [], []) for i in range(4)]
    _, rest = worker.run(0, {}, jobs)
    status, running, done = app.told[0]
    assert (status, running, [o.number for o in done]) == ("running", [1], [0])
    assert [o.number for o in rest] == [1]  # 2 and 3 have not begun, and do not
    assert worker.release(0) == ("finished", [], [])
    assert worker.release(1) == ("unstarted", [], [])
    assert worker.run(1, {}, jobs) == (0.0, [])


def test_a_batch_released_while_it_loads_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ClientWorker(ClientApp(), 1, 10, {})
    told: list[Any] = []
    monkeypatch.setattr(worker, "_load", lambda contents: told.append(worker.release(0)))
    jobs = [Job((1, "0", 1, FIRST_NODE, "", "", 0.0, 60.0, "query", 1, None), [], [])]
    assert worker.run(0, {}, jobs)[1] == []
    assert told == [("running", [], [])]
