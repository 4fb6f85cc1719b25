"""SerialGrid: the same apps, one client after the other in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import internals, wire
from .virtual import FIRST_NODE, VirtualGrid


class SerialGrid(VirtualGrid):
    """A Flower grid whose clients run in this process, one at a time.

    A message is answered when it is pushed. A client that raises gives an error reply, as on any grid. Each
    client keeps its `Context`, and so its state, across rounds.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int
        Number of nodes; the i-th has `partition-id` i and `num-partitions` num_clients.
    """

    def __init__(self, client_app: ClientApp, num_clients: int) -> None:
        super().__init__(num_clients)
        self._app = client_app
        self._contexts: dict[int, Context] = {}
        # Flower's server sends from several threads; clients share a model and torch's generator.
        self._lock = threading.Lock()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run each message's client now and keep the reply."""
        ids = []
        for message in messages:
            ids.append(internals.name(message))
            if self._refuse_unknown(message):
                continue
            with self._lock, _one_thread():
                reply = self._answer(message)
            with self._guard:
                self._replies[ids[-1]] = reply
        return ids

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run each message's client and return the replies; nothing is left to wait for."""
        return self.pull_messages(self.push_messages(messages))

    def client_states(self) -> dict[int, list[wire.PackedRecord]]:
        """Return what each client that keeps something keeps between rounds, by partition."""
        return {n - FIRST_NODE: wire.pack(context.state) for n, context in self._contexts.items() if context.state}

    def restore_client_states(self, states: Mapping[int, Sequence[wire.PackedRecord]]) -> None:
        """Give clients what they kept."""
        for partition, packed in states.items():
            self._contexts[FIRST_NODE + partition] = self._context(FIRST_NODE + partition, wire.unpack(packed))

    def _context(self, node: int, state: RecordDict) -> Context:
        return internals.context(
            self._run.run_id, node, node - FIRST_NODE, self.num_clients, state=state, run_config={}
        )

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self._contexts:
            self._contexts[node] = self._context(node, RecordDict())
        # As on a wire: what a client changes in its message is nobody else's.
        received = internals.message_of(internals.head_of(message), internals.detached(message.content))
        try:
            reply = self._app(message=received, context=self._contexts[node])
        except (Exception, SystemExit) as error:
            logging.getLogger("flwr").exception("client %d raised", node - FIRST_NODE)
            return internals.error_reply(message, internals.CLIENT_RAISED, f"{type(error).__name__}: {error}")
        internals.name(reply)
        return reply


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give a client one thread, as a worker process does, so that sums have the same order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
