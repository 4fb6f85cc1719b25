"""CRAFT: conflict-resolved aggregation; the global model moves so that each client gains by its share.

Wang, Liu, Thuerey, "CRAFT: Conflict-Resolved Aggregation for Federated Training", arXiv 2605.21317.
Per layer q the direction solves min ½‖g − ĝ‖² s.t. U g = ρ: rows of U are the clients' unit updates, ρ their
data shares, ĝ the previous direction at unit length (zero in round 1). See `strategies.solvers.craft`.
Everything beyond that is an option, and the defaults are the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .base import UpdateStrategy
from .layers import Layer, LayerMap
from .options import is_real, require, require_choice
from .solvers import craft
from .updates import ClientUpdates, LayerDirection

SCALES = ("raw", "mean_norm")
TARGETS = ("data", "uniform", "loss")
REFERENCES = ("momentum", "zero", "ema")
GRANULARITIES = ("layer", "model")


class CRAFT(UpdateStrategy):
    """Conflict-resolved aggregation.

    Parameters
    ----------
    server_lr : float
        Step. With `scale="raw"` a layer's direction has a length of about 1 whatever the clients' learning
        rate, so this alone sets the step (authors: .1 for CIFAR-10, 1 for CIFAR-100, both ResNet-20).
    server_lr_decay : float
        Factor on the step per round. Clients cannot shrink a raw step, so convergence needs a decay.
    constraint : {"equality", "inequality"}
        U g = ρ, as in the paper, or U g ≥ ρ: no client gets less than its share, but more where ĝ gives more.
    scale : {"raw", "mean_norm"}
        Length of a layer's direction: as solved, or Σ ρ_i ‖g_i‖, the mean length of the layer's updates,
        with which server_lr=1 is natural. The `residual` reported is that of the solve, before scaling.
    targets : {"data", "uniform", "loss"}
        ρ: the clients' shares of the data, equal shares, or ρ_i ∝ n_i F_i^q with F_i the loss of the received
        model on client i's training data, which clients then report as `initial_loss`.
    loss_power : float
        q ≥ 0, for `targets="loss"`; 0 is "data".
    reference : {"momentum", "zero", "ema"}
        ĝ: the previous direction, none, or an exponential moving average of the previous directions at unit
        length, each at unit length itself.
    reference_decay : float
        Weight in [0, 1) of the past in the moving average, for `reference="ema"`; 0 is "momentum".
    granularity : {"layer", "model"}
        One solve for each layer, or one for all of them together.
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
        constraint: Literal["equality", "inequality"] = "equality",
        scale: Literal["raw", "mean_norm"] = "raw",
        targets: Literal["data", "uniform", "loss"] = "data",
        loss_power: float = 1.0,
        reference: Literal["momentum", "zero", "ema"] = "momentum",
        reference_decay: float = 0.9,
        granularity: Literal["layer", "model"] = "layer",
        layers: LayerMap | None = None,
        ridge: float = 0.0,
        rtol: float | None = None,
        device: str | torch.device = "auto",
        **fedavg: Any,
    ) -> None:
        super().__init__(server_lr=server_lr, server_lr_decay=server_lr_decay, layers=layers, device=device, **fedavg)
        craft.check_options(constraint, ridge, rtol)
        require_choice("scale", scale, SCALES)
        require_choice("targets", targets, TARGETS)
        require_choice("reference", reference, REFERENCES)
        require_choice("granularity", granularity, GRANULARITIES)
        require("loss_power", loss_power, "a number of at least 0", is_real(loss_power) and loss_power >= 0)
        ok = is_real(reference_decay) and 0 <= reference_decay < 1
        require("reference_decay", reference_decay, "in [0, 1)", ok)
        self.constraint = constraint
        self.scale = scale
        self.targets = targets
        self.loss_power = loss_power
        self.reference = reference
        self.reference_decay = reference_decay
        self.granularity = granularity
        self.ridge = ridge
        self.rtol = rtol
        if targets == "loss":
            self.requires = ("initial_loss",)

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Solve layer by layer, or once for all layers."""
        rho = self._shares(updates)
        layers = updates.layers.layers
        for group in [layers] if self.granularity == "model" else [(layer,) for layer in layers]:
            yield from self._solve_group(updates, group, rho)

    def _shares(self, updates: ClientUpdates) -> Tensor:
        """Return ρ."""
        if self.targets == "data":
            return updates.weights
        if self.targets == "uniform":
            return torch.full_like(updates.weights, 1 / len(updates))
        losses = updates.reported("initial_loss")
        # Losses enter by their ratios only; with the largest at 1 no power overflows.
        weighted = (
            updates.weights * (losses / losses.max().clamp(min=torch.finfo(losses.dtype).tiny)) ** self.loss_power
        )
        total = weighted.sum()
        return updates.limited(torch.where(total > 0, weighted / torch.where(total > 0, total, 1.0), updates.weights))

    def _solve_group(self, updates: ClientUpdates, group: Sequence[Layer], rho: Tensor) -> list[LayerDirection]:
        """Solve for some layers together, in two reads of their updates: inner products, then the combination.

        Layers that no client has changed do not move, and keep their ĝ for the next round.
        """
        references = self._references(group)
        gram = torch.zeros((len(updates), len(updates)), dtype=torch.float64, device=updates.device)
        cross = torch.zeros_like(rho)
        for layer, reference in zip(group, references, strict=True):
            inner = updates.gram(layer, reference)
            gram += inner.matrix
            cross += inner.cross
        if not bool(gram.diagonal().any()):
            return [updates.combine(layer, torch.zeros_like(rho)) for layer in group]
        narrow = len(group) == 1 and group[0].size < len(updates) and self.constraint == "equality"
        try:
            found = craft.coefficients(
                gram,
                cross,
                rho,
                updates=updates.layer(group[0]) if narrow else None,
                constraint=self.constraint,
                ridge=self.ridge,
                rtol=self.rtol,
            )
        except ValueError as error:
            raise FloatingPointError(f"layer {group[0].name!r}: {error}") from error
        solved = [
            updates.combine(layer, found.coefficients, reference)
            for layer, reference in zip(group, references, strict=True)
        ]
        norm = torch.stack([torch.linalg.vector_norm(direction.vector) for direction in solved]).norm()
        # Where the exact direction is zero (opposite clients with equal shares) rounding leaves a vector that
        # means nothing; it must not be scaled up, now or as the next ĝ.
        size = torch.linalg.vector_norm(rho) + (0.0 if all(vector is None for vector in references) else 1.0)
        real = norm > craft.ROUNDING * len(updates) * torch.finfo(torch.float64).eps * size
        length = rho @ gram.diagonal().sqrt() if self.scale == "mean_norm" else norm
        factor = torch.where(real, length / norm, 0.0)
        unit = torch.where(real, 1 / norm, 0.0)
        report = {"residual": found.residual, "rank": found.rank}
        if self.constraint == "inequality":
            report["kkt"] = found.kkt
        directions = []
        for layer, direction in zip(group, solved, strict=True):
            memory = {} if self.reference == "zero" else {"reference": self._averaged(layer, direction.vector * unit)}
            directions.append(direction.scaled(factor).remembering(**memory).reporting(**report))
            report = {}
        return directions

    def _references(self, group: Sequence[Layer]) -> list[Tensor | None]:
        """Return ĝ of some layers, at unit length together; None where nothing is known yet."""
        kept = [self.memory.get(f"reference/{layer.name}") for layer in group]
        norms = [torch.linalg.vector_norm(vector) for vector in kept if vector is not None]
        if self.reference == "zero" or not norms:
            return [None] * len(group)
        # A moving average is shorter than its parts, and a state may come from another granularity.
        norm = torch.stack(norms).norm()
        return [None if vector is None else vector / torch.where(norm > 0, norm, 1.0) for vector in kept]

    def _averaged(self, layer: Layer, unit: Tensor) -> Tensor:
        previous = self.memory.get(f"reference/{layer.name}")
        if self.reference != "ema" or previous is None:
            return unit
        return self.reference_decay * previous + (1 - self.reference_decay) * unit
