"""RayGrid: unchanged apps run on it, and what clients, actors and the clock do to it costs just those concerned."""

import copy
import gc
import pickle
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat

from client_apps import make_client_app
from client_apps.arrays import get_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import build
from experiments.config import compose
from experiments.engine import EngineFailed, SerialGrid, ray_grid, serve_on
from experiments.engine.internals import SharedArray
from experiments.engine.ray_grid import RayGrid
from experiments.engine.virtual import FIRST_NODE

from . import engine_apps as apps

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODES = range(FIRST_NODE, FIRST_NODE + 12)
STORE = 128 * 2**20


@pytest.fixture(scope="module")
def _ray():
    """One Ray for all tests of this file; grids use it and leave it running."""
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=2, object_store_memory=STORE, **options)  # whatever others run here
    try:
        yield
    finally:
        ray.shutdown()
        gc.collect()  # while its warnings are not errors


@pytest.fixture(scope="module")
def grid(_ray):
    """One grid for the tests that need no fresh one: it has to survive all they do to it."""
    with RayGrid(apps.message_app, 12) as shared:
        yield shared


@pytest.fixture
def make(_ray):
    """Make grids that are closed afterwards."""
    grids = []

    def grid(app=apps.message_app, clients=12, **options) -> RayGrid:
        grids.append(RayGrid(app, clients, **options))
        return grids[-1]

    try:
        yield grid
    finally:
        for each in grids:
            each.close()
        assert ray.is_initialized()


def ask(grid, number=1, nodes=NODES, timeout=300, **config) -> dict[int, Message]:
    replies = list(grid.send_and_receive(apps.messages(nodes, number, **config), timeout=timeout))
    assert len(replies) == len(nodes)
    return apps.by_partition(replies, FIRST_NODE)


def calls(replies: dict[int, Message]) -> dict[int, int]:
    """How often each client has answered, by its own count."""
    assert not any(reply.has_error() for reply in replies.values())
    return {cid: reply.content["metrics"]["calls"] for cid, reply in replies.items()}


def busy(grid) -> None:
    """Give both workers something to do, so that both are up and have run clients."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if len({r.content["metrics"]["pid"] for r in ask(grid, sleep=0.05).values()}) == 2:
            return
    pytest.fail("the second worker did not start")


def test_flowers_legacy_server_and_strategy_run_unchanged(make):
    found, expected = [], []
    serve_on(make(apps.legacy_app), apps.legacy_server(2, 12, found, initial_parameters=apps.INITIAL))
    serve_on(SerialGrid(apps.legacy_app, 12), apps.legacy_server(2, 12, expected, initial_parameters=apps.INITIAL))
    assert [r[:2] for r in found] == [(12, 0), (12, 0)]
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a[2], b[2], strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
    # Weights 1..12 on additions of 1..12: the mean is Σ k² / Σ k = 650 / 78 a round.
    np.testing.assert_allclose(found[-1][2][0], 2 * 650 / 78, rtol=1e-6)


def test_flowers_message_strategy_runs_unchanged(make):
    found, expected = [], []
    serve_on(make(), apps.message_server(2, 12, found))
    serve_on(SerialGrid(apps.message_app, 12), apps.message_server(2, 12, expected))
    (arrays, evaluated), (same, also) = found[0], expected[0]
    for x, y in zip(arrays, same, strict=True):
        assert x.dtype == y.dtype
        # Flower adds replies up as they come in.
        np.testing.assert_allclose(x, y, rtol=1e-6)
    np.testing.assert_allclose(arrays[0], apps.START[0] + 2 * 650 / 78, rtol=1e-6)
    assert evaluated.keys() == also.keys() == {1, 2}
    assert evaluated[2]["mean"] == pytest.approx(also[2]["mean"])


@pytest.mark.parametrize("vectorize", ["auto", "false"])
def test_batches_of_any_size_give_the_same_bits(make, monkeypatch, vectorize):
    cfg = compose(["num_clients=24", "client.lr=0.1", "client.momentum=0.5", f"client.vectorize={vectorize}"])
    start = ndarrays_to_parameters(get_arrays(build(cfg).new_model()))
    content = compat.fitins_to_recorddict(FitIns(start, {"server_round": 1}), keep_input=True)
    nodes = range(FIRST_NODE, FIRST_NODE + 24)
    found = []
    for size in (1, 5, 1000):
        monkeypatch.setattr(RayGrid, "_batch_size", lambda self, size=size: size)
        grid = make(make_client_app(cfg), 24)
        for _ in range(2):  # a worker's first batch is always of one client
            replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes], timeout=300))
        assert not any(reply.has_error() for reply in replies)
        found.append({
            r.metadata.src_node_id: [a.data for a in r.content["fitres.parameters"].values()] for r in replies
        })  # fmt: skip
        grid.close()
    assert found[0] == found[1] == found[2]


def test_closing_wakes_who_is_waiting(make):
    grid = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(grid.send_and_receive(apps.messages(NODES, hang=[0, 1, 2, 3]))))
        while not grid._tasks:
            assert not waiting.done()
        grid.close()
        with pytest.raises(EngineFailed, match="closed"):
            waiting.result(timeout=60)
    grid.close()  # once more is once too often, and harmless


def test_fractions_of_gpus_decide_how_many_clients_run(monkeypatch):
    def node(name, **resources):
        return {"Alive": name != "dead", "NodeID": name, "Resources": resources}

    nodes = [
        node("here", CPU=4, GPU=1, object_store_memory=1e9), node("there", CPU=16, GPU=4, object_store_memory=5e9),
        node("dead", CPU=99, GPU=99),
    ]  # fmt: skip
    monkeypatch.setattr(ray_grid.ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray_grid.ray, "get_runtime_context", lambda: here)
    assert ray_grid._capacity({"num_cpus": 1, "num_gpus": 0.0}) == (20, 1e9)
    assert ray_grid._capacity({"num_cpus": 1, "num_gpus": 0.25}) == (4 + 16, 1e9)
    assert ray_grid._capacity({"num_cpus": 2, "num_gpus": 0.1}) == (2 + 8, 1e9)
    assert ray_grid._capacity({"num_cpus": 0, "num_gpus": 1}) == (5, 1e9)


def test_a_client_gives_the_initial_parameters(make):
    found = []
    serve_on(make(apps.legacy_app), apps.legacy_server(1, 12, found))
    np.testing.assert_allclose(found[-1][2][0], 650 / 78, rtol=1e-6)


def test_messages_come_back_as_they_would_from_one_process(make):
    grid, serial = make(), SerialGrid(apps.message_app, 12)
    for number in (1, 2):
        found = ask(grid, number)
        expected = apps.by_partition(serial.send_and_receive(apps.messages(NODES, number)), FIRST_NODE)
        for cid in range(12):
            a, b = found[cid], expected[cid]
            assert a.metadata.message_type == b.metadata.message_type == "train"
            assert (a.metadata.src_node_id, a.metadata.dst_node_id) == (b.metadata.src_node_id, b.metadata.dst_node_id)
            assert (a.metadata.group_id, a.metadata.reply_to_message_id != "") == (str(number), True)
            for x, y, z in zip(
                a.content["arrays"].to_numpy_ndarrays(), b.content["arrays"].to_numpy_ndarrays(), apps.START,
                strict=True,
            ):  # fmt: skip
                assert x.dtype == y.dtype
                assert x.shape == y.shape
                np.testing.assert_array_equal(x, z + (cid + 1))
                np.testing.assert_array_equal(x, y)
                x += 1  # a strategy may work in place
            metrics = {k: v for k, v in a.content["metrics"].items() if k != "pid"}
            assert metrics == {k: v for k, v in b.content["metrics"].items() if k != "pid"}
            # State counts the rounds, wherever the client ran.
            assert (metrics["calls"], metrics["own"]) == (number, cid + number - 1)


def test_replies_larger_than_the_store_arrive_whole_and_are_let_go(make):
    grid = make()
    for number in (1, 2):
        replies = ask(grid, number, **{"reply-mb": 16})  # 192 MiB of replies, held at once, in a store of 128
        for cid, reply in replies.items():
            assert not reply.has_error(), reply.error
            big = reply.content["arrays"]["3"].numpy()
            assert (big.size, float(big.min()), float(big.max())) == (16 * 2**18, cid, cid)
        assert grid._shared <= grid._share
        del replies, reply, big
        gc.collect()
    assert sum(grid._returned, 0) > 0


def test_an_app_that_cannot_be_loaded_ends_the_run_in_a_sentence(make):
    grid = make(apps.Unloadable())
    with pytest.raises(EngineFailed, match=r"cannot load the ClientApp.*nowhere"):
        list(grid.send_and_receive(apps.messages(NODES), timeout=300))


@pytest.mark.usefixtures("_ray")
def test_clients_that_fit_nowhere_are_refused():
    with pytest.raises(ConfigError, match=r"one needs 64 CPUs .* lower simulation.client_cpus"):
        RayGrid(apps.message_app, 12, client_resources={"num_cpus": 64})
    with pytest.raises(ConfigError, match="2 GPUs"):
        RayGrid(apps.message_app, 12, client_resources={"num_gpus": 2})


def test_a_closed_grid_says_so(make):
    grid = make()
    grid.close()
    with pytest.raises(EngineFailed, match="closed"):
        list(grid.send_and_receive(apps.messages(NODES)))


def test_a_client_that_raises_or_exits_fails_alone(grid):
    replies = ask(grid, 1, **{"raise": [3, 7], "exit": [5]})
    assert {cid for cid, reply in replies.items() if reply.has_error()} == {3, 5, 7}
    assert "RuntimeError: client 3 lost its data" in replies[3].error.reason
    assert "SystemExit" in replies[5].error.reason
    assert not any(reply.has_error() for reply in ask(grid, 2).values())


@pytest.mark.parametrize(
    ("oddity", "words"),
    [
        ("interrupt", "KeyboardInterrupt"),
        ("speechless", "Speechless: .its text cannot be made"),
        ("unsendable", "lock"),
        ("no-state", "NoneType"),
    ],
)
def test_a_client_whose_failure_is_odd_fails_alone(grid, oddity, words):
    replies = ask(grid, 2, **{oddity: [4]})
    assert {cid for cid, reply in replies.items() if reply.has_error()} == {4}
    assert re.search(words, replies[4].error.reason)


def test_a_reply_answers_its_message_whatever_a_client_makes_of_it(grid):
    replies = ask(grid, 2, astray=[4])
    assert set(replies) == set(range(12))
    sent = {reply.metadata.dst_node_id for reply in replies.values()}
    assert len(sent) == 1
    assert all(reply.metadata.reply_to_message_id for reply in replies.values())


def test_an_address_where_nobody_answers_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"nobody answers at simulation.address=127.0.0.1:{port}"):
        ray_grid._start_ray({"address": f"127.0.0.1:{port}"})


def test_a_client_that_kills_its_process_fails_alone(grid):
    for _ in range(3):  # whose replies are on their way at the time is another one each time
        before = calls(ask(grid, 1))
        replies = ask(grid, 2, die=[4])
        assert {cid for cid, reply in replies.items() if reply.has_error()} == {4}
        assert "died" in replies[4].error.reason
        # Who answered keeps counting in its state; who died has lost that one call only.
        assert calls(ask(grid, 3)) == {cid: n + (1 if cid == 4 else 2) for cid, n in before.items()}


def test_a_process_that_dies_once_costs_nobody(grid, tmp_path):
    before = calls(ask(grid, 1))
    replies = ask(grid, 2, flag=str(tmp_path), **{"die-once": [6]})
    assert not any(reply.has_error() for reply in replies.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6"]
    assert calls(replies) == {cid: n + 1 for cid, n in before.items()}


def test_a_client_that_hangs_is_given_up_and_holds_up_nobody(grid):
    busy(grid)
    replies = ask(grid, 2, timeout=12, hang=[2])
    assert {cid for cid, reply in replies.items() if reply.has_error()} == {2}
    assert "did not answer in time" in replies[2].error.reason
    # The next round is not the poorer for it.
    assert not any(reply.has_error() for reply in ask(grid, 3).values())


def test_a_message_lives_no_longer_than_its_ttl(grid):
    busy(grid)
    replies = apps.by_partition(grid.send_and_receive(apps.messages(NODES, 2, ttl=12, hang=[2])), FIRST_NODE)
    assert {cid for cid, reply in replies.items() if reply.has_error()} == {2}


def test_pushing_and_pulling(grid):
    ids = list(grid.push_messages(apps.messages(NODES)))
    seen, until = [], time.monotonic() + 300
    while len(seen) < 12 and time.monotonic() < until:
        seen += grid.pull_messages(ids)
    assert sorted(reply.metadata.reply_to_message_id for reply in seen) == sorted(ids)
    assert list(grid.pull_messages(ids)) == []


def test_a_node_that_does_not_exist_is_named(grid):
    replies = list(grid.send_and_receive(apps.messages([FIRST_NODE + 12]), timeout=300))
    assert "there is no node" in replies[0].error.reason


def test_a_client_answers_its_messages_one_after_the_other(grid):
    before = calls(ask(grid))
    replies = list(grid.send_and_receive(apps.messages([FIRST_NODE] * 6 + [FIRST_NODE + 1] * 6), timeout=300))
    for node in (FIRST_NODE, FIRST_NODE + 1):
        found = [r.content["metrics"]["calls"] for r in replies if r.metadata.src_node_id == node]
        assert sorted(found) == [before[node - FIRST_NODE] + k for k in range(1, 7)]


def test_equal_contents_are_stored_once(grid):
    before = grid._contents._count
    # Twelve messages with arrays of their own, all equal.
    ask(grid, start=[np.asarray(a + 2) for a in apps.START])
    assert grid._contents._count == before + 1
    ask(grid, start=[np.asarray(a + 1) for a in apps.START])
    assert grid._contents._count == before + 2
    ask(grid)  # one that is gone is found again
    for _ in range(5):
        ask(grid, start=[np.random.default_rng(grid._contents._count).random(5)])
    assert len(grid._contents._by_identity) <= 3


def test_contents_that_differ_anywhere_are_not_mixed_up(grid):
    rng = np.random.default_rng(0)
    big = rng.random(10_000).astype(np.float32)
    sent = []
    for i, node in enumerate(NODES):
        own = big.copy()
        own[5000] = i  # in the middle, where no checksum of the ends looks
        sent += apps.messages([node], start=[own])
    replies = apps.by_partition(grid.send_and_receive(sent, timeout=300), FIRST_NODE)
    for i in range(12):
        assert replies[i].content["arrays"].to_numpy_ndarrays()[0][5000] == i + (i + 1)


def test_shared_arrays_are_arrays(grid):
    reply = ask(grid)[0]
    record = reply.content["arrays"]
    shared, expected = record["0"], Array(apps.START[0] + 1)
    assert isinstance(shared, SharedArray)
    assert not shared.buffer.flags.writeable
    for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared)), shared):
        assert (other.dtype, other.shape, other.stype) == (expected.dtype, expected.shape, expected.stype)
        assert other == expected
        np.testing.assert_array_equal(other.numpy(), apps.START[0] + 1)
    assert type(shared.data) is bytes
    assert shared.data == expected.data
    assert (
        ArrayRecord(dict(record)).object_id == ArrayRecord({k: Array(v.numpy()) for k, v in record.items()}).object_id
    )
    assert RecordDict({"a": record})["a"].count_bytes() > 0


def test_rounds_leave_nothing_behind(grid):
    def own_memory() -> int:
        gc.collect()
        lines = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024

    sizes = []
    for number in range(30):  # 24 MiB of replies a round
        replies = ask(grid, number, start=[np.full(5, number, np.float32)], **{"reply-mb": 2})
        assert not any(reply.has_error() for reply in replies.values())
        del replies
        sizes.append(own_memory())
    assert sizes[-1] - sizes[9] < 8 * 2**20
    assert (len(grid._tasks), len(grid._replies), len(grid._busy), len(grid._queue)) == (0, 0, 0, 0)
    assert len(grid._contents._by_identity) <= 2
