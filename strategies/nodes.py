"""The nodes of a grid as the clients of a strategy, and which message each of them answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Message, Metadata
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.serverapp import Grid

# How often a grid is asked for its nodes while a strategy waits for more.
_POLL_SECONDS = 1.0


class GridClientManager(SimpleClientManager):
    """The nodes of a grid as the clients of a strategy; it is asked for them anew each time.

    Parameters
    ----------
    grid : Grid
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def num_available(self) -> int:
        """Return how many nodes there are."""
        return len(self.all())

    def all(self) -> dict[str, ClientProxy]:
        """Return all nodes, by their ids."""
        nodes = {str(node): node for node in self.grid.get_node_ids()}
        for cid in [cid for cid in self.clients if cid not in nodes]:
            del self.clients[cid]
        for cid, node in nodes.items():
            if cid not in self.clients:
                self.clients[cid] = GridClientProxy(node, self.grid, self.grid.run.run_id)
        return dict(self.clients)

    def wait_for(self, num_clients: int, timeout: int = 86400) -> bool:
        """Wait until there are so many nodes, or `timeout` seconds."""
        until = time.monotonic() + timeout
        while (enough := self.num_available() >= num_clients) is False and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return enough


@dataclass
class Asked:
    """The messages of a round: their metadata, which get their ids when they are sent, and whom they went to."""

    number: int
    clients: list[tuple[Metadata, ClientProxy]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.clients)

    def finder(self) -> Callable[[Message], int | None]:
        """Return a function that says which of the messages a reply answers.

        By the message's id, since an error may come from the SuperLink, for a node that it cannot reach. A grid that
        gives no ids is told by its nodes alone.
        """
        ids = {metadata.message_id: i for i, (metadata, _) in enumerate(self.clients) if metadata.message_id}
        nodes = {metadata.dst_node_id: i for i, (metadata, _) in enumerate(self.clients)}

        def find(reply: Message) -> int | None:
            answers, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            i = ids.get(answers) if ids and answers else nodes.get(sender)
            genuine = i is not None and (reply.has_error() or self.clients[i][0].dst_node_id == sender)
            return i if genuine else None

        return find
