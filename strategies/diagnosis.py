"""Diagnosis: what a round's direction means to each client, in numbers.

Inner products only, gathered while the direction is formed, so no further read of the updates is needed.
"""

from __future__ import annotations

import math

import torch
from flwr.common import Scalar
from torch import Tensor

from .updates import LayerDirection


class Diagnosis:
    """Collects, layer by layer, how the direction treats each client."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        self._products = torch.zeros_like(weights)
        self._mean_products = torch.zeros_like(weights)
        self._squared = torch.zeros((), dtype=torch.float64, device=weights.device)
        self._alignment: list[Tensor] = []
        self._reported: dict[str, list[Tensor]] = {}

    def add(self, direction: LayerDirection) -> None:
        """Take in one layer."""
        self._products += direction.products
        self._mean_products += direction.mean_products
        self._squared += direction.vector @ direction.vector
        norms = direction.squared_norms.sqrt()
        aligned = torch.where(norms > 0, direction.products / norms, torch.inf)
        self._alignment.append(aligned.min())
        for key, value in direction.diagnostics.items():
            self._reported.setdefault(key, []).append(value.to(torch.float64))

    def metrics(self) -> dict[str, Scalar]:
        """Round metrics.

        A client is in conflict with a vector if its whole update has a negative inner product with it:
        `conflict_share_before` with the plain mean, `conflict_share_after` with the direction taken.
        `min_alignment` is the smallest component of a layer's direction along a client's unit update.
        `residual` is the largest over layers, `rank` the smallest.
        """
        mean_squared = self._weights @ self._mean_products
        norm = self._squared.sqrt()
        alignment = torch.stack(self._alignment).min() if self._alignment else norm
        values = torch.stack(
            [
                (self._mean_products < 0).to(torch.float64).mean(),
                (self._products < 0).to(torch.float64).mean(),
                alignment,
                norm,
                (self._weights @ self._products) / (norm * mean_squared.clamp(min=0).sqrt()),
            ]
        ).tolist()
        keys = ("conflict_share_before", "conflict_share_after", "min_alignment", "direction_norm", "cosine_to_mean")
        # A quantity without meaning this round (no update at all, so no angle) is left out.
        metrics: dict[str, Scalar] = {k: v for k, v in zip(keys, values, strict=True) if math.isfinite(v)}
        for key, tensors in self._reported.items():
            stacked = torch.stack(tensors)
            metrics[key] = int(stacked.min()) if key == "rank" else float(stacked.max())
        return metrics
