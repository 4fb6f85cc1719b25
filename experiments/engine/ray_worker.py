"""ClientWorker: the process that runs clients: batches of messages in, replies out, one client at a time."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import FitIns

from . import internals, wire
from .virtual import FIRST_NODE

# Contents whose bytes a worker keeps: the global model of this round and of those that overlap with it.
_KEPT_CONTENTS = 4
# Characters of an error message kept.
_TEXT = 2000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Job(NamedTuple):
    """A message for one client, as plain values."""

    head: internals.Head
    content: list[wire.PackedRecord]
    state: list[wire.PackedRecord]


class Outcome(NamedTuple):
    """What became of a job: a reply or an error, and the client's new state (None: unchanged)."""

    number: int
    head: internals.Head | None
    content: list[wire.PackedRecord]
    error: tuple[int, str, str] | None
    """(code, reason, traceback)"""
    state: list[wire.PackedRecord] | None


@dataclass
class _Batch:
    """A batch in progress."""

    pending: deque[int]
    running: list[int] = field(default_factory=list)
    done: list[Outcome] = field(default_factory=list)


class ClientWorker:
    """Runs a client app's clients in a process of its own.

    `run` executes; `release`, called from another thread while it does, takes finished replies and hands back
    the clients that have not begun.
    """

    def __init__(self, app: ClientApp, run_id: int, num_clients: int, run_config: Mapping[str, Any]) -> None:
        _keep_freed_memory()
        self._app = app
        self._run_id = run_id
        self._num_clients = num_clients
        self._run_config = dict(run_config)
        self._contents: dict[int, list[wire.StoredArray]] = {}
        self._lock = threading.Lock()
        self._open: dict[int, _Batch] = {}
        self._recalled: set[int] = set()
        self._last = -1
        gc.freeze()  # what is loaded by now stays: the collector need not look at it again and again

    def ready(self) -> bool:
        """Answer once the worker is there."""
        return True

    def run(self, number: int, contents: Mapping[int, Any], jobs: Sequence[Job]) -> tuple[float, list[Outcome]]:
        """Run the jobs of a batch; batches have rising numbers.

        Returns
        -------
        (float, list of Outcome)
            Seconds, and the outcomes not handed out by `release` before.
        """
        began = time.perf_counter()
        with self._lock:
            self._last = number
            if number in self._recalled:
                self._recalled.discard(number)
                return 0.0, []
            batch = self._open[number] = _Batch(deque(range(len(jobs))))
        try:
            self._load(contents)
            together = getattr(self._app, "fit_many", None)
            while True:
                with self._lock:
                    if not batch.pending:
                        break
                    batch.running = list(batch.pending) if together else [batch.pending[0]]
                    for _ in batch.running:
                        batch.pending.popleft()
                running = {i: jobs[i] for i in batch.running}
                found = self._fit_many(running) if together else []
                for outcome in found:
                    del running[outcome.number]
                found += [self._answer(i, job) for i, job in running.items()]
                with self._lock:
                    batch.done += found
                    batch.running = []
            with self._lock:
                return time.perf_counter() - began, batch.done
        finally:
            with self._lock:
                del self._open[number]

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def release(self, number: int) -> tuple[str, list[int], list[Outcome]]:
        """Give a batch back as far as possible.

        Returns
        -------
        (str, list of int, list of Outcome)
            "finished": `run` has returned or is about to; nothing changes. "unstarted": no job of it has begun
            and none will. "running": the indices of the jobs in progress, if any, which `run` will still return,
            and the outcomes so far, which it will not; jobs in neither have not begun and will not.
        """
        with self._lock:
            batch = self._open.get(number)
            if batch is None and number > self._last:
                self._recalled.add(number)
                return "unstarted", [], []
            if batch is None or not (batch.running or batch.pending):
                return "finished", [], []
            done, batch.done = batch.done, []
            batch.pending.clear()
            return "running", list(batch.running), done

    def _load(self, contents: Mapping[int, Any]) -> None:
        """Fetch the contents not at hand, as bytes: Flower's clients know nothing else."""
        missing = [key for key in contents if key not in self._contents]
        found = ray.get([contents[key] for key in missing]) if missing else []
        for key, arrays in zip(missing, found, strict=True):
            self._contents[key] = [(*a[:4], a[4].tobytes()) for a in arrays]
        for key in [k for k in self._contents if k not in contents][: max(0, len(self._contents) - _KEPT_CONTENTS)]:
            del self._contents[key]

    def _fit_many(self, jobs: Mapping[int, Job]) -> list[Outcome]:
        """Train clients that received the same at once, where the app can; the others are left out."""
        groups: list[tuple[int, FitIns, list[int]]] = []
        for index, job in jobs.items():
            found = wire.unpack_fit(job.content, self._contents) if job.head[internals.KIND] == "train" else None
            if found is None:
                continue
            number, ins = found
            for other, theirs, members in groups:
                if number == other and _same(ins.config, theirs.config):
                    members.append(index)
                    break
            else:
                groups.append((number, ins, [index]))
        outcomes: list[Outcome] = []
        for _, ins, members in groups:
            contexts = [self._context(jobs[i]) for i in members]
            before = [_snapshot(context.state) for context in contexts]
            try:
                results = self._app.fit_many(ins, contexts)  # type: ignore[attr-defined]
            except BaseException:  # noqa: BLE001  run one by one, the culprit alone fails, and says why
                continue
            for i, result, context, old in zip(members, results or (), contexts, before, strict=False):
                head = internals.reply_head(jobs[i].head)
                outcomes.append(Outcome(i, head, wire.pack_fit(result), None, _news(context, old)))
        return outcomes

    def _answer(self, index: int, job: Job) -> Outcome:
        """Hand a message to the app, as Flower would."""
        message = internals.message_of(job.head, wire.unpack(job.content, self._contents))
        context = self._context(job)
        before = _snapshot(context.state)
        internals.identify(self._run_id, context.node_id)
        try:
            reply = _call(self._app, message, context)
            return _outcome(index, reply, _news(context, before))
        except Exception as error:  # noqa: BLE001  a client can leave anything in its reply and its state
            return _outcome(index, error, None)

    def _context(self, job: Job) -> Context:
        node = job.head[internals.DESTINATION]
        return internals.context(
            self._run_id,
            node,
            node - FIRST_NODE,
            self._num_clients,
            state=wire.unpack(job.state) if job.state else RecordDict(),
            run_config=dict(self._run_config),
        )


def _call(app: ClientApp, message: Message, context: Context) -> Message | BaseException:
    try:
        return app(message=message, context=context)
    except BaseException as error:  # noqa: BLE001  a client can raise anything
        return error


def _outcome(index: int, reply: Any, state: list[wire.PackedRecord] | None) -> Outcome:
    try:
        if isinstance(reply, Message):
            if reply.has_error():
                error = (reply.error.code, reply.error.reason or "", "")
                return Outcome(index, internals.head_of(reply), [], error, state)
            return Outcome(index, internals.head_of(reply), wire.pack(reply.content), None, state)
        if not isinstance(reply, BaseException):
            raise TypeError(f"the client app returned {type(reply).__name__}, not a Message")
    except Exception as error:  # noqa: BLE001  a client's reply can be anything
        reply = error
    # What a client stored before it raised stays stored, as it does on a real node.
    return Outcome(index, None, [], (internals.CLIENT_RAISED, *_words(reply)), state)


def _words(error: BaseException) -> tuple[str, str]:
    """Say what was raised, and where; of endless texts the beginning, or the end."""
    try:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  an exception's own text can raise
        text = trace = "(its text cannot be made)"
    return f"{type(error).__name__}: {text[:_TEXT]}", trace[-10 * _TEXT :]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Types count: True equals 1, and is no round.
    return one == other and all(type(one[key]) is type(other[key]) for key in one)


def _news(context: Context, before: Snapshot) -> list[wire.PackedRecord] | None:
    """Return a client's state if it has changed."""
    return wire.pack(context.state) if _snapshot(context.state) != before else None


Snapshot = dict[str, tuple[str, dict[str, Any]]]


def _snapshot(state: RecordDict) -> Snapshot:
    """Hold on to a state as it is now: arrays by their bytes, which never change, everything else by a copy."""
    return {
        name: ("a", {k: (a.dtype, a.shape, a.stype, a.data) for k, a in record.items()})
        if isinstance(record, ArrayRecord)
        else (type(record).__name__, copy.deepcopy(internals.plain(record)))
        for name, record in state.items()
    }


def _keep_freed_memory() -> None:
    """Let glibc keep what a client frees, for the next one: every fresh page costs a fault."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
