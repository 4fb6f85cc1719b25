"""ClientSampler: waits for the clients a round needs, sorts them, and draws some by a seed.

Flower draws with the global `random` from random node ids, so a seed does not reproduce its samples. Here the
clients of a round depend on the seed, the round's number and the clients present only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from .updates import client_order

logger = logging.getLogger(__name__)

# How often the number of connected clients is looked at while waiting for them.
_POLL_SECONDS = 0.2

Size = Callable[[int], tuple[int, int]]
"""Maps the number of connected clients to (clients to draw, clients that must be connected)."""
PartitionOrder = Callable[[Sequence[ClientProxy]], Mapping[str, int]]


class NotEnoughClients(RuntimeError):
    """Fewer clients are connected than a round needs, and no more are coming."""


class ClientSampler:
    """Draws clients in canonical order.

    Parameters
    ----------
    seed : int
        ≥ 0.
    partition_order : callable, optional
        Maps clients not seen before to partition ids; None: clients are known by their ids alone.
    wait_timeout : float
        Seconds without a new client after which waiting ends.
    """

    def __init__(self, seed: int, partition_order: PartitionOrder | None, wait_timeout: float) -> None:
        self.seed = seed
        self.wait_timeout = wait_timeout
        self._partition_order = partition_order
        self._partitions: dict[str, int] = {}
        self._asked: set[str] = set()

    def order(self, cid: str) -> tuple[int, int, str]:
        """Sort key of a client: its partition if known, else its id."""
        if cid in self._partitions:
            return 0, self._partitions[cid], cid
        group, value, text = client_order(cid)
        return 1 + group, value, text

    def identity(self, cid: str) -> str:
        """Return a name that a client keeps in a resumed run: its partition if known, else its id."""
        return f"partition {self._partitions[cid]}" if cid in self._partitions else cid

    def draw(self, manager: ClientManager, size: Size, *, stream: int, number: int) -> list[ClientProxy]:
        """Draw clients for round `number`, in canonical order; streams are independent.

        Raises
        ------
        NotEnoughClients
            If the clients required are not connected and none has joined for `wait_timeout` seconds.
        """
        clients = self._wait(manager, size)
        if self._partition_order is not None:
            new = [client for cid, client in clients.items() if cid not in self._asked]
            if new:
                self._take(self._partition_order(new), new, clients)
        ids = sorted(clients, key=self.order)
        count = min(size(len(ids))[0], len(ids))
        chosen = np.random.default_rng([self.seed, number, stream]).choice(len(ids), size=count, replace=False)
        return [clients[ids[i]] for i in sorted(chosen)]

    def _take(self, found: Mapping[str, int], new: list[ClientProxy], connected: Mapping[str, ClientProxy]) -> None:
        """Note the partitions of new clients; one that is another's already stays that one's as long as it is there."""
        owners = {self._partitions[cid]: cid for cid in connected if cid in self._partitions}
        for cid in sorted((client.cid for client in new), key=client_order):
            partition = found.get(cid)
            if partition is not None and owners.setdefault(partition, cid) != cid:
                logger.warning(
                    "client %s says that it is partition %d, as client %s does; it is known by its id meanwhile",
                    cid, partition, owners[partition],
                )  # fmt: skip
                continue  # and asked again in the next round
            self._asked.add(cid)
            if partition is not None:
                self._partitions[cid] = partition

    def _wait(self, manager: ClientManager, size: Size) -> dict[str, ClientProxy]:
        """Return the clients connected once they are enough."""
        most, since = -1, time.monotonic()
        while True:
            available = manager.num_available()
            required = size(available)[1]
            if available >= required:
                clients = dict(manager.all())
                if len(clients) >= required:  # some may have left since they were counted
                    return clients
                available = len(clients)
            if available > most:
                most, since = available, time.monotonic()
                logger.info("waiting for clients: %d of %d connected", available, required)
            if time.monotonic() - since > self.wait_timeout:
                raise NotEnoughClients(
                    f"a round needs {required} connected clients but only {available} are there and none has joined "
                    f"for {self.wait_timeout:g} s; start more clients or lower min_available_clients "
                    "(and min_fit_clients)."
                )
            time.sleep(_POLL_SECONDS)
