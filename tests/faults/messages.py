"""Faults on the way: replies that are late, repeated, misaddressed, empty, or of another model, through messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from experiments.engine import SerialGrid
from experiments.engine.virtual import FIRST_NODE
from strategies import FedAvg, MessageStrategy

from .stage import BAD, Stage, fault

Tamper = Callable[[list[Message], list[Message]], list[Message]]
"""Makes what arrives in a round of the replies to it, and of those of the round before."""

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move the model by what this node stands for, and by the round."""
    step = (1 + int(context.node_config["partition-id"])) * int(message.content["config"]["server-round"])
    moved = {name: Array(a.numpy() + np.float32(step)) for name, a in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


def second_round(stage: Stage, tamper: Tamper) -> tuple[bytes, int]:
    """Run two rounds of three nodes, the second with what arrives changed: its model, and how many were accepted."""
    strategy = MessageStrategy(FedAvg(min_available_clients=3, min_completed=1, device="cpu"))
    grid = SerialGrid(app, 3)
    arrays = ArrayRecord({"layer.weight": Array(np.zeros((2, 3), np.float32))})
    before: list[Message] = []
    with stage.listening():
        for number in (1, 2):
            sent = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
            replies = list(grid.send_and_receive(sent))
            found, metrics = strategy.aggregate_train(number, tamper(replies, before) if number == 2 else replies)
            assert found is not None
            assert metrics is not None
            arrays, before = found, replies
    stage.lines += [f"{key}: {value}" for key, value in strategy.reports[2].items()]
    return arrays["layer.weight"].data, int(metrics["clients_accepted"])  # type: ignore[arg-type]


def of(replies: list[Message], node: int) -> Message:
    """The reply of a node, by its partition."""
    (found,) = [r for r in replies if r.metadata.src_node_id == FIRST_NODE + node]
    return found


def others(replies: list[Message]) -> list[Message]:
    """All but the bad node's."""
    return [r for r in replies if r.metadata.src_node_id != FIRST_NODE + BAD]


def untouched(stage: Stage) -> bytes:
    """The model when nothing goes wrong."""
    return second_round(Stage(stage.folder), lambda replies, _: replies)[0]


def without_it(stage: Stage) -> bytes:
    """The model of the two others."""
    return second_round(Stage(stage.folder), lambda replies, _: others(replies))[0]


def instead(change: Callable[[Message], RecordDict]) -> Tamper:
    """What arrives where the bad node's reply says something else."""

    def tamper(replies: list[Message], _: list[Message]) -> list[Message]:
        of(replies, BAD).content = change(of(replies, BAD))
        return replies

    return tamper


@fault("a node gives no reply in time")
def silent(stage: Stage) -> str:
    _, accepted = second_round(stage, lambda replies, _: others(replies))
    assert accepted == 2
    return stage.log


@fault("a straggler's reply to the round before arrives")
def late(stage: Stage) -> str:
    model, accepted = second_round(stage, lambda replies, before: [*replies, of(before, BAD)])
    assert (model, accepted) == (untouched(stage), 3)
    return stage.log


@fault("an old reply is replayed instead of a new one")
def replayed(stage: Stage) -> str:
    model, accepted = second_round(stage, lambda replies, before: [*others(replies), of(before, BAD)])
    assert (model, accepted) == (without_it(stage), 2)
    return stage.log


@fault("a reply arrives twice")
def twice(stage: Stage) -> str:
    model, accepted = second_round(stage, lambda replies, _: [*replies, of(replies, BAD)])
    assert (model, accepted) == (untouched(stage), 3)
    return stage.log


@fault("a reply without any record")
def no_records(stage: Stage) -> str:
    model, accepted = second_round(stage, instead(lambda _: RecordDict()))
    assert (model, accepted) == (without_it(stage), 2)
    return stage.log


@fault("a reply with other tensor names")
def other_names(stage: Stage) -> str:
    def rename(reply: Message) -> RecordDict:
        arrays = ArrayRecord({"layer.bias": reply.content["arrays"]["layer.weight"]})  # type: ignore[index]
        return RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]})

    model, accepted = second_round(stage, instead(rename))
    assert (model, accepted) == (without_it(stage), 2)
    return stage.log


@fault("a reply of shape (1,) where (2, 3) was sent")
def broadcast(stage: Stage) -> str:
    def shrink(reply: Message) -> RecordDict:
        arrays = ArrayRecord({"layer.weight": Array(np.ones(1, np.float32))})
        return RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]})

    model, accepted = second_round(stage, instead(shrink))
    assert (model, accepted) == (without_it(stage), 2)
    return stage.log


@fault("one reply has more metrics than the others")
def one_more_metric(stage: Stage) -> str:
    def add(reply: Message) -> RecordDict:
        more = MetricRecord({**reply.content["metrics"], "battery": 0.4, "curve": [1.0, 2.0]})  # type: ignore[dict-item]
        return RecordDict({"arrays": reply.content["arrays"], "metrics": more})

    model, accepted = second_round(stage, instead(add))
    assert (model, accepted) == (untouched(stage), 3)
    return stage.log
