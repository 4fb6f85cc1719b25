"""OracleFedAvg: FedAvg told who is contaminated; what a robust method can reach at best, for studies only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import UpdateStrategy
from ..layers import Layer
from ..options import is_integer, require
from ..updates import ClientUpdates, LayerDirection


class OracleFedAvg(UpdateStrategy):
    """The weighted mean of the clients that are known to be benign.

    Parameters
    ----------
    contaminated : sequence of int or str
        Who is not: partition ids, where clients are known by them, or client ids.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If `contaminated` is not a list of ids.
    """

    def __init__(self, *, contaminated: Sequence[int | str] = (), **common: Any) -> None:
        super().__init__(**common)
        several = isinstance(contaminated, Sequence) and not isinstance(contaminated, str)
        fine = several and all(is_integer(cid) or isinstance(cid, str) for cid in contaminated)
        require("contaminated", contaminated, "a list of client numbers or ids", fine)
        self.contaminated = list(contaminated)
        self._names = {str(cid) for cid in contaminated} | {f"partition {cid}" for cid in contaminated}

    def shares(self, updates: ClientUpdates) -> Tensor:
        """Return ρ over the benign clients, (m,); 0 for the others.

        Raises
        ------
        ArithmeticError
            If there is none in the round.
        """
        benign = [name not in self._names for name in self.identities(updates)]
        if not any(benign):
            raise ArithmeticError("no benign client is in the round")
        among = torch.tensor(benign, device=updates.device)
        shares = updates.weights * among
        return updates.limited(shares / shares.sum(), among)

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return Σ ρ_i g_i over them."""
        return updates.combine(layer, self.shares(updates))
