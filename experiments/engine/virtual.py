"""VirtualGrid: what our grids share: nodes numbered by partition, messages, replies that are handed out once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from . import internals, wire
from .internals import Run

FIRST_NODE = 1000
"""Node ids are partition ids plus this; Flower keeps the small numbers for itself."""


class EngineFailed(RuntimeError):
    """No client can run any more; the message says why."""


class VirtualGrid(Grid):
    """A Flower grid whose nodes are the partitions of one client app.

    Parameters
    ----------
    num_clients : int
        Number of nodes; node `FIRST_NODE` + i has `partition-id` i and `num-partitions` num_clients.

    Attributes
    ----------
    lends_views : bool
        Whether a legacy server's strategy gets clients' tensors as buffers where they lie; else as bytes, as
        Flower's strategies expect. Those of this suite read both.
    """

    shares_content: bool = False
    lends_views: bool = False

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._nodes = range(FIRST_NODE, FIRST_NODE + num_clients)
        self._replies: dict[str, Message] = {}
        self._guard = threading.Condition()
        self.set_run(internals.new_run())

    def set_run(self, run: Run) -> None:
        """Name the run that messages belong to."""
        self._run = run
        internals.identify(run.run_id)

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message; Flower's own constructor does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes, in partition order; all are there from the start."""
        return list(self._nodes)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand out the replies to these messages, once."""
        with self._guard:
            return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
        """Send messages and wait for the replies; `own`: their arrays are needed as bytes."""
        return self.send_and_receive(messages)

    def name_of(self, node_id: int) -> str:
        """Say in words which client a node is: strategies know the node id, people the partition."""
        return f"client {node_id} (partition {node_id - FIRST_NODE})"

    def client_states(self) -> dict[int, list[wire.PackedRecord]]:
        """Return what each client that keeps something keeps between rounds, by partition; no client may be running."""
        raise NotImplementedError

    def restore_client_states(self, states: Mapping[int, Sequence[wire.PackedRecord]]) -> None:
        """Give clients what they kept, as `client_states` has returned it, before any has been asked for anything."""
        raise NotImplementedError

    def _refuse_unknown(self, message: Message) -> bool:
        """Answer a message to a node that does not exist with an error."""
        if message.metadata.dst_node_id in self._nodes:
            return False
        reason = f"there is no node {message.metadata.dst_node_id}; there are {self.num_clients}."
        with self._guard:
            self._replies[message.metadata.message_id] = internals.error_reply(message, internals.NO_NODE, reason)
        return True
