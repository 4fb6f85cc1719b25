"""q-FedAvg: clients with a higher loss weigh more.

Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv 1905.10497, algorithm 2: with F_i the
loss of client i at θ_t, before training, and L = 1/lr, Δ_i = F_i^q L g_i, h_i = q F_i^(q−1) ‖L g_i‖² + L F_i^q and
θ ← θ + ΣΔ_i / Σh_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..options import is_real, require
from ..span import SpanStrategy
from ..updates import ClientUpdates


class QFedAvg(SpanStrategy):
    """q-fair federated averaging.

    Clients are asked for F_i as `initial_loss`. With q = 0 this is FedAvg with equal weights.

    Parameters
    ----------
    q : float
        ≥ 0; the larger, the fairer.
    client_lr : float
        The clients' learning rate, lr > 0: 1/lr estimates the Lipschitz constant L. It stays the same where clients
        decay theirs.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    requires = ("initial_loss",)

    def __init__(self, *, q: float = 0.2, client_lr: float = 0.1, **common: Any) -> None:
        super().__init__(**common)
        require("q", q, "a number of at least 0", is_real(q) and q >= 0)
        ok = is_real(client_lr) and 1e-30 <= client_lr <= 1e30
        require("client_lr", client_lr, "a number from 1e-30 to 1e30", ok)
        self.q = q
        self.client_lr = client_lr

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return F_i^q L / Σh."""
        lipschitz = 1 / self.client_lr
        # Below, a loss of zero would have a power that is not finite; the authors add the same.
        losses = updates.reported("initial_loss") + 1e-10
        # The step depends on ratios of losses only up to this factor, which no power overflows.
        largest = losses.max()
        power = updates.limited((losses / largest) ** self.q)
        h = self.q * power / losses * updates.squared_norms() * lipschitz**2 + lipschitz * power
        return power * lipschitz / h.sum(), {}
