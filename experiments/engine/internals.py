"""Everything here that touches Flower's internals: identities, metadata, records without checks, legacy results.

Flower promises none of it. `tests/experiments/test_flower_internals.py` fails at once when a new Flower breaks one.
"""

from __future__ import annotations

import copy
import functools
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.common import Code, EvaluateIns, FitIns, FitRes, Parameters, Status
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SType
from flwr.compat.common import recorddict_compat as compat
from flwr.server import server
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.supercore.date import now
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from strategies.updates import UnusableTensor, decode

CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
CLIENT_CRASHED = ErrorCode.CLIENT_APP_CRASHED
NO_REPLY = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
_UNUSED = 3
NO_NODE = ErrorCode.NODE_UNAVAILABLE
EMPTY = compat.EMPTY_TENSOR_KEY

Instruction = tuple[ClientProxy, FitIns | EvaluateIns]
Buffer = NDArray[np.uint8]


class SharedArray(Array):
    """An `Array` whose bytes lie in memory that others share, and become bytes of its own when asked for.

    `numpy()` and `buffer` read in place; `data` copies once and lets go of the shared memory. Pickled or copied
    it is an ordinary `Array`.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str, buffer: Buffer) -> None:
        self.__dict__.update(dtype=dtype, shape=shape, stype=stype, _source=buffer)

    @property
    def data(self) -> bytes:
        """The serialized array as bytes."""
        source: bytes | Buffer = self.__dict__["_source"]
        if not isinstance(source, bytes):
            source = self.__dict__["_source"] = source.tobytes()
        return source

    @data.setter
    def data(self, value: bytes) -> None:
        self.__dict__["_source"] = value

    @property
    def buffer(self) -> bytes | Buffer:
        """The serialized array without a copy: read-only bytes, or a view of shared memory."""
        source: bytes | Buffer = self.__dict__["_source"]
        return source

    def numpy(self) -> NDArray[Any]:
        """Return a copy as a NumPy array."""
        try:
            return decode(self.buffer).copy() if self.stype == SType.NUMPY else super().numpy()
        except UnusableTensor:  # no number of ours; Flower reads more
            return super().numpy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape, self.stype, self.data) == (other.dtype, other.shape, other.stype, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Array, (self.dtype, self.shape, self.stype, self.data)


# ---- identities ------------------------------------------------------------------------------------------------


def new_run() -> Run:
    """Make a run with a random id."""
    return Run.create_empty(run_id=uuid.uuid4().int >> 65)


def identify(run_id: int, node_id: int = SUPERLINK_NODE_ID) -> None:
    """Say who creates messages in this process; Flower refuses to create any before."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, node_id


def name(message: Message) -> str:
    """Give a message an id, as the SuperLink would."""
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message.metadata.message_id


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Answer a message with an error."""
    reply = Message(Error(code, reason), reply_to=message)
    name(reply)
    return reply


# ---- messages and records as plain values ----------------------------------------------------------------------

Head = tuple[Any, ...]
"""A message's metadata in the order of `Metadata`'s parameters."""
DESTINATION, KIND = 3, 8
"""Where in a `Head` the receiving node and the message type are."""


def head_of(message: Message) -> Head:
    """Return a message's metadata as plain values."""
    m = message.metadata
    return (
        m.run_id, m.message_id, m.src_node_id, m.dst_node_id, m.reply_to_message_id, m.group_id, m.created_at, m.ttl,
        m.message_type, m.src_task_id, m.dst_task_id,
    )  # fmt: skip


def message_of(head: Head, content: RecordDict) -> Message:
    """Make a message from plain values."""
    metadata = Metadata(*head)
    metadata.delivered_at = ""
    return make_message(metadata=metadata, content=content)


def reply_head(head: Head) -> Head:
    """Return the metadata of a reply to a message with this metadata, as `Message(..., reply_to=...)` makes them."""
    run_id, message_id, src, dst, _, group_id, created_at, ttl, kind, src_task, dst_task = head
    current = now().timestamp()
    return run_id, "", dst, src, message_id, group_id, current, created_at + ttl - current, kind, dst_task, src_task


def answering(head: Head, message: Message) -> Head:
    """Return a reply's metadata, made to answer this message whatever the client put there."""
    mine = reply_head(head_of(message))
    return (*mine[:6], *head[6:9], *mine[9:])


def array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Make an `Array` without its constructor's checks: some microseconds for each of a client's tensors."""
    made = Array.__new__(Array)
    made.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return made


def array_record(items: Iterable[tuple[str, Array]]) -> ArrayRecord:
    """Make an `ArrayRecord` of arrays that need no check, without copying them."""
    record = ArrayRecord()
    record.__dict__["_data"].update(items)
    return record


def record_dict(items: Iterable[tuple[str, ArrayRecord | MetricRecord | ConfigRecord]]) -> RecordDict:
    """Make a `RecordDict` of records that need no check."""
    content = RecordDict()
    content.__dict__["_data"].update(items)
    return content


def detached(content: RecordDict) -> RecordDict:
    """Copy a content as far as a receiver may change it: records and values, but not the arrays' bytes."""
    return record_dict(
        (key, array_record(record.items()) if isinstance(record, ArrayRecord) else copy.deepcopy(record))
        for key, record in content.items()
    )


def plain(record: MetricRecord | ConfigRecord) -> dict[str, Any]:
    """Return a record's entries as a dict."""
    return dict(record)


def metric_record(values: dict[str, Any]) -> MetricRecord:
    """Make a `MetricRecord` of values that came out of one."""
    record = MetricRecord()
    record.__dict__["_data"].update(values)
    return record


def config_record(values: dict[str, Any]) -> ConfigRecord:
    """Make a `ConfigRecord` of values that came out of one."""
    record = ConfigRecord()
    record.__dict__["_data"].update(values)
    return record


def context(run_id: int, node_id: int, partition_id: int, num_partitions: int, **rest: Any) -> Context:
    """Make the context of a virtual client."""
    node_config = {"partition-id": partition_id, "num-partitions": num_partitions}
    return Context(run_id=run_id, node_id=node_id, node_config=node_config, **rest)  # type: ignore[arg-type]


# ---- a legacy round in one exchange ----------------------------------------------------------------------------


class Exchanger(Protocol):
    """A grid that takes a legacy server's round in one call."""

    shares_content: bool
    """Whether messages may share one content object, because clients get copies of it anyway."""
    lends_views: bool
    """Whether strategies get clients' tensors as buffers where they lie; else as bytes, as Flower's expect."""

    def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
        """Send messages and wait for the replies; `own`: their arrays are needed as bytes."""

    def name_of(self, node_id: int) -> str:
        """Say in words which client a node is."""


@contextmanager
def whole_rounds(grid: Exchanger) -> Iterator[None]:
    """While the block runs, Flower's legacy servers send the instructions of a round on `grid` in one call.

    As it is, `flwr.server.Server` sends each by itself, from a few threads, and keeps the results of a round in
    memory until those of the next are complete; here they are let go when the next begins, unless somebody else
    (a strategy) holds on to the list.
    """
    theirs = server_fit, _ = server.fit_clients, server.evaluate_clients
    last: list[list[Any]] = []
    mine: object = grid

    def instead(original: Any) -> Any:
        @functools.wraps(original)
        def clients(
            client_instructions: list[Instruction], max_workers: int | None, timeout: float | None, group_id: int
        ) -> Any:
            if not all(isinstance(p, GridClientProxy) and p.grid is mine for p, _ in client_instructions):
                return original(client_instructions, max_workers, timeout, group_id)
            if original is server_fit:
                # References: `last`, the tuple in the server's frame, and the call's own.
                if last and sys.getrefcount(last[0]) <= _UNUSED:
                    last[0].clear()
                last.clear()
            results, failures = exchange(grid, client_instructions, timeout, group_id)
            if original is server_fit:
                last.append(results)
            return results, failures

        return clients

    server.fit_clients, server.evaluate_clients = map(instead, theirs)
    try:
        yield
    finally:
        server.fit_clients, server.evaluate_clients = theirs


def exchange(
    grid: Exchanger, instructions: Sequence[Instruction], timeout: float | None, group: int
) -> tuple[list[tuple[ClientProxy, Any]], list[Any]]:
    """Send a round's instructions in one call and return (results, failures) as `flwr.server.Server` gathers them.

    Parameters
    ----------
    timeout : float, optional
        Seconds a client may take; Flower's legacy server gives it to the message as its time to live.
    group : int
        The round.
    """
    contents: dict[int, RecordDict] = {}
    messages = []
    proxies: dict[int, ClientProxy] = {}
    for proxy, ins in instructions:
        assert isinstance(proxy, GridClientProxy)
        content = contents.get(id(ins)) if grid.shares_content else None
        if content is None:
            make: Any = compat.fitins_to_recorddict if isinstance(ins, FitIns) else compat.evaluateins_to_recorddict
            content = contents[id(ins)] = make(ins, keep_input=True)
        kind = "train" if isinstance(ins, FitIns) else "evaluate"
        messages.append(Message(content, proxy.node_id, kind, ttl=timeout, group_id=str(group)))
        proxies[proxy.node_id] = proxy
    results: list[tuple[ClientProxy, Any]] = []
    failures: list[Any] = []
    for reply in grid.collect(messages, own=not grid.lends_views):
        node = reply.metadata.src_node_id
        proxy = proxies[node]
        if reply.has_error():
            failures.append(ValueError(f"{grid.name_of(node)}: {reply.error.reason}"))
            continue
        try:
            fit = reply.metadata.message_type == "train"
            result = (
                _fit_result(reply.content, grid.lends_views) if fit else compat.recorddict_to_evaluateres(reply.content)
            )
        except (KeyError, TypeError, ValueError) as error:
            failures.append(ValueError(f"{grid.name_of(node)}: its reply cannot be read ({error!r})"))
            continue
        if result.status.code is Code.OK:
            results.append((proxy, result))
        else:
            failures.append((proxy, result))
    return results, failures


def _fit_result(content: RecordDict, views: bool) -> FitRes:
    if not views:
        return compat.recorddict_to_fitres(content, keep_input=False)
    arrays = content["fitres.parameters"]
    if not isinstance(arrays, ArrayRecord):
        raise TypeError("fitres.parameters is not an ArrayRecord")
    tensors: list[Any] = [a.buffer if isinstance(a, SharedArray) else a.data for k, a in arrays.items() if k != EMPTY]
    kind = next(iter(arrays.values())).stype if arrays else ""
    metrics, status = content["fitres.metrics"], content["fitres.status"]
    return FitRes(
        status=Status(Code(status["code"]), str(status["message"])),
        parameters=Parameters(tensors=tensors, tensor_type=kind),
        num_examples=content["fitres.num_examples"]["num_examples"],  # type: ignore[arg-type]
        metrics=compat._check_mapping_from_recordscalartype_to_scalar(metrics),  # type: ignore[arg-type]
    )
