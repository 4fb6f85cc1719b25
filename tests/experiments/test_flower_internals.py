"""What `experiments.engine.internals` takes for granted about Flower; a new Flower that breaks it fails here first."""

import inspect
import weakref

import flwr.server.server
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common import Code, EvaluateRes, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from experiments.engine import internals, serve_on, wire
from experiments.engine.virtual import VirtualGrid


class Loopback(VirtualGrid):
    """Answers fit and evaluate messages itself, with what `answer` returns."""

    def __init__(self, answer) -> None:
        super().__init__(4)
        self.answer = answer
        self.seen: list[Message] = []

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(internals.name(message))
            self.seen.append(message)
            self._replies[ids[-1]] = self.answer(message)
        return ids

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


@pytest.fixture(autouse=True)
def _identity():
    internals.identify(7)


def message() -> Message:
    records = {
        "arrays": ArrayRecord([np.arange(3, dtype=np.float32), np.array(2)]),
        "metrics": MetricRecord({"a": 1.5, "list": [1, 2]}),
        "config": ConfigRecord({"s": "text", "b": b"bytes", "flag": True}),
    }
    made = Message(RecordDict(records), 5, "train.extra", ttl=60, group_id="3")
    internals.name(made)
    return made


def test_a_message_survives_being_taken_apart():
    one = message()
    two = internals.message_of(internals.head_of(one), wire.unpack(wire.pack(one.content)))
    assert two.metadata == one.metadata
    assert two.content == one.content
    assert two.object_id == one.object_id  # the hash of all Flower would send
    assert list(inspect.signature(Metadata).parameters) == [
        "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at", "ttl",
        "message_type", "src_task_id", "dst_task_id",
    ]  # fmt: skip


def test_records_made_without_checks_are_like_flowers_own():
    one = message().content
    for lease in (None, object()):
        two = wire.unpack(wire.pack(one), lease=lease)
        assert list(two) == list(one)
        assert [type(r) for r in two.values()] == [type(r) for r in one.values()]
        assert two.array_records.keys() == one.array_records.keys()
        for a, b in zip(two["arrays"].to_numpy_ndarrays(), one["arrays"].to_numpy_ndarrays(), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        two["more"] = MetricRecord({"x": 1})
        two["arrays"]["2"] = Array(np.ones(2))
        with pytest.raises(TypeError):
            two["arrays"]["3"] = 1
        del two["arrays"]["0"]
    made, own = internals.array("f", (1,), "s", b"x"), Array("f", (1,), "s", b"x")
    assert made == own
    assert made.object_id == own.object_id


def test_a_reply_answers_its_message():
    one = message()
    reply = internals.error_reply(one, internals.NO_REPLY, "too late")
    assert reply.metadata.reply_to_message_id == one.metadata.message_id
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (5, one.metadata.src_node_id)
    assert (reply.error.code, reply.error.reason) == (internals.NO_REPLY, "too late")
    fit = Message(RecordDict(), reply_to=one)
    made = internals.message_of(internals.reply_head(internals.head_of(one)), RecordDict())
    for key in vars(fit.metadata):
        if key not in ("_created_at", "_ttl"):
            assert vars(made.metadata)[key] == vars(fit.metadata)[key], key
    assert made.metadata.ttl + made.metadata.created_at == pytest.approx(one.metadata.ttl + one.metadata.created_at)
    head = internals.head_of(one)
    assert (head[internals.DESTINATION], head[internals.KIND]) == (5, "train.extra")
    codes = (internals.CLIENT_RAISED, internals.CLIENT_CRASHED, internals.NO_REPLY, internals.NO_NODE)
    assert codes == (2, 8, 4, 5)


def fit_answer(status: Status):
    def answer(message: Message) -> Message:
        ins = compat.recorddict_to_fitins(message.content, keep_input=True)
        res = FitRes(status, ins.parameters, 5, {"lr": ins.config["lr"]})
        return Message(compat.fitres_to_recorddict(res, keep_input=False), reply_to=message)

    return answer


@pytest.mark.parametrize("views", [True, False])
def test_one_exchange_gives_what_flowers_proxies_give(views):
    grid = Loopback(fit_answer(Status(Code.OK, "fine")))
    grid.lends_views = views
    proxies = [GridClientProxy(node, grid, grid.run.run_id) for node in grid.get_node_ids()]
    ins = FitIns(ndarrays_to_parameters([np.ones((2, 2)), np.array(1)]), {"lr": 0.5})
    results, failures = internals.exchange(grid, [(p, ins) for p in proxies], 30.0, 3)
    assert failures == []
    for (proxy, res), expected in zip(results, proxies, strict=True):
        other = expected.fit(ins, timeout=30.0, group_id=3)
        assert proxy is expected
        assert (res.num_examples, dict(res.metrics), res.status) == (5, {"lr": 0.5}, other.status)
        assert res.parameters.tensor_type == other.parameters.tensor_type == "numpy.ndarray"
        assert [bytes(t) for t in res.parameters.tensors] == other.parameters.tensors
    ours, theirs = grid.seen[0], grid.seen[4]
    assert ours.content == theirs.content
    for key in ("message_type", "group_id", "ttl", "dst_node_id", "src_node_id", "run_id"):
        assert getattr(ours.metadata, key) == getattr(theirs.metadata, key)


def test_fit_instructions_and_results_are_packed_as_flower_would():
    ins = FitIns(ndarrays_to_parameters([np.ones((2, 2)), np.array(1)]), {"lr": 0.5})
    content = compat.fitins_to_recorddict(ins, keep_input=True)
    stored = {7: [(*a[:4], a[4].tobytes()) for a in wire.pack_arrays(content["fitins.parameters"])]}
    packed = [("fitins.parameters", "r", 7), ("fitins.config", "c", {"lr": 0.5})]
    assert wire.unpack_fit(packed, stored) == (7, ins)
    assert wire.unpack_fit(packed[:1], stored) is None
    assert wire.unpack_fit([("arrays", "r", 7), packed[1]], stored) is None
    res = FitRes(Status(Code.OK, "fine"), ins.parameters, 5, {"a": 1})
    assert wire.unpack(wire.pack_fit(res)) == compat.fitres_to_recorddict(res, keep_input=True)


def test_failures_are_kept_apart_from_results():
    bad = Status(Code.FIT_NOT_IMPLEMENTED, "no")
    grid = Loopback(fit_answer(bad))
    proxies = [GridClientProxy(node, grid, grid.run.run_id) for node in grid.get_node_ids()]
    ins = FitIns(ndarrays_to_parameters([np.ones(2)]), {"lr": 0.5})
    results, failures = internals.exchange(grid, [(p, ins) for p in proxies], None, 1)
    assert results == []
    assert [f[1].status for f in failures] == [bad] * 4
    grid.answer = lambda m: internals.error_reply(m, 2, "broke")
    _, failures = internals.exchange(grid, [(proxies[1], ins)], None, 1)
    assert str(failures[0]) == f"client {proxies[1].cid} (partition 1): broke"
    grid.answer = lambda m: Message(RecordDict(), reply_to=m)
    _, failures = internals.exchange(grid, [(proxies[1], ins)], None, 1)
    assert "cannot be read" in str(failures[0])
    assert len({id(m.content) for m in grid.seen[:4]}) == 4  # nobody's content is anybody else's,
    grid.shares_content = True  # unless the grid says it may be
    internals.exchange(grid, [(p, ins) for p in proxies], None, 1)
    assert len({id(m.content) for m in grid.seen[-4:]}) == 1


@pytest.mark.parametrize("keeps", [False, True])
def test_a_legacy_servers_round_is_one_exchange_and_lets_go_of_the_last(keeps):
    rounds, seen = [], []

    class Seeing(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            # Results of the round before are gone, unless the strategy has kept the list.
            assert [ref() is not None for ref in seen] == [keeps] * len(seen)
            seen.extend(weakref.ref(res) for _, res in results)
            if keeps:
                rounds.append(results)
                assert [len(r) for r in rounds] == [4] * server_round
            return super().aggregate_fit(server_round, results, failures)

    calls = []

    class Counting(Loopback):
        def send_and_receive(self, messages, *, timeout=None):
            calls.append(len(messages := list(messages)))
            return super().send_and_receive(messages)

    grid = Counting(fit_answer(Status(Code.OK, "fine")))
    start = ndarrays_to_parameters([np.ones(2)])
    strategy = Seeing(
        initial_parameters=start, min_available_clients=4, fraction_evaluate=0.0, min_evaluate_clients=0,
        on_fit_config_fn=lambda _: {"lr": 0.5}, fit_metrics_aggregation_fn=lambda _: {},
    )  # fmt: skip
    before = flwr.server.server.fit_clients
    serve_on(grid, ServerApp(server_fn=lambda _: ServerAppComponents(strategy=strategy, config=ServerConfig(3))))
    assert calls == [4, 4, 4]
    assert flwr.server.server.fit_clients is before
    assert "res_fit = self.fit_round(" in inspect.getsource(Server.fit)  # and its results are not read again


def test_signatures_that_are_overridden_or_called():
    assert Grid.__abstractmethods__ <= set(dir(VirtualGrid))
    assert Grid.__abstractmethods__ == {
        "set_run", "run", "create_message", "get_node_ids", "push_messages", "pull_messages", "send_and_receive"
    }  # fmt: skip
    for function in (flwr.server.server.fit_clients, flwr.server.server.evaluate_clients):
        assert list(inspect.signature(function).parameters) == [
            "client_instructions", "max_workers", "timeout", "group_id"
        ]  # fmt: skip
    assert {"server_app", "client_app", "num_supernodes", "backend_config"} <= set(
        inspect.signature(run_simulation).parameters
    )
    res = EvaluateRes(Status(Code.OK, ""), 0.5, 3, {"a": 1})
    assert compat.recorddict_to_evaluateres(compat.evaluateres_to_recorddict(res)) == res
