"""RayGrid: virtual clients on Ray workers, in batches; what many messages share crosses to a worker once.

Flower's own simulation sends each message to a worker by itself, with its copy of the global model. Here the
global model is put into Ray's object store once per distinct content, found by content because Flower's legacy
server copies it for each message. Clients travel in batches whose size follows from measured times, and replies
come back as views of shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import Message
from flwr.clientapp import ClientApp
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from client_apps.errors import ConfigError

from . import internals, wire
from .contents import Content, Contents
from .ray_settings import one_arena, quiet_ray
from .ray_worker import ClientWorker, Job, Outcome
from .virtual import FIRST_NODE, EngineFailed, VirtualGrid

logger = logging.getLogger("flwr")

# A batch takes about this long: long against a message's way to a worker and back (a millisecond or two),
# short against a round.
_BATCH_SECONDS = 0.1
_LEAST_SECONDS = 0.02
# A batch that takes this many times longer than expected gives back the clients that have not begun.
_OVERDUE, _OVERDUE_SECONDS = 4.0, 1.0
_POLL_SECONDS = 0.2
# Workers begin once this many messages of a round have been sent.
_WAKE = 64
# Share of the object store that replies may occupy while the server reads them; beyond it they are copied out.
_SHARED = 0.6


@dataclass(eq=False)
class _Task:
    """A message on its way."""

    message: Message
    id: str
    records: list[tuple[str, Any]]
    """(name, `Content` or packed record)"""
    deadline: float
    own: bool
    """Whether the reply is to leave shared memory at once."""
    deaths: int = 0
    solo: bool = False
    done: bool = False

    @property
    def node(self) -> int:
        return self.message.metadata.dst_node_id


@dataclass(eq=False)
class _Batch:
    number: int
    tasks: dict[int, _Task]
    ref: Any
    began: float
    expected: float
    solo: bool = False
    """Whether nothing else may be on its way to the worker: a death has to have one possible cause."""
    released: bool = False


class _Lease:
    """Lives as long as a view of a batch's replies does."""

    __slots__ = ("__weakref__",)


class RayGrid(VirtualGrid):
    """A Flower grid whose clients run in Ray actors.

    Unchanged ServerApps, strategies and ClientApps of both of Flower's APIs run on it. Each client keeps its
    `Context.state` across rounds, wherever it runs next. A client that raises gives an error reply. When an
    actor dies, it is replaced, and the clients it was running run once more, each by itself; one that dies
    again gives an error reply. A client that does not answer in time gives an error reply, its actor is
    replaced, and the clients that waited behind it run elsewhere (unless it trains with others at once, or never
    lets go of the interpreter: then their time is over, too).

    Parameters
    ----------
    client_app : ClientApp
        Sent to the workers once (cloudpickle).
    num_clients : int
        Number of nodes; the i-th has `partition-id` i and `num-partitions` num_clients.
    client_resources : mapping
        What a client gets, as Flower's simulation names it: `num_cpus`, `num_gpus` (fractions share a device).
        As many clients run at a time as fit into the cluster.
    init_args : mapping
        Arguments of `ray.init`, e.g. num_cpus and object_store_memory, or address="auto" for an existing cluster.
        Ignored where Ray runs in this process already; a Ray that was running is left running.
    run_config : mapping
        What clients find in `Context.run_config`.
    start_timeout : float
        Seconds without any worker alive after which waiting messages are answered with an error.

    Raises
    ------
    ConfigError
        No client fits into the cluster, or it cannot be reached.
    EngineFailed
        By the methods that send and receive: no worker can be started, or none can load the client app.
    """

    shares_content = True

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        client_resources: Mapping[str, float] | None = None,
        init_args: Mapping[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
        start_timeout: float = 180.0,
    ) -> None:
        super().__init__(num_clients)
        self._resources = {"num_cpus": 1, "num_gpus": 0.0, **(client_resources or {})}
        self._start_timeout = start_timeout
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(init_args or {})
        try:
            size, store = _capacity(self._resources)
            self._share = _SHARED * store
            self._queue: deque[_Task] = deque()
            self._busy: set[int] = set()
            self._tasks: dict[str, _Task] = {}
            self._states: dict[int, list[wire.PackedRecord]] = {}
            self._contents = Contents()
            self._seconds: float | None = None  # of one client, in the mean of late
            self._spent = self._answered = 0.0  # what that mean is made of
            self._bytes = 0.0  # of one reply
            self._shared = 0  # bytes of replies that views keep in shared memory
            self._returned: deque[int] = deque()  # what the garbage collector says is no longer kept
            self._putting = threading.Lock()
            self._alive = 0
            self._last_alive = time.monotonic()
            self._closing = False
            self._broken: str | None = None
            self._make = _worker_factory(client_app, self._run.run_id, num_clients, run_config or {}, self._resources)
            self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(min(size, num_clients))]
            for thread in self._workers:
                thread.start()
        except BaseException:
            self._closing = True
            self._disconnect()
            raise

    def __enter__(self) -> RayGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and Ray if it was started here. Replies not pulled are lost."""
        with self._guard:
            if self._closing:
                return
            self._closing = True
            self._guard.notify_all()
        for thread in self._workers:
            thread.join(timeout=30)
        for held in (self._replies, self._contents, self._tasks, self._queue, self._states):
            held.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_ray:
            ray.shutdown()

    # ---- what a ServerApp calls ----------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; a message lives until its time to live is over."""
        return self._push(messages, None)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand out the replies to these messages that are there, once."""
        self._expire(ids := list(message_ids))
        with self._guard:
            if not any(i in self._replies for i in ids):
                self._guard.wait(0.01)  # a caller that asks over and over must not keep the workers' threads waiting
        return super().pull_messages(ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies.

        A client that has not answered within `timeout` seconds, or the message's time to live, is answered for
        with an error.
        """
        return self._round_trip(self._push(messages, timeout))

    def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
        """Send messages and wait for the replies; `own`: they leave shared memory as they come in."""
        return self._round_trip(self._push(messages, None, own=own))

    def client_states(self) -> dict[int, list[wire.PackedRecord]]:
        """Return what each client that keeps something keeps between rounds, by partition."""
        with self._guard:
            return {node - FIRST_NODE: packed for node, packed in self._states.items() if packed}

    def restore_client_states(self, states: Mapping[int, Sequence[wire.PackedRecord]]) -> None:
        """Give clients what they kept."""
        with self._guard:
            self._states.update((FIRST_NODE + partition, list(packed)) for partition, packed in states.items())

    def _round_trip(self, ids: list[str]) -> Iterable[Message]:
        with self._guard:
            missing = [i for i in ids if i in self._tasks]
        while missing:
            with self._guard:
                missing = [i for i in missing if i in self._tasks]
                if missing:
                    nearest = min(self._tasks[i].deadline for i in missing) - time.monotonic()
                    self._guard.wait(min(max(nearest, 0.0), 1.0))
            self._expire(missing)
        return super().pull_messages(ids)

    def _push(self, messages: Iterable[Message], timeout: float | None, *, own: bool = False) -> list[str]:
        ids = []
        latest = math.inf if timeout is None else time.monotonic() + timeout
        for message in messages:
            ids.append(internals.name(message))
            if self._refuse_unknown(message):
                continue
            left = message.metadata.created_at + message.metadata.ttl - time.time()
            with self._guard:
                self._check()
                task = _Task(message, ids[-1], self._contents.split(message), min(latest, time.monotonic() + left), own)
                self._tasks[ids[-1]] = task
                self._queue.append(task)
            if len(ids) % _WAKE == 0:
                with self._guard:
                    self._guard.notify_all()
        with self._guard:
            self._guard.notify_all()
        return ids

    def _expire(self, ids: Sequence[str]) -> None:
        """Answer for the clients whose time is over; raise if no worker will ever run them."""
        now = time.monotonic()
        with self._guard:
            if not self._alive and now - self._last_alive > self._start_timeout:
                self._broken = self._broken or (
                    f"no Ray worker could be started within {self._start_timeout:g} s: one needs "
                    f"{self._resources['num_cpus']:g} CPUs and {self._resources['num_gpus']:g} GPUs, which other "
                    "actors, another grid's or another driver's, may hold."
                )
            self._check()
            for task in [self._tasks[i] for i in ids if i in self._tasks]:
                if task.deadline <= now:
                    self._fail(task, internals.NO_REPLY, "did not answer in time")

    def _check(self) -> None:
        if self._broken:
            raise EngineFailed(self._broken)
        if self._closing:
            raise EngineFailed("the grid is closed; make a new one.")

    # ---- answering (all under the guard) -------------------------------------------------------------------

    def _fail(self, task: _Task, code: int, reason: str) -> None:
        if not task.done:
            self._finish(task, internals.error_reply(task.message, code, reason))

    def _finish(self, task: _Task, reply: Message) -> None:
        task.done = True
        del self._tasks[task.id]
        self._contents.drop(task.records)
        self._replies[task.id] = reply
        self._guard.notify_all()

    def _deliver(self, task: _Task, outcome: Outcome, lease: object) -> None:
        """Take in what a worker says about a task; the first word counts."""
        if task.done:
            return
        if outcome.state is not None:
            self._states[task.node] = wire.own(outcome.state)
        if outcome.error is not None:
            code, reason, trace = outcome.error
            logger.error("client %d failed: %s", task.node - FIRST_NODE, trace or reason)
            self._fail(task, code, reason)
            return
        assert outcome.head is not None
        head = internals.answering(outcome.head, task.message)
        reply = internals.message_of(head, wire.unpack(outcome.content, lease=lease))
        internals.name(reply)
        self._finish(task, reply)

    # ---- a worker's thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """Keep one actor supplied, and replace it when it dies."""
        while not (self._closing or self._broken):
            actor = None
            try:
                actor = self._make()
                if self._await_start(actor):
                    self._supply(actor)
            except Exception as error:
                logger.exception("a worker's thread failed")
                what = "Ray failed" if isinstance(error, RayError) else "the simulation engine has a defect"
                with self._guard:
                    self._broken = f"{what}: {' '.join(str(error).split())[:600] or repr(error)}"
                    self._guard.notify_all()
                return
            finally:
                with contextlib.suppress(Exception):
                    ray.kill(actor)

    def _await_start(self, actor: Any) -> bool:
        ref = actor.ready.remote()
        while not self._closing:
            if ray.wait([ref], timeout=_POLL_SECONDS)[0]:
                try:
                    ray.get(ref)
                except RayError as error:
                    if not isinstance(error, RayActorError) or "creation task" not in str(error):
                        with self._guard:
                            self._guard.wait(1.0)
                        return False  # its node went away, or was out of memory: try again
                    reason = " ".join(str(error).split())[-600:]
                    with self._guard:
                        self._broken = f"Ray workers cannot load the ClientApp: {reason}"
                        self._guard.notify_all()
                    return False
                return True
        return False

    def _supply(self, actor: Any) -> None:
        """Keep up to two batches on their way to the actor until it dies or the grid closes."""
        sent: deque[_Batch] = deque()
        number, warm = 0, False
        with self._guard:
            self._alive += 1
        try:
            while True:
                # Nothing is sent to wait behind a client that takes long, or that has to be alone.
                while len(sent) < (2 if warm else 1) and not (sent and (sent[0].released or sent[0].solo)):
                    tasks = self._take(wait=not sent, warm=warm)
                    if not tasks:
                        break
                    sent.append(self._send(actor, number, tasks))
                    number += 1
                    del tasks
                if not sent:
                    return
                batch = sent[0]
                if not ray.wait([batch.ref], timeout=self._patience(batch))[0]:
                    if self._closing:
                        return
                    if not self._chase(actor, sent):
                        return
                    continue
                try:
                    seconds, outcomes = ray.get(batch.ref)
                except RayTaskError as error:
                    sent.popleft()
                    self._retire(batch, [], error=error)
                except RayError as error:
                    sent.popleft()
                    self._bury(batch, error)
                    return
                else:
                    sent.popleft()
                    self._learn(batch, seconds if warm else None, outcomes)
                    self._retire(batch, outcomes)
                    warm = True
                    if sent:
                        sent[0].began = time.monotonic()
                    del outcomes  # or an idle worker's thread would keep its last replies in shared memory
                del batch
        finally:
            with self._guard:
                self._alive -= 1
                self._last_alive = time.monotonic()
                for batch in sent:  # none of these has begun, or its time was over
                    self._requeue(batch.tasks.values())

    def _take(self, *, wait: bool, warm: bool) -> list[_Task]:
        """Take the next batch out of the queue; empty if there is none, or, when waiting, the grid closes.

        Who does not wait has a batch on its way already, and gets no client that has to be alone.
        """
        with self._guard:
            while True:
                if self._closing:
                    return []
                found: list[_Task] = []
                skipped: list[_Task] = []
                size = self._batch_size() if warm else 1
                while self._queue and len(found) < size:
                    task = self._queue.popleft()
                    if task.done:
                        continue
                    if task.node in self._busy:
                        skipped.append(task)  # a client's messages are answered one after the other
                        continue
                    if task.solo and (found or not wait):
                        skipped.append(task)
                        break
                    found.append(task)
                    self._busy.add(task.node)
                    if task.solo:
                        break
                self._queue.extendleft(reversed(skipped))
                if found or not wait:
                    return found
                self._guard.wait(_POLL_SECONDS)

    def _batch_size(self) -> int:
        """As many clients as a batch's time allows, fewer towards the end of a round, so that workers end together."""
        if self._seconds is None:
            return 1
        most = _BATCH_SECONDS / self._seconds
        if self._bytes:
            most = min(most, self._share / (8 * len(self._workers) * self._bytes))
        fair = max(len(self._queue) / (2 * len(self._workers)), _LEAST_SECONDS / self._seconds)
        return max(1, int(min(most, fair)))

    def _send(self, actor: Any, number: int, tasks: Sequence[_Task]) -> _Batch:
        with self._guard:
            jobs, contents = [], {}
            for task in tasks:
                records = []
                for name, record in task.records:
                    if isinstance(record, Content):
                        contents[record.number] = record
                        records.append((name, "r", record.number))
                    else:
                        records.append(record)
                jobs.append(Job(internals.head_of(task.message), records, self._states.get(task.node, [])))
        refs = {}
        for key, content in contents.items():
            with self._putting:
                if content.ref is None:
                    content.ref = ray.put(content.arrays)
            refs[key] = content.ref
        ref = actor.run.remote(number, refs, jobs)
        expected = (self._seconds or math.inf) * len(tasks)
        solo = any(task.solo for task in tasks)
        return _Batch(number, dict(enumerate(tasks)), ref, time.monotonic(), expected, solo)

    def _patience(self, batch: _Batch) -> float:
        """Seconds until somebody should look after a batch."""
        now = time.monotonic()
        until = min((task.deadline for task in batch.tasks.values() if not task.done), default=now)
        if not batch.released:
            until = min(until, batch.began + max(_OVERDUE * batch.expected, _OVERDUE_SECONDS))
        return min(max(until - now, 0.01), 1.0)

    def _chase(self, actor: Any, sent: deque[_Batch]) -> bool:
        """Look after batches that take long; False if the actor has to go."""
        now = time.monotonic()
        batch = sent[0]
        over = any(task.done or task.deadline <= now for task in batch.tasks.values())
        late = now > batch.began + max(_OVERDUE * batch.expected, _OVERDUE_SECONDS)
        waiting = len(batch.tasks) + len(sent) > 2
        if not batch.released and (over or (late and waiting)):
            for each in list(sent):
                self._recall(actor, each, sent)
            return True
        if batch.tasks and all(task.done or task.deadline <= now for task in batch.tasks.values()):
            with self._guard:
                for task in batch.tasks.values():
                    self._fail(task, internals.NO_REPLY, "did not answer in time")
            logger.warning("a worker is replaced: its client did not answer in time")
            return False
        return True

    def _recall(self, actor: Any, batch: _Batch, sent: deque[_Batch]) -> None:
        """Take back what a worker has not begun, and what it has finished."""
        batch.released = True
        with contextlib.suppress(RayError):
            try:
                status, running, done = ray.get(actor.release.remote(batch.number), timeout=5)
            except GetTimeoutError:
                return  # the client holds the interpreter; its deadline decides
            if status == "finished":
                return
            rest = {i: t for i, t in batch.tasks.items() if i not in running}
            batch.tasks = {i: batch.tasks[i] for i in running}
            self._retire(_Batch(batch.number, rest, None, 0.0, 0.0), done)
            if status == "unstarted":
                sent.remove(batch)

    def _learn(self, batch: _Batch, seconds: float | None, outcomes: Sequence[Outcome]) -> None:
        """Keep a running mean of what a client costs; the first batch of an actor also loads its data."""
        if not outcomes or batch.released:
            return
        with self._guard:
            if seconds is not None:
                # Sums, not ratios, so that small batches with their fixed costs do not count like large ones.
                self._spent = 0.9 * self._spent + seconds
                self._answered = 0.9 * self._answered + len(outcomes)
                self._seconds = max(self._spent / self._answered, 1e-6)
            each = sum(wire.size(o.content) for o in outcomes) / len(outcomes)
            self._bytes = max(each, 0.9 * self._bytes)

    def _retire(self, batch: _Batch, outcomes: Sequence[Outcome], error: Exception | None = None) -> None:
        """Deliver a batch's outcomes; what is missing goes back into the queue, or fails with `error`."""
        size = sum(wire.size(o.content) for o in outcomes)
        lease = None
        with self._guard:
            while self._returned:
                self._shared -= self._returned.popleft()
            own = any(task.own for task in batch.tasks.values())
            if size and not own and self._shared + size <= self._share:
                self._shared += size
                lease = _Lease()
                weakref.finalize(lease, self._returned.append, size).atexit = False
        with self._guard:
            for outcome in outcomes:
                task = batch.tasks.pop(outcome.number)
                self._busy.discard(task.node)
                self._deliver(task, outcome, lease)
            if error is not None:
                # Something of one client cannot travel, a metric that cannot be pickled, say: alone it is known.
                cause = getattr(error, "cause", None) or error
                for task in batch.tasks.values():
                    if len(batch.tasks) == 1:
                        self._busy.discard(task.node)
                        self._fail(task, internals.CLIENT_CRASHED, f"{type(cause).__name__}: {cause}"[:600])
                    task.solo = True
            self._requeue(batch.tasks.values())

    def _bury(self, batch: _Batch, error: Exception) -> None:
        """An actor died over a batch: its clients run again one by one, and one that dies alone is to blame."""
        logger.warning("a worker died and is replaced: %s", " ".join(str(error).split())[:300])
        with self._guard:
            for task in batch.tasks.values():
                task.deaths += 1
                if task.deaths > 1 and len(batch.tasks) == 1:
                    reason = "its process died twice: " + " ".join(str(error).split())[:300]
                    self._busy.discard(task.node)
                    self._fail(task, internals.CLIENT_CRASHED, reason)
                task.solo = True
            self._requeue(batch.tasks.values())

    def _requeue(self, tasks: Iterable[_Task]) -> None:
        with self._guard:
            for task in tasks:
                self._busy.discard(task.node)
                if not task.done:
                    self._queue.appendleft(task)
            self._guard.notify_all()


def _start_ray(init_args: Mapping[str, Any]) -> None:
    quiet_ray()
    # "local": not the cluster that somebody else may have started on this machine.
    args = {"address": "local", "include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    args.update((key, value) for key, value in init_args.items() if value is not None)
    _probe(str(args["address"]))
    try:
        with one_arena():
            ray.init(**args)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        if args["address"] == "local":
            raise ConfigError(
                f"Ray does not start ({reason}); see simulation.num_cpus and simulation.object_store_mb."
            ) from error
        raise ConfigError(
            f"the Ray cluster at {args['address']} cannot be used ({reason}); start one with `ray start --head`, or "
            "set simulation.address=null."
        ) from error


def _probe(address: str) -> None:
    """Refuse a host and port where nobody listens at once; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"nobody answers at simulation.address={address} ({error}); start Ray there with `ray start --head`, or "
            "set simulation.address=null."
        ) from error


def _capacity(resources: Mapping[str, float]) -> tuple[int, float]:
    """Return how many clients fit into the cluster at a time, node by node, and the bytes of our object store."""
    cpus, gpus = resources["num_cpus"], resources["num_gpus"]
    size, largest, store = 0, {"CPU": 0.0, "GPU": 0.0}, 0.0
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has = node["Resources"]
        fits = [math.floor(has.get(kind, 0) / n + 1e-9) for kind, n in (("CPU", cpus), ("GPU", gpus)) if n > 0]
        size += min(fits, default=1)
        largest = {kind: max(largest[kind], has.get(kind, 0)) for kind in largest}
        if node["NodeID"] == here:
            store = has.get("object_store_memory", 0.0)
    if size == 0:
        raise ConfigError(
            f"no client fits into the Ray cluster: one needs {cpus:g} CPUs and {gpus:g} GPUs, and no node has more "
            f"than {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs; lower simulation.client_cpus or client_gpus."
        )
    return size, store


def _worker_factory(
    app: ClientApp, run_id: int, num_clients: int, run_config: Mapping[str, Any], resources: Mapping[str, float]
) -> Any:
    """Return a function that starts a worker: at once, or as soon as the cluster has room."""
    kind = ray.remote(concurrency_groups={"control": 1})(ClientWorker)
    stored = ray.put(app)
    return lambda: kind.options(**resources, max_restarts=0).remote(stored, run_id, num_clients, dict(run_config))
