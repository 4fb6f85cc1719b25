"""FedAdam, FedYogi, FedAdagrad: adaptive steps on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295, algorithm 2, with ḡ = Σ ρ_i g_i as the
pseudo-gradient: m ← β₁m + (1 − β₁)ḡ, v as each method has it, θ ← θ + server_lr · m / (√v + τ), each number by
itself. As in Flower, both moments start at zero (the paper's v at τ² or more), and FedAdam's step is corrected for
that. Only trainable tensors are stepped: running statistics and counters are averaged
and counted as everywhere in this suite, so no variance turns negative and no counter shrinks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import UpdateStrategy
from ..layers import Layer
from ..options import is_integer, is_real, require
from ..updates import ClientUpdates, LayerDirection


class FedOpt(UpdateStrategy):
    """Base of the adaptive methods.

    Parameters
    ----------
    server_lr : float
        η, the length of a step where the updates keep their sign; much smaller than FedAvg's 1.
    beta_1 : float
        β₁ in [0, 1).
    beta_2 : float
        β₂ in [0, 1).
    tau : float
        τ > 0 keeps small second moments from blowing up the step.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers = ("first_moment", "second_moment")
    individual = False

    def __init__(
        self, *, server_lr: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **common: Any
    ) -> None:
        super().__init__(server_lr=server_lr, **common)
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            require(name, beta, "in [0, 1)", is_real(beta) and 0 <= beta < 1)
        require("tau", tau, "a number above 0", is_real(tau) and tau > 0)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.tau = tau
        self.records = {"steps": 0}

    @abstractmethod
    def second_moment(self, previous: Tensor, squared: Tensor) -> Tensor:
        """Return v, (d_q,), from the previous one and ḡ²."""

    def correction(self, step: int) -> float:
        """Return the factor on the step number `step`, from 1, that makes up for moments that started at zero."""
        return 1.0

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return m / (√v + τ)."""
        mean = updates.combine(layer, updates.weights).vector
        first = self.memory.get(f"first_moment/{layer.name}", torch.zeros_like(mean))
        second = self.memory.get(f"second_moment/{layer.name}", torch.zeros_like(mean))
        first = self.beta_1 * first + (1 - self.beta_1) * mean
        second = self.second_moment(second, mean.square())
        factor = self.correction(self.records["steps"] + 1)
        direction = updates.measure(layer, factor * first / (second.sqrt() + self.tau))
        return direction.remembering(first_moment=first, second_moment=second)

    def conclude(self, updates: ClientUpdates) -> None:
        """Count the step."""
        self.records["steps"] += 1

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Require the number of steps."""
        steps = records.get("steps")
        require("the state's records", records, "a number of steps", is_integer(steps) and steps >= 0)


class FedAdam(FedOpt):
    """v ← β₂v + (1 − β₂)ḡ²; parameters are those of `FedOpt`.

    The step is corrected for the start at zero by √(1 − β₂^(t+1)) / (1 − β₁^(t+1)) in step t, as Flower's is.
    """

    def second_moment(self, previous: Tensor, squared: Tensor) -> Tensor:
        """Return v."""
        return self.beta_2 * previous + (1 - self.beta_2) * squared

    def correction(self, step: int) -> float:
        """Return √(1 − β₂^(t+1)) / (1 − β₁^(t+1))."""
        return float((1 - self.beta_2 ** (step + 1)) ** 0.5 / (1 - self.beta_1 ** (step + 1)))


class FedYogi(FedOpt):
    """v ← v − (1 − β₂) ḡ² sign(v − ḡ²); parameters are those of `FedOpt`."""

    def second_moment(self, previous: Tensor, squared: Tensor) -> Tensor:
        """Return v; never negative, as its decrease is at most (1 − β₂)v."""
        return previous - (1 - self.beta_2) * squared * torch.sign(previous - squared)


class FedAdagrad(FedOpt):
    """v ← v + ḡ², with β₁ = 0 as in the paper's experiments; β₂ is not used.

    Parameters
    ----------
    server_lr, tau
        See `FedOpt`.
    beta_1 : float
    **common
        Keywords of `UpdateStrategy`.
    """

    def __init__(self, *, server_lr: float = 0.01, beta_1: float = 0.0, tau: float = 1e-3, **common: Any) -> None:
        super().__init__(server_lr=server_lr, beta_1=beta_1, tau=tau, **common)

    def second_moment(self, previous: Tensor, squared: Tensor) -> Tensor:
        """Return v."""
        return previous + squared
