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

from . import internals, wire
from .virtual import FIRST_NODE

# Contents whose bytes a worker keeps: the global model of this round and of those that overlap with it.
_KEPT_CONTENTS = 4
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
            together = getattr(self._app, "batch", None)
            while True:
                with self._lock:
                    if not batch.pending:
                        break
                    batch.running = list(batch.pending) if together else [batch.pending[0]]
                    for _ in batch.running:
                        batch.pending.popleft()
                found = self._answer([jobs[i] for i in batch.running], batch.running, together)
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
            and none will. "running": the indices of the jobs in progress, which `run` will still return, and
            the outcomes so far, which it will not; jobs in neither have not begun and will not.
        """
        with self._lock:
            batch = self._open.get(number)
            if batch is None and number > self._last:
                self._recalled.add(number)
                return "unstarted", [], []
            if batch is None or not batch.running:
                return "finished", [], []
            done, batch.done = batch.done, []
            batch.pending.clear()
            return "running", batch.running, done

    def _load(self, contents: Mapping[int, Any]) -> None:
        """Fetch the contents not at hand, as bytes: Flower's clients know nothing else."""
        missing = [key for key in contents if key not in self._contents]
        for key, arrays in zip(missing, ray.get([contents[key] for key in missing]), strict=True):
            self._contents[key] = [(*a[:4], a[4].tobytes()) for a in arrays]
        for key in [k for k in self._contents if k not in contents][: max(0, len(self._contents) - _KEPT_CONTENTS)]:
            del self._contents[key]

    def _answer(self, jobs: Sequence[Job], indices: Sequence[int], together: Any) -> list[Outcome]:
        messages, contexts, before = [], [], []
        for job in jobs:
            messages.append(internals.message_of(job.head, wire.unpack(job.content, self._contents)))
            contexts.append(self._context(messages[-1].metadata.dst_node_id, job.state))
            before.append(_snapshot(contexts[-1].state))
        internals.identify(self._run_id, messages[0].metadata.dst_node_id)
        if together:
            replies = together(messages, contexts)
        else:
            replies = [_call(self._app, m, c) for m, c in zip(messages, contexts, strict=True)]
        outcomes = []
        for index, reply, context, old in zip(indices, replies, contexts, before, strict=True):
            state = wire.pack(context.state) if _snapshot(context.state) != old else None
            outcomes.append(_outcome(index, reply, state))
        return outcomes

    def _context(self, node: int, state: list[wire.PackedRecord]) -> Context:
        return internals.context(
            self._run_id,
            node,
            node - FIRST_NODE,
            self._num_clients,
            state=wire.unpack(state) if state else RecordDict(),
            run_config=dict(self._run_config),
        )


def _call(app: ClientApp, message: Message, context: Context) -> Message | BaseException:
    try:
        return app(message=message, context=context)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a client can raise anything
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
    trace = "".join(traceback.format_exception(reply))
    # What a client stored before it raised stays stored, as it does on a real node.
    return Outcome(index, None, [], (internals.CLIENT_RAISED, f"{type(reply).__name__}: {reply}", trace), state)


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
