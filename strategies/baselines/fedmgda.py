"""FedMGDA+: the common descent direction of the clients' unit updates, near their data shares.

Hu et al., "Federated Learning Meets Multi-objective Optimization", IEEE Transactions on Network Science and
Engineering 2022, arXiv 2006.11489, algorithm 1: min ‖Σ λ_i u_i‖² over the simplex with |λ_i − ρ_i| ≤ ε, where
u_i = g_i / ‖g_i‖; θ ← θ + server_lr Σ λ_i u_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..options import is_real, require
from ..solvers import qp
from ..span import SpanStrategy
from ..updates import ClientUpdates


class FedMGDA(SpanStrategy):
    """FedMGDA+.

    A client whose update is zero has no direction: its weight counts, its update adds nothing.

    Parameters
    ----------
    server_lr : float
        Step. With unit updates the direction has a length of at most 1, so this sets the step.
    epsilon : float
        ε in [0, 1]: how far a weight may lie from the client's data share. 1 allows any weight, 0 only ρ.
    normalise : bool
        Whether updates enter at unit length. Without, and with ε = 0, this is FedAvg.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    def __init__(self, *, epsilon: float = 0.1, normalise: bool = True, **common: Any) -> None:
        super().__init__(**common)
        require("epsilon", epsilon, "in [0, 1]", is_real(epsilon) and 0 <= epsilon <= 1)
        require("normalise", normalise, "true or false", isinstance(normalise, bool))
        self.epsilon = epsilon
        self.normalise = normalise

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return λ_i / ‖g_i‖, and how far λ is from optimal."""
        gram = updates.whole_gram()
        norms = gram.diagonal().sqrt()
        inverse = torch.where(norms > 0, 1 / torch.where(norms > 0, norms, 1.0), 0.0)
        if not self.normalise:
            inverse = torch.ones_like(norms)
        lower = (updates.weights - self.epsilon).clamp(min=0)
        upper = (updates.weights + self.epsilon).clamp(max=updates.largest_share)
        found = qp.box_simplex(gram * inverse[:, None] * inverse, lower, upper)
        return found.x * inverse, {"kkt": found.kkt}
