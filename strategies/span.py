"""SpanStrategy: methods that move the whole model along Σ α_i g_i, with one α for all layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from torch import Tensor

from .base import UpdateStrategy
from .updates import ClientUpdates, LayerDirection


class SpanStrategy(UpdateStrategy):
    """Base of methods that only weight the clients; parameters are those of `UpdateStrategy`."""

    @abstractmethod
    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return α, (m,), float64, and 0-d tensors to report.

        Raises
        ------
        ArithmeticError
            If there is no usable α: the round fails with its message, and the model stays.
        """

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Combine each layer with the same coefficients."""
        alpha, diagnostics = self.coefficients(updates)
        for layer in updates.layers.layers:
            yield updates.combine(layer, alpha).reporting(**diagnostics)
            diagnostics = {}
