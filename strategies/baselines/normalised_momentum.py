"""NormalisedMomentum: CRAFT without its constraint, the ablation that shows what the constraint adds.

Per layer the previous direction and the mean update, both at unit length, are added; nothing else of CRAFT is left.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..base import UpdateStrategy
from ..craft import SCALES
from ..layers import Layer
from ..options import require_choice
from ..updates import ClientUpdates, LayerDirection


class NormalisedMomentum(UpdateStrategy):
    """ĝ_q + ḡ_q / ‖ḡ_q‖ per layer q, at the length CRAFT's directions have.

    Parameters
    ----------
    server_lr : float
        Step, as CRAFT's.
    scale : {"raw", "mean_norm"}
        Length of a layer's direction: 1, or Σ ρ_i ‖g_i‖.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers = ("reference",)
    individual = False

    def __init__(self, *, server_lr: float = 0.1, scale: Literal["raw", "mean_norm"] = "raw", **common: Any) -> None:
        super().__init__(server_lr=server_lr, **common)
        require_choice("scale", scale, SCALES)
        self.scale = scale
        self.individual = self.individual or scale == "mean_norm"  # whose length is the clients' mean length

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Add the two and scale; a layer that no client has changed does not move."""
        mean = updates.combine(layer, updates.weights)
        size = updates.weights @ mean.squared_norms.sqrt()
        norm = torch.linalg.vector_norm(mean.vector)
        # The mean of updates that cancel is rounding error, and must not be scaled up.
        if not bool(norm > 1e-14 * size):
            return mean.scaled(torch.zeros_like(norm))
        reference = self.memory.get(f"reference/{layer.name}")
        direction = mean.scaled(1 / norm)
        if reference is not None:
            direction = updates.combine(layer, updates.weights / norm, reference)
        length = torch.linalg.vector_norm(direction.vector)
        real = length > 1e-12
        unit = direction.scaled(torch.where(real, 1 / torch.where(real, length, 1.0), 0.0))
        return unit.scaled(size if self.scale == "mean_norm" else torch.ones_like(size)).remembering(
            reference=unit.vector
        )
