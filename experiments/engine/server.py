"""RoundServer: Flower's legacy server, except that a round's instructions travel in one call, not one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.common import EvaluateIns, FitIns
from flwr.server import Server
from flwr.server.client_proxy import ClientProxy

from . import internals
from .virtual import FIRST_NODE, VirtualGrid


class RoundServer(Server):
    """A server for our grids: without a thread, a lock and a conversion for each client and message.

    Parameters
    ----------
    grid : VirtualGrid
        The grid the clients are on.
    views : bool
        Hand the strategy the clients' tensors as buffers where they lie, not as bytes. Strategies of this suite
        read both.
    **server
        Keywords of `flwr.server.Server`.
    """

    def __init__(self, grid: VirtualGrid, *, views: bool, **server: Any) -> None:
        super().__init__(**server)
        self._grid = grid
        self._views = views

    def fit_round(self, server_round: int, timeout: float | None) -> Any:
        """Run one round of training; see `flwr.server.Server.fit_round`."""
        instructions = self.strategy.configure_fit(server_round, self.parameters, self._client_manager)
        if not instructions:
            return None
        results, failures = self._exchange(instructions, timeout, server_round)
        del instructions
        parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        return parameters, metrics, ([], failures)

    def evaluate_round(self, server_round: int, timeout: float | None) -> Any:
        """Evaluate the global model on clients; see `flwr.server.Server.evaluate_round`."""
        instructions = self.strategy.configure_evaluate(server_round, self.parameters, self._client_manager)
        if not instructions:
            return None
        results, failures = self._exchange(instructions, timeout, server_round)
        loss, metrics = self.strategy.aggregate_evaluate(server_round, results, failures)
        return loss, metrics, (results, failures)

    def disconnect_all_clients(self, timeout: float | None) -> None:
        """Nothing to do: virtual clients hold no connection."""

    def _exchange(
        self, instructions: Sequence[tuple[ClientProxy, FitIns | EvaluateIns]], timeout: float | None, group: int
    ) -> Any:
        share = self._grid.shares_content
        return internals.exchange(
            self._grid, instructions, timeout, group, share=share, views=self._views, name_of=_name
        )


def _name(proxy: ClientProxy) -> str:
    """A client is known to its strategy by its node id, and to the person by its partition."""
    return f"client {proxy.cid} (partition {int(proxy.cid) - FIRST_NODE})"
