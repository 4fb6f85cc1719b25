"""ConFIG: the direction at equal angles to all clients' updates.

Liu, Chu, Thuerey, "ConFIG: Towards Conflict-free Training of Physics Informed Neural Networks", ICLR 2025,
arXiv 2408.11104: d = U⁺1 with the unit updates as rows of U; g = (Σ_i ⟨g_i, d̂⟩) d̂. That length is a sum over
losses; over clients it is divided by m.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..solvers import craft
from ..span import SpanStrategy
from ..updates import ClientUpdates


class ConFIG(SpanStrategy):
    """Conflict-free inverse gradients, over all layers together.

    Parameters
    ----------
    ridge, rtol
        Regularisation of the solve, see `strategies.solvers.craft.coefficients`.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    def __init__(self, *, ridge: float = 0.0, rtol: float | None = None, **common: Any) -> None:
        super().__init__(**common)
        craft.check_options("equality", ridge, rtol)
        self.ridge = ridge
        self.rtol = rtol

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the coefficients of g, and the residual and rank of the solve."""
        gram = updates.whole_gram()
        ones = torch.ones_like(updates.weights)
        found = craft.coefficients(gram, torch.zeros_like(ones), ones, ridge=self.ridge, rtol=self.rtol)
        products = gram @ found.coefficients  # ⟨g_i, d⟩
        squared = found.coefficients @ products  # ‖d‖²
        # Updates that cancel leave a direction of rounding errors, which means nothing.
        real = squared > (craft.ROUNDING * len(ones) * torch.finfo(torch.float64).eps) ** 2 * len(ones)
        length = torch.where(real, products.mean() / torch.where(real, squared, 1.0), 0.0)
        return length * found.coefficients, {"residual": found.residual, "rank": found.rank}
