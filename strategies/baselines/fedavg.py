"""FedAvg: the mean update, weighted by the clients' numbers of examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1: θ ← Σ ρ_i θ_i, here θ ← θ + server_lr · Σ ρ_i (θ_i − θ).
"""

from __future__ import annotations

from ..base import UpdateStrategy
from ..layers import Layer
from ..updates import ClientUpdates, LayerDirection


class FedAvg(UpdateStrategy):
    """Federated averaging; with `server_lr=1` the plain weighted mean of the clients' models.

    Parameters are those of `UpdateStrategy`.
    """

    individual = False

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return ḡ = Σ ρ_i g_i."""
        return updates.combine(layer, updates.weights)
