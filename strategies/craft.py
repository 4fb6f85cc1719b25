"""CRAFT: conflict-resolved aggregation; the global model moves so that each client gains by its share.

Wang, Liu, Thuerey, "CRAFT: Conflict-Resolved Aggregation for Federated Training", arXiv 2605.21317.
Per layer q the direction solves min ½‖g − ĝ‖² s.t. U g = ρ: rows of U are the clients' unit updates, ρ their
data shares, ĝ the previous direction at unit length (zero in round 1). See `strategies.solvers.craft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from .base import UpdateStrategy
from .layers import Layer, LayerMap
from .solvers import craft
from .updates import ClientUpdates, LayerDirection

SCALES = ("raw", "mean_norm")


class CRAFT(UpdateStrategy):
    """Conflict-resolved aggregation.

    Parameters
    ----------
    server_lr : float
        Step. With `scale="raw"` a layer's direction has a length of about 1 whatever the clients' learning
        rate, so this alone sets the step (authors: .1 for CIFAR-10, 1 for CIFAR-100, both ResNet-20).
    server_lr_decay : float
        Factor on the step per round. Clients cannot shrink a raw step, so convergence needs a decay.
    constraint : {"equality"}
        U g = ρ, as in the paper.
    scale : {"raw", "mean_norm"}
        Length of a layer's direction: as solved, or Σ ρ_i ‖g_i‖, the mean length of the layer's updates,
        with which server_lr=1 is natural. The `residual` reported is that of the solve, before scaling.
    layers : LayerMap, optional
        The paper's layers are modules: pass `LayerMap.from_module(model)`.
    ridge, rtol
        Regularisation of the solve, see `strategies.solvers.craft.coefficients`.
    device : str or torch.device
    **fedavg
        Keywords of `UpdateStrategy` and of Flower's FedAvg.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers = ("reference",)

    def __init__(
        self,
        *,
        server_lr: float = 0.1,
        server_lr_decay: float = 1.0,
        constraint: Literal["equality"] = "equality",
        scale: Literal["raw", "mean_norm"] = "raw",
        layers: LayerMap | None = None,
        ridge: float = 0.0,
        rtol: float | None = None,
        device: str | torch.device = "auto",
        **fedavg: Any,
    ) -> None:
        super().__init__(server_lr=server_lr, server_lr_decay=server_lr_decay, layers=layers, device=device, **fedavg)
        craft.check_options(constraint, ridge, rtol)
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALES)}.")
        self.constraint = constraint
        self.scale = scale
        self.ridge = ridge
        self.rtol = rtol

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Solve one layer in two reads of its updates: inner products, then the combination.

        A layer that no client has changed does not move, and keeps its ĝ for the next round.
        """
        reference = self.memory.get(f"reference/{layer.name}")
        inner = updates.gram(layer, reference)
        if not bool(inner.matrix.diagonal().any()):
            return updates.combine(layer, torch.zeros_like(updates.weights))
        try:
            found = craft.coefficients(
                inner.matrix,
                inner.cross,
                updates.weights,
                updates=updates.layer(layer) if layer.size < len(updates) else None,
                ridge=self.ridge,
                rtol=self.rtol,
            )
        except ValueError as error:
            raise FloatingPointError(f"layer {layer.name!r}: {error}") from error
        direction = updates.combine(layer, found.coefficients, reference)
        norm = torch.linalg.vector_norm(direction.vector)
        # Where the exact direction is zero (opposite clients with equal shares) rounding leaves a vector that
        # means nothing; it must not be scaled up, now or as the next ĝ.
        size = torch.linalg.vector_norm(updates.weights) + (0.0 if reference is None else 1.0)
        real = norm > craft.ROUNDING * len(updates) * torch.finfo(torch.float64).eps * size
        length = updates.weights @ direction.squared_norms.sqrt() if self.scale == "mean_norm" else norm
        direction = direction.scaled(torch.where(real, length / norm, 0.0))
        return replace(direction, diagnostics={"residual": found.residual, "rank": found.rank})

    def remember(self, layer: Layer, direction: LayerDirection) -> Mapping[str, Tensor]:
        """Keep the direction at unit length: the next round's ĝ."""
        if "rank" not in direction.diagnostics:
            return {}
        norm = torch.linalg.vector_norm(direction.vector)
        return {f"reference/{layer.name}": direction.vector / torch.where(norm > 0, norm, 1.0)}
