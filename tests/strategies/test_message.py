"""MessageStrategy: the same bits as through Flower's older interface, and what clients' messages can hold."""

import io
import json
import logging
import math
from types import SimpleNamespace

import flwr.server.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.serverapp import ServerApp
from hypothesis import given, settings
from hypothesis import strategies as st

from client_apps import make_client_app
from client_apps.tasks import build
from experiments.engine import SerialGrid, serve_on
from experiments.engine.ray_grid import RayGrid
from experiments.engine.virtual import FIRST_NODE
from strategies import (
    AFL,
    CLAIR,
    CRAFT,
    FedAvg,
    FedProx,
    LayerMap,
    MessageStrategy,
    NotEnoughClients,
    QFedAvg,
    RoundsFailed,
    partition_order,
)
from strategies.replies import RESERVED
from strategies.testing import Proxy

from ..client_apps.configs import config as digits
from . import quickstart
from .helpers import ALL, arrays_of, every_strategy, model

NAMES = ("conv.weight", "conv.bias", "scale", "norm.num_batches_tracked")
CLIENTS = 10
SAMPLED = {"fraction_fit": 0.5, "min_fit_clients": 1, "min_available_clients": CLIENTS, "seed": 3, "device": "cpu"}


def record(arrays=None, names=NAMES) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in zip(names, arrays or model(), strict=True)})


def local(arrays, partition, number):
    """A client's training: deterministic in the model it gets, its partition and the round."""
    rng = np.random.default_rng([partition, number])
    trained = [
        (a + 0.1 * rng.normal(size=a.shape) - 0.05 * a).astype(a.dtype) if a.dtype.kind == "f" else np.asarray(a + 1)
        for a in arrays
    ]
    metrics = {
        "train_loss": float(rng.uniform(0.1, 2)),
        "initial_loss": float(rng.uniform(0.1, 2)),
        "local_steps": 2 + partition % 3,
        "step_weight": 2.0 + partition % 3,
    }
    return trained, 10 + partition, metrics


app = ClientApp()
received: dict[tuple[int, int], RecordDict] = {}


@app.train()
def train(message, context):
    config, partition = message.content["config"], context.node_config["partition-id"]
    received[config["server-round"], context.node_id] = message.content
    arrays = message.content["arrays"]
    trained, n, metrics = local(arrays.to_numpy_ndarrays(), partition, config["server-round"])
    content = {"arrays": record(trained, tuple(arrays)), "metrics": MetricRecord({"num-examples": n, **metrics})}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    first = message.content["arrays"].to_numpy_ndarrays()[0]
    metrics = {"num-examples": 1 + context.node_config["partition-id"], "eval-loss": float(np.abs(first).sum())}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def by_hand(strategy, rounds, start=None):
    """The models after each round through Flower's older interface, and what clients were sent."""
    manager = SimpleClientManager()
    for i in range(CLIENTS):
        manager.register(Proxy(str(FIRST_NODE + i)))
    parameters = ndarrays_to_parameters(start or model())
    models, sent = [], []
    for number in range(1, rounds + 1):
        instructions = strategy.configure_fit(number, parameters, manager)
        results = []
        for client, ins in instructions:
            trained, n, metrics = local(arrays_of(ins.parameters), int(client.cid) - FIRST_NODE, number)
            results.append((client, FitRes(Status(Code.OK, ""), ndarrays_to_parameters(trained), n, metrics)))
        sent.append({int(client.cid): ins.parameters.tensors for client, ins in instructions})
        parameters, _ = strategy.aggregate_fit(number, results, [])
        models.append(parameters.tensors)
    return models, sent


def by_messages(strategy, rounds, start=None, **options):
    """The same through messages, and the strategy that ran."""
    wrapped = MessageStrategy(strategy, **options)
    grid, arrays, models = SerialGrid(app, CLIENTS), record(start), []
    received.clear()
    for number in range(1, rounds + 1):
        replies = grid.send_and_receive(wrapped.configure_train(number, arrays, ConfigRecord(), grid))
        arrays, _ = wrapped.aggregate_train(number, replies)
        assert tuple(arrays) == NAMES
        models.append([a.data for a in arrays.values()])
    return models, wrapped


# ---- both faces ------------------------------------------------------------------------------------------------------


@every_strategy
def test_the_same_seed_gives_the_same_bits(make):
    expected, _ = by_hand(make(**SAMPLED), 3)
    found, _ = by_messages(make(**SAMPLED), 3)
    assert found == expected
    assert len({tuple(m) for m in found}) == 3


@pytest.mark.parametrize("method", ["craft", "fedref", "clair", "fedadam"])
def test_the_same_bits_with_layers(method):
    layers = LayerMap.from_names(NAMES, [a.shape for a in model()])
    expected, _ = by_hand(ALL[method](layers=layers, **SAMPLED), 2)
    found, _ = by_messages(ALL[method](layers=layers, **SAMPLED), 2)
    assert found == expected


def test_the_whole_run_of_flower_on_both_faces():
    options = {**SAMPLED, "fraction_evaluate": 0.5, "min_evaluate_clients": 1}
    seen = []

    def shown(number, arrays, config):
        seen.append([a.tobytes() for a in arrays])
        return float(number), {}

    legacy_app = ClientApp(client_fn=_legacy)
    start = ndarrays_to_parameters(model())
    strategy = CRAFT(initial_parameters=start, evaluate_fn=shown, **options)
    components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))
    serve_on(SerialGrid(legacy_app, CLIENTS), ServerApp(server_fn=lambda _: components))
    wrapped = MessageStrategy(CRAFT(**options))
    measured = []

    def evaluate_fn(number, arrays):
        measured.append([a.tobytes() for a in arrays.to_numpy_ndarrays()])
        return MetricRecord({"loss": float(number)})

    result = wrapped.start(SerialGrid(app, CLIENTS), record(), 3, evaluate_fn=evaluate_fn)
    assert measured == seen
    assert len(seen) == 4
    assert [a.tobytes() for a in result.arrays.to_numpy_ndarrays()] == seen[-1]
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert list(result.train_metrics_clientapp) == list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert wrapped.result is result


def _legacy(context: Context):
    class Local(NumPyClient):
        def fit(self, parameters, config):
            return local(parameters, context.node_config["partition-id"], config["server_round"])

        def evaluate(self, parameters, config):
            return float(np.abs(parameters[0]).sum()), 1 + context.node_config["partition-id"], {}

    return Local().to_client()


def test_names_come_from_the_record_and_layers_stay_as_they_were():
    strategy = CRAFT(**SAMPLED)
    by_messages(strategy, 1)
    assert strategy.layers.names == NAMES
    assert [layer.name for layer in strategy.layers.layers] == list(NAMES[:3])
    assert {key.partition("/")[2] for key in strategy.memory} == set(NAMES[:3])


def test_a_record_of_another_model_is_refused():
    layers = LayerMap.from_names(NAMES, [a.shape for a in model()])
    wrapped, grid = MessageStrategy(CRAFT(layers=layers)), SerialGrid(app, CLIENTS)
    for names, words in [
        (("conv.weight", "conv.b", *NAMES[2:]), "key 2 of .* is 'conv.b', and the strategy's layers have 'conv.bias'"),
        ((NAMES[1], NAMES[0], *NAMES[2:]), "key 1 of .* is 'conv.bias'"),
    ]:
        with pytest.raises(ValueError, match=words):
            wrapped.configure_train(1, record(names=names), ConfigRecord(), grid)
    with pytest.raises(ValueError, match=r"key 4 of .* is nothing"):
        wrapped.configure_train(1, record(model()[:3], NAMES[:3]), ConfigRecord(), grid)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (ArrayRecord(), "empty"),
        (ArrayRecord({"w": Array("float32", (2,), "pickle", b"..")}), "'w' .* serialized as 'pickle'"),
        (ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"..")}), "tensor 'w' .* cannot be read"),
        (ArrayRecord({"w": Array(np.array([1, math.nan]))}), "NaN or Inf in tensor 'w'"),
        ({"w": np.zeros(2)}, "must be an ArrayRecord"),
    ],
)
def test_an_initial_model_that_cannot_be_used(arrays, words):
    wrapped = MessageStrategy(FedAvg(min_available_clients=1, min_fit_clients=1, fraction_evaluate=0.0))
    with pytest.raises(ValueError, match=words):
        wrapped.start(SerialGrid(app, CLIENTS), arrays)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": object()}, "strategy=.* must be a flwr.server.strategy.Strategy"),
        ({"weighted_by_key": ""}, "weighted_by_key=''"),
        ({"configrecord_key": "arrays"}, "configrecord_key='arrays' must be another name"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        MessageStrategy(**{"strategy": FedAvg(), **options})


def test_a_strategy_of_flower_runs_too():
    plain = flower.FedAvg(fraction_fit=1.0, fraction_evaluate=1.0, min_available_clients=CLIENTS, inplace=False)
    result = MessageStrategy(plain).start(SerialGrid(app, CLIENTS), record(), 1)
    trained = [local(model(), i, 1) for i in range(CLIENTS)]
    total = sum(n for _, n, _ in trained)
    expected = sum(n / total * arrays[0] for arrays, n, _ in trained)
    np.testing.assert_allclose(result.arrays["conv.weight"].numpy(), expected, rtol=1e-6)
    mean = sum(n * metrics["train_loss"] for _, n, metrics in trained) / total
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(mean)
    assert plain.fit_metrics_aggregation_fn is None


# ---- what clients are sent -------------------------------------------------------------------------------------------


def test_clients_of_clair_receive_their_own_matrices():
    options = {**SAMPLED, "fraction_fit": 1.0}
    start = [np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32), *model()[1:]]
    _, sent = by_hand(CLAIR(rank=2, noise=0.2, **options), 2, start)
    by_messages(CLAIR(rank=2, noise=0.2, **options), 2, start)
    for number, theirs in enumerate(sent, start=1):
        for node, tensors in theirs.items():
            assert [a.data for a in received[number, node]["arrays"].values()] == tensors
    assert len({tensors[0] for tensors in sent[1].values()}) > 2


def test_clients_that_get_the_same_share_one_record():
    wrapped, grid = MessageStrategy(FedAvg(**SAMPLED)), SerialGrid(app, CLIENTS)
    messages = wrapped.configure_train(1, record(), ConfigRecord(), grid)
    assert len({id(message.content["arrays"]) for message in messages}) == 1
    assert len({id(message.content["arrays"]["scale"].data) for message in messages}) == 1
    assert [m.metadata.group_id for m in messages] == ["1"] * 5


def test_the_config_has_both_spellings_and_the_strategy_wins():
    class Asking(FedProx, QFedAvg):
        requires = ("initial_loss",)

    given = ConfigRecord({"lr": 0.1, "proximal-mu": 9.0, "server_round": 70})
    strategy = Asking(proximal_mu=0.5, on_fit_config_fn=lambda n: {"local_epochs": n, "rate": np.float64(2)}, **SAMPLED)
    wrapped, grid = MessageStrategy(strategy), SerialGrid(app, CLIENTS)
    message = wrapped.configure_train(4, record(), given, grid)[0]
    assert dict(message.content["config"]) == {
        "lr": 0.1, "rate": 2.0,
        "server_round": 4, "server-round": 4,
        "proximal_mu": 0.5, "proximal-mu": 0.5,
        "initial_loss": True, "initial-loss": True,
        "local_epochs": 4, "local-epochs": 4,
    }  # fmt: skip
    assert dict(given) == {"lr": 0.1, "proximal-mu": 9.0, "server_round": 70}


def test_a_config_that_no_record_holds_is_named():
    strategy = FedAvg(on_fit_config_fn=lambda n: {"schedule": {"a": 1}}, **SAMPLED)
    with pytest.raises(ValueError, match=r"schedule=.* no ConfigRecord holds"):
        MessageStrategy(strategy).configure_train(1, record(), ConfigRecord(), SerialGrid(app, CLIENTS))


def test_messages_live_as_long_as_the_round():
    times = []

    class Noting(SerialGrid):
        def send_and_receive(self, messages, *, timeout=None):
            times.extend((message.metadata.ttl, timeout) for message in messages)
            return super().send_and_receive(messages, timeout=timeout)

    MessageStrategy(FedAvg(**SAMPLED)).start(Noting(app, CLIENTS), record(), 1, timeout=77.0)
    assert set(times) == {(77.0, 77.0)}


def test_nodes_that_join_are_waited_for_and_missing_ones_named(monkeypatch):
    monkeypatch.setattr("strategies.sampling._POLL_SECONDS", 0.001)
    grid = SerialGrid(app, CLIENTS)
    counts = iter([2, 2, 5, 9])
    monkeypatch.setattr(grid, "get_node_ids", lambda: list(range(FIRST_NODE, FIRST_NODE + next(counts, CLIENTS))))
    wrapped = MessageStrategy(FedAvg(**SAMPLED))
    assert len(wrapped.configure_train(1, record(), ConfigRecord(), grid)) == 5
    few = MessageStrategy(FedAvg(wait_timeout=0.01, **{**SAMPLED, "min_available_clients": 11}))
    with pytest.raises(NotEnoughClients, match="needs 11 connected clients but only 10"):
        few.start(grid, record())


# ---- what clients reply ----------------------------------------------------------------------------------------------


def npy(array, **how):
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


def of_bytes(data, shape=(3,)):
    return Array("float32", shape, "numpy.ndarray", data)


def without(content, name):
    del content["arrays"][name]


def having(content, name, array):
    content["arrays"][name] = array


def reporting(content, **metrics):
    for key, value in metrics.items():
        content["metrics"].__dict__["_data"][key.replace("_", "-")] = value


ODD = {
    "wrong shape": (lambda c: having(c, "conv.bias", Array(np.zeros(1, np.float32))), "'conv.bias' has shape (1,)"),
    "missing tensor": (lambda c: without(c, "scale"), "lacks 'scale'"),
    "extra tensor": (lambda c: having(c, "more", Array(np.zeros(1))), "has besides 'more'"),
    "renamed": (lambda c: (without(c, "scale"), having(c, "s", Array(np.zeros(())))), "lacks 'scale' and has besides"),
    "no array": (lambda c: having(c, "conv.bias", of_bytes(b"junk")), "tensor 'conv.bias': not a .npy array"),
    "objects": (
        lambda c: having(c, "conv.bias", of_bytes(npy(np.array([{}, 1, 2], dtype=object), allow_pickle=True))),
        "tensor 'conv.bias': dtype",
    ),
    "NaN": (lambda c: having(c, "conv.bias", Array(np.full(3, math.nan, np.float32))), "'conv.bias' holds NaN"),
    "torch bytes": (
        lambda c: having(c, "conv.bias", Array("float32", (3,), "torch.tensor", b"PK")),
        "'conv.bias' is serialized as 'torch.tensor'",
    ),
    "empty message": (lambda c: [c.pop(key) for key in list(c)], "message is empty"),
    "no arrays": (lambda c: c.pop("arrays"), "holds no ArrayRecord"),
    "arrays are metrics": (lambda c: c.update(arrays=c.pop("metrics")), "holds no ArrayRecord"),
    "no metrics": (lambda c: c.pop("metrics"), "hold no 'num-examples'"),
    "two records": (
        lambda c: c.update(a=c["arrays"], b=c.pop("arrays")),
        "holds 2 ArrayRecords, and none is called 'arrays'",
    ),
    "examples as a list": (lambda c: reporting(c, num_examples=[1, 2]), "'num-examples' is a list"),
    "examples negative": (lambda c: reporting(c, num_examples=-5), "num_examples is -5"),
    "examples zero": (lambda c: reporting(c, num_examples=0), "num_examples is 0"),
    "examples huge": (lambda c: reporting(c, num_examples=2**70), "num_examples is beyond 64 bits"),
    "examples NaN": (lambda c: reporting(c, num_examples=math.nan), "num_examples is nan"),
    "examples a text": (
        lambda c: (c["metrics"].pop("num-examples"), c.update(config=ConfigRecord({"num-examples": "12"}))),
        "hold no 'num-examples'",
    ),
}


def play(odd=lambda replies, messages: None, strategy=None, number=1, **options):
    """One round in which `odd` changes the replies, a list in the order of the messages."""
    strategy = strategy or CRAFT(fraction_fit=1.0, min_available_clients=4, min_fit_clients=4, device="cpu", **options)
    wrapped = MessageStrategy(strategy) if not isinstance(strategy, MessageStrategy) else strategy
    grid = SerialGrid(app, 4)
    messages = wrapped.configure_train(number, record(), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(messages))
    changed = odd(replies, messages)
    arrays, metrics = wrapped.aggregate_train(number, replies if changed is None else changed)
    return SimpleNamespace(
        arrays=arrays, metrics=metrics, report=wrapped.reports[number], strategy=wrapped, bits=[*_bits(arrays)]
    )


def _bits(arrays):
    return (a.data for a in arrays.values())


@pytest.fixture(scope="module")
def three():
    """The round without node 1001: what has to come out of one whose reply cannot be used."""
    return play(lambda replies, _: replies.pop(1) and None).bits


@pytest.mark.parametrize(("change", "words"), ODD.values(), ids=ODD)
def test_a_reply_that_cannot_be_used_costs_that_client_alone(change, words, three, caplog):
    found = play(lambda replies, _: change(replies[1].content) and None)
    assert found.bits == three
    assert found.metrics["clients_accepted"] == 3
    assert found.metrics["clients_rejected"] + found.metrics["clients_failed"] == 1
    reasons = json.loads(found.report.get("rejection_reasons") or found.report["failure_reasons"])
    assert len(reasons) == 1
    assert words in reasons[0]
    assert "client 1001" in reasons[0]
    assert words in caplog.text


def test_the_order_of_names_and_of_replies_does_not_matter():
    def shuffle(replies, messages):
        content = replies[2].content
        content["arrays"] = ArrayRecord({name: content["arrays"][name] for name in reversed(NAMES)})
        content["update"] = content.pop("arrays")  # the only one may have any name
        replies.reverse()

    assert play(shuffle).bits == play().bits


@pytest.mark.parametrize("examples", [("num_examples", 11), ("num-examples", 11.0)])
def test_examples_in_either_spelling_and_as_a_whole_float(examples):
    def change(replies, messages):
        data = replies[1].content["metrics"].__dict__["_data"]
        assert data.pop("num-examples") == 11
        data[examples[0]] = examples[1]

    assert play(change).bits == play().bits


def test_metrics_need_not_be_the_same_everywhere():
    def change(replies, messages):
        reporting(replies[0].content, accuracy=0.5)
        reporting(replies[1].content, accuracy=0.8, per_class=[1, 2], odd=math.inf)
        replies[2].content["more"] = MetricRecord({"gpu": 1, "accuracy": math.nan})
        replies[3].content["notes"] = ConfigRecord({"host": "a", "flag": True, "list": ["x"], "raw": b"..", "n": 3})

    found = play(change)
    assert found.metrics["clients_accepted"] == 4
    assert found.metrics["accuracy"] == pytest.approx((10 * 0.5 + 11 * 0.8) / 21)
    assert found.metrics["gpu"] == 1
    assert not {"per-class", "odd", "flag", "n", "num-examples"} & set(found.metrics)
    assert found.bits == play().bits


def test_means_are_over_accepted_clients_and_below_the_strategy_s_own():
    def change(replies, messages):
        for i, reply in enumerate(replies):
            reporting(reply.content, mine=float(i), clients_sampled=99.0)
            reply.content["metrics"]["clients_sampled"] = 99.0
        having(replies[3].content, "conv.bias", Array(np.zeros(1, np.float32)))

    found = play(change)
    assert found.metrics["mine"] == pytest.approx((0 * 10 + 1 * 11 + 2 * 12) / 33)
    assert found.metrics["clients_sampled"] == 4
    assert found.metrics["train_loss"] == pytest.approx(found.report["train_loss"])
    assert found.metrics["local_steps"] == pytest.approx((2 * 10 + 3 * 11 + 4 * 12) / 33)


def test_a_flood_of_metrics_does_not_reach_the_record(caplog):
    def change(replies, messages):
        reporting(replies[0].content, **{f"m{i}": float(i) for i in range(5000)})

    found = play(change)
    assert len(found.metrics) < 300
    assert "local_steps" in found.metrics
    assert "clients report 500" in caplog.text


def test_a_strategy_finds_what_it_requires_in_either_spelling():
    def hyphens(replies, messages):
        for reply in replies:
            data = reply.content["metrics"].__dict__["_data"]
            for key in [k for k in data if "_" in k]:
                data[key.replace("_", "-")] = data.pop(key)

    def made():
        return QFedAvg(fraction_fit=1.0, min_available_clients=4, min_fit_clients=4, device="cpu")

    found = play(hyphens, made())
    assert found.metrics["clients_accepted"] == 4
    assert found.bits == play(strategy=made()).bits
    lacking = play(lambda replies, _: replies[0].content["metrics"].pop("initial_loss") and None, made())
    assert "initial_loss=None" in json.loads(lacking.report["rejection_reasons"])[0]


def test_aggregation_functions_of_the_user_are_called_and_left_in_place():
    called = []

    def mine(pairs):
        called.append(pairs)
        return {"train_loss_max": max(m["train_loss"] for _, m in pairs), "words": "three"}

    strategy = CRAFT(
        fraction_fit=1.0, min_available_clients=4, min_fit_clients=4, device="cpu", fit_metrics_aggregation_fn=mine
    )
    found = play(lambda replies, _: replies.pop(1) and None, strategy)
    assert [n for n, _ in called[0]] == [10, 12, 13]
    assert found.metrics["train_loss_max"] == max(m["train_loss"] for _, m in called[0])
    assert found.report["words"] == "three"
    assert "words" not in found.metrics
    assert strategy.fit_metrics_aggregation_fn is mine


# ---- who replies -----------------------------------------------------------------------------------------------------


def test_errors_and_silence_count_as_failures_with_their_reasons(three):
    def error(replies, messages):
        replies[1] = Message(Error(3, "lost its data"), reply_to=messages[1])

    def unreachable(replies, messages):  # the SuperLink answers for the node
        error(replies, messages)
        replies[1].metadata.__dict__.update(_src_node_id=1, _dst_node_id=1)

    for odd, reason in [
        (error, "client 1001: lost its data"),
        (unreachable, "client 1001: lost its data"),
        (lambda replies, _: replies.pop(1) and None, "client 1001: no reply within the timeout"),
    ]:
        found = play(odd)
        assert found.bits == three
        assert (found.metrics["clients_accepted"], found.metrics["clients_failed"]) == (3, 1)
        assert json.loads(found.report["failure_reasons"]) == [f"NoResult: {reason}"]


def late(replies, messages):
    grid = SerialGrid(app, 4)
    other = MessageStrategy(FedAvg(fraction_fit=1.0, min_available_clients=4, min_fit_clients=4))
    replies.extend(grid.send_and_receive(other.configure_train(9, record(), ConfigRecord(), grid)))


def another(replies, messages):
    """Another answer to the first message."""
    again = Message(RecordDict(dict(replies[0].content)), reply_to=messages[0])
    again.content["arrays"] = record([a * 5 for a in replies[0].content["arrays"].to_numpy_ndarrays()])
    return again


def duplicate(replies, messages):
    replies.append(another(replies, messages))


def unasked(replies, messages):
    replies.insert(0, another(replies, messages))
    replies[0].metadata.__dict__["_src_node_id"] = 4711


def unasked_without_id(replies, messages):
    unasked(replies, messages)
    replies[0].metadata.__dict__["_reply_to_message_id"] = ""


@pytest.mark.parametrize("odd", [late, duplicate, unasked, unasked_without_id])
def test_replies_nobody_asked_for_are_ignored_and_logged(odd, caplog):
    found = play(odd)
    assert found.bits == play().bits
    assert (found.metrics["clients_accepted"], found.metrics["clients_failed"]) == (4, 0)
    assert found.metrics["clients_rejected"] == 0
    assert "round 1: ignored a reply of node" in caplog.text


def test_a_grid_without_message_ids_is_told_by_its_nodes():
    def nameless(replies, messages):
        for message in (*messages, *replies):
            message.metadata.__dict__.update(_message_id="", _reply_to_message_id="")

    assert play(nameless).bits == play().bits


def test_a_failed_round_leaves_the_model_and_says_why():
    before = [*_bits(record())]
    found = play(lambda replies, _: [])
    assert found.bits == before
    assert found.metrics["failed_round"] == 1
    assert found.report["failed_round"] is True
    assert "0 usable results of 4" in found.report["failed_reason"]
    assert all(isinstance(value, int | float) for value in found.metrics.values())


def test_too_many_failed_rounds_end_the_run_and_nothing_is_lost(caplog):
    silent = ClientApp()

    @silent.train()
    def train(message, context):
        raise RuntimeError(f"no data on node {context.node_id}")

    strategy = CRAFT(fraction_fit=1.0, min_available_clients=3, min_fit_clients=3, max_failed_rounds=2, device="cpu")
    wrapped = MessageStrategy(strategy)
    with pytest.raises(RoundsFailed, match=r"2 rounds in a row failed.*no data on node 1000"):
        wrapped.start(SerialGrid(silent, 3), record(), 5, evaluate_fn=lambda n, _: MetricRecord({"n": n}))
    assert list(wrapped.result.train_metrics_clientapp) == [1]
    assert wrapped.result.train_metrics_clientapp[1]["failed_round"] == 1
    assert [*_bits(wrapped.result.arrays)] == [*_bits(record())]
    assert list(wrapped.result.evaluate_metrics_serverapp) == [0, 1]
    assert sorted(wrapped.reports) == [1, 2]
    assert "no data on node 1002" in wrapped.reports[2]["failure_reasons"]


def test_reports_are_kept_of_the_last_rounds_only(monkeypatch):
    monkeypatch.setattr("strategies.message._REPORTS", 3)
    _, wrapped = by_messages(FedAvg(**SAMPLED), 5)
    assert list(wrapped.reports) == [3, 4, 5]


def test_a_round_without_clients_changes_nothing():
    strategy = FedAvg(fraction_fit=0.0, min_fit_clients=0, min_available_clients=0)
    wrapped, grid = MessageStrategy(strategy), SerialGrid(app, CLIENTS)
    assert wrapped.configure_train(1, record(), ConfigRecord(), grid) == []
    arrays, metrics = wrapped.aggregate_train(1, [])
    assert arrays == record()
    assert metrics is None
    with pytest.raises(ValueError, match="call configure_train before"):
        wrapped.aggregate_train(1, [])


def second_answers(change):
    """A round of three clients, the second of which changes what it answers: the model, metrics and the report."""
    wrapped, grid = MessageStrategy(FedAvg(min_available_clients=3, device="cpu")), SerialGrid(app, 3)
    replies = list(grid.send_and_receive(wrapped.configure_train(1, record(), ConfigRecord(), grid)))
    replies[1].content = change(replies[1].content)
    arrays, metrics = wrapped.aggregate_train(1, replies)
    return arrays, dict(metrics), wrapped.reports[1]


ODD_VALUES = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.lists(st.floats(), max_size=3),
    st.text(max_size=20), st.binary(max_size=20), st.none(),
)  # fmt: skip
ODD_NAMES = st.one_of(
    st.sampled_from(["num-examples", "num_examples", "loss", "train_loss", *NAMES]), st.text(max_size=9)
)
ODD_ARRAYS = st.builds(
    lambda data, stype, shape: _made(Array, dtype="float32", shape=shape, stype=stype, data=data),
    st.one_of(st.binary(max_size=200), st.sampled_from([a.data for a in record().values()])),
    st.sampled_from(["numpy.ndarray", "pickle", ""]),
    st.sampled_from([(), (4, 3), (2**40,)]),
)


def _made(cls, **fields):
    """A record as a client can send it: without the checks of a constructor."""
    found = cls.__new__(cls) if cls is Array else cls()
    found.__dict__.update(fields) if cls is Array else found.__dict__["_data"].update(fields)
    return found


ODD_RECORDS = st.one_of(
    st.dictionaries(ODD_NAMES, ODD_VALUES, max_size=5).map(lambda d: _made(MetricRecord, **d)),
    st.dictionaries(ODD_NAMES, ODD_VALUES, max_size=5).map(lambda d: _made(ConfigRecord, **d)),
    st.dictionaries(ODD_NAMES, ODD_ARRAYS, max_size=5).map(lambda d: _made(ArrayRecord, **d)),
)
ODD_CONTENTS = st.dictionaries(st.text(max_size=5), ODD_RECORDS, max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(content=ODD_CONTENTS, keep=st.lists(st.sampled_from(["arrays", "metrics"]), unique=True), answers=st.booleans())
def test_whatever_one_client_replies_costs_that_client_alone(content, keep, answers):
    for kind in ("train", "evaluate"):
        strategy = FedAvg(min_available_clients=3, fraction_evaluate=1.0, max_failed_rounds=1, device="cpu")
        wrapped, grid = MessageStrategy(strategy), SerialGrid(app, 3)
        configure = wrapped.configure_train if kind == "train" else wrapped.configure_evaluate
        replies = list(grid.send_and_receive(configure(1, record(), ConfigRecord(), grid)))
        honest = {name: r for name, r in replies[1].content.items() if name in keep}
        replies[1].content = _made(RecordDict, **honest, **{k: v for k, v in content.items() if k not in honest})
        if not answers:
            replies[1].metadata.__dict__["_reply_to_message_id"] = "of another round"
        if kind == "evaluate":
            assert wrapped.aggregate_evaluate(1, replies) is not None
            continue
        arrays, metrics = wrapped.aggregate_train(1, replies)
        counts = [metrics[f"clients_{name}"] for name in ("accepted", "rejected", "failed")]
        assert sum(counts) == 3
        assert counts[0] >= 2
        for name, a in arrays.items():
            assert np.isfinite(a.numpy()).all(), name


# ---- evaluation ------------------------------------------------------------------------------------------------------


def measure(reports):
    """An evaluation on clients that report these."""
    strategy = FedAvg(fraction_evaluate=1.0, min_available_clients=len(reports), min_evaluate_clients=1)
    wrapped, grid = MessageStrategy(strategy), SerialGrid(app, len(reports))
    messages = wrapped.configure_evaluate(1, record(), ConfigRecord(), grid)
    assert [m.metadata.message_type for m in messages] == ["evaluate"] * len(reports)
    replies = []
    for message, metrics in zip(messages, reports, strict=True):
        if metrics is not None:
            data = MetricRecord()
            data.__dict__["_data"].update(metrics)
            replies.append(Message(RecordDict({"metrics": data}), reply_to=message))
    return wrapped.aggregate_evaluate(1, replies)


@pytest.mark.parametrize("key", ["loss", "eval_loss", "eval-loss", "val_loss", "test-loss"])
def test_evaluation_is_averaged_by_examples(key):
    found = measure([{"num-examples": 1, key: 2.0, "acc": 0.5}, {"num-examples": 3, key: 4.0, "acc": 1.0, "more": 7}])
    assert found["loss"] == found[key] == pytest.approx(3.5)
    assert found["acc"] == pytest.approx(0.875)
    assert found["more"] == 7


def test_odd_evaluations_are_left_out_and_logged(caplog):
    good = {"num-examples": 2, "eval_loss": 1.0, "acc": 0.5}
    odd = [
        {"num-examples": [1], "eval_loss": 1.0},
        {"eval_loss": 1.0},
        {"num-examples": 5, "acc": 1.0},
        {"num-examples": 5, "eval_loss": math.nan, "acc": 1.0},
        {"num-examples": -5, "eval_loss": 1.0, "acc": 1.0},
        None,
    ]
    assert dict(measure([good, *odd])) == {"eval_loss": 1.0, "acc": 0.5, "loss": 1.0}
    for i in range(1, 7):
        assert f"client {FIRST_NODE + i}" in caplog.text


@pytest.mark.parametrize("loss", [0.0, -1e9, math.nan])
def test_one_client_that_reports_a_loss_silences_nobody(loss):
    honest = [{"num-examples": 1, "acc": 0.5}, {"num-examples": 1, "acc": 0.7}]
    assert dict(measure([*honest, {"num-examples": 2, "acc": 0.6, "loss": loss}])) == {"acc": pytest.approx(0.6)}


def test_clients_do_not_write_into_the_strategys_part_of_a_report(caplog):
    def report(content):
        content["metrics"].update({"failed_reason": 7, "kkt": 0.5, "clients_capped": 99, "mine": 3, "k" * 10_000: 1.0})
        return content

    with caplog.at_level(logging.INFO):
        _, metrics, reports = second_answers(report)
    assert metrics["mine"] == 3
    assert not {"failed_reason", "kkt", "clients_capped"} & (set(metrics) | set(reports))
    assert max(map(len, metrics)) < 200
    assert "k" * 1000 not in caplog.text


@every_strategy
def test_all_that_a_strategy_reports_of_itself_is_reserved(make):
    losses = {"train_loss", "initial_loss", "step_weight", "local_steps"}  # of clients, or averages of theirs
    _, wrapped = by_messages(make(**SAMPLED, max_weight_share=0.9, clip_to_median=9.0), 2)
    for report in wrapped.reports.values():
        assert set(report) - losses <= RESERVED


def test_a_counter_of_another_integer_type_does_not_overflow():
    largest = np.array(2**63 - 1, np.uint64)

    def count(content):
        content["arrays"][NAMES[-1]] = Array(largest)
        return content

    arrays, metrics, _ = second_answers(count)
    assert metrics["clients_rejected"] == 0
    assert arrays[NAMES[-1]].numpy() == 2**63 - 1


@pytest.mark.parametrize("option", [{"num_rounds": -1}, {"num_rounds": 2.5}, {"timeout": 0}, {"timeout": -5}])
def test_impossible_runs_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* must be"):
        MessageStrategy(FedAvg(**SAMPLED)).start(SerialGrid(app, CLIENTS), record(), **option)


def test_evaluation_without_a_loss_or_without_clients():
    assert dict(measure([{"num-examples": 1, "acc": 0.5}, {"num-examples": 1, "acc": 1.0}])) == {"acc": 0.75}
    assert measure([None, None]) is None
    wrapped, grid = MessageStrategy(FedAvg(fraction_evaluate=0.0, **SAMPLED)), SerialGrid(app, CLIENTS)
    assert wrapped.configure_evaluate(1, record(), ConfigRecord(), grid) == []
    assert wrapped.aggregate_evaluate(1, []) is None


def test_the_model_that_a_strategy_wants_deployed_is_evaluated_and_returned():
    shown, strategy = [], AFL(**SAMPLED)
    wrapped = MessageStrategy(strategy)

    def keep(number, arrays):
        shown.append([*_bits(arrays)])

    result = wrapped.start(SerialGrid(app, CLIENTS), record(), 3, evaluate_fn=keep)
    models, _ = by_hand(AFL(**SAMPLED), 3)
    averaged = strategy.evaluated(strategy._model.parameters)
    assert [*_bits(result.arrays)] == shown[-1] == list(averaged.tensors) != models[-1]


# ---- the run ---------------------------------------------------------------------------------------------------------


class Resuming(FedAvg):
    """What `Checkpointed` offers, without files."""

    resumed, rounds_done = ndarrays_to_parameters(model(5)), 7

    def __init__(self, **options):
        super().__init__(**options)
        self.observed = []

    def observe(self, number, metrics):
        self.observed.append((number, dict(metrics)))


def test_a_resumed_run_goes_on_counting_from_its_model():
    strategy = Resuming(**SAMPLED)
    measured = []

    def evaluate_fn(number, arrays):
        measured.append([*_bits(arrays)])
        return MetricRecord({"loss": float(number), "list": [1, 2]})

    result = MessageStrategy(strategy).start(SerialGrid(app, CLIENTS), record(), 2, evaluate_fn=evaluate_fn)
    assert measured[0] == list(Resuming.resumed.tensors)
    assert list(result.train_metrics_clientapp) == [8, 9]
    # What the server measures comes first, then what its clients do.
    assert [number for number, _ in strategy.observed] == [7, 8, 8, 9, 9]
    assert [strategy.observed[i] for i in (0, 1, 3)] == [(n, {"loss": float(n)}) for n in (7, 8, 9)]
    assert all("eval-loss" in strategy.observed[i][1] for i in (2, 4))


def test_a_model_to_resume_from_that_does_not_fit_is_refused():
    start = record([np.zeros((2, 2), np.float32), *model()[1:]])
    with pytest.raises(ValueError, match=r"float32\(4, 3\) for tensor 'conv.weight'.*resume with the model"):
        MessageStrategy(Resuming(**SAMPLED)).start(SerialGrid(app, CLIENTS), start)
    with pytest.raises(ValueError, match="4 tensors for a model of 3"):
        MessageStrategy(Resuming(**SAMPLED)).start(SerialGrid(app, CLIENTS), record(model()[:3], NAMES[:3]))


def test_the_log_of_a_run_says_what_runs(caplog):
    with caplog.at_level(logging.INFO, logger="flwr"):
        MessageStrategy(FedProx(proximal_mu=0.25, **SAMPLED)).start(SerialGrid(app, CLIENTS), record(), 1)
    for words in ("FedProx", "proximal_mu=0.25", "fraction_fit=0.5", "[ROUND 1/1]", "ArrayRecord key: 'arrays'"):
        assert words in caplog.text


# ---- real clients ----------------------------------------------------------------------------------------------------


def run_quickstart(grid):
    net = quickstart.net()
    strategy = CRAFT(
        layers=LayerMap.from_module(net), min_available_clients=quickstart.CLIENTS, seed=1, device="cpu",
        server_lr=1.0, scale="mean_norm", min_fit_clients=4,
    )  # fmt: skip
    arrays = ArrayRecord(net.state_dict())
    result = MessageStrategy(strategy).start(grid, arrays, 3, train_config=ConfigRecord({"lr": 0.1}))
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["clients_accepted"] == metrics["clients_sampled"] == quickstart.CLIENTS
    assert len(result.evaluate_metrics_clientapp) == 3
    return result


def test_the_quickstart_of_flower_runs_unchanged():
    result = run_quickstart(SerialGrid(quickstart.app, quickstart.CLIENTS))
    state = result.arrays.to_torch_state_dict()
    quickstart.net().load_state_dict(state)
    counter = state["norm.num_batches_tracked"]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 9)
    assert (state["norm.running_var"] > 0).all()
    losses = [metrics["eval_loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses[-1] < losses[0]
    assert result.evaluate_metrics_clientapp[1]["loss"] == losses[0]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves files to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.ray
def test_the_quickstart_of_flower_runs_unchanged_on_ray():
    expected = run_quickstart(SerialGrid(quickstart.app, quickstart.CLIENTS)).arrays
    args = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False, "log_to_driver": False}
    with RayGrid(quickstart.app, quickstart.CLIENTS, init_args=args) as grid:
        assert run_quickstart(grid).arrays == expected


@pytest.mark.parametrize("client", [{}, {"client__ditto_lambda": 0.1}], ids=["plain", "ditto"])
def test_clients_of_this_suite_give_the_same_model_through_both_faces(client):
    cfg = digits(**client)
    clients = cfg["num_clients"]
    task = make_client_app(cfg)
    net = build(cfg).new_model()
    layers = LayerMap.from_module(net)

    def made(**more):
        return CRAFT(
            layers=layers, fraction_fit=0.5, min_fit_clients=1, min_available_clients=clients, device="cpu", seed=2,
            fraction_evaluate=1.0, partition_order=partition_order, **more,
        )  # fmt: skip

    start = [tensor.numpy() for tensor in net.state_dict().values()]
    final, grids = [], [SerialGrid(task, clients), SerialGrid(task, clients)]

    class Watched(CRAFT):
        def aggregate_fit(self, *args):
            found = super().aggregate_fit(*args)
            final.append(found[0].tensors)
            return found

    strategy = made(initial_parameters=ndarrays_to_parameters(start))
    strategy.__class__ = Watched
    components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))
    serve_on(grids[0], ServerApp(server_fn=lambda _: components))
    result = MessageStrategy(made()).start(grids[1], ArrayRecord(net.state_dict()), 3)
    assert [*_bits(result.arrays)] == list(final[-1])
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses[2] < losses[0]
    kept = [{n: c.state.get("fedconcord.ditto") for n, c in grid._contexts.items()} for grid in grids]
    assert kept[0] == kept[1]
    assert any(kept[0].values()) == bool(client)
