"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335: v ← βv + ḡ, θ ← θ + server_lr · v.
"""

from __future__ import annotations

from typing import Any

from ..base import UpdateStrategy
from ..layers import Layer
from ..options import is_real, require
from ..updates import ClientUpdates, LayerDirection


class FedAvgM(UpdateStrategy):
    """Federated averaging with server momentum.

    Parameters
    ----------
    server_momentum : float
        β in [0, 1); 0 is FedAvg.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If β lies outside [0, 1).
    """

    remembers = ("velocity",)
    individual = False

    def __init__(self, *, server_momentum: float = 0.9, **common: Any) -> None:
        super().__init__(**common)
        require("server_momentum", server_momentum, "in [0, 1)", is_real(server_momentum) and 0 <= server_momentum < 1)
        self.server_momentum = server_momentum

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return v = βv + ḡ."""
        velocity = self.memory.get(f"velocity/{layer.name}")
        direction = updates.combine(layer, updates.weights, velocity, self.server_momentum)
        return direction.remembering(velocity=direction.vector)
