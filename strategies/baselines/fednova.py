"""FedNova: clients that took more steps do not pull harder.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020,
arXiv 2007.07481, equation 10: θ ← θ + τ_eff Σ ρ_i g_i / a_i, where a_i = ‖a_i‖₁ is how often client i's local
gradients enter its update (its steps, for plain SGD) and τ_eff = Σ ρ_i a_i.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..span import SpanStrategy
from ..updates import ClientUpdates


class FedNova(SpanStrategy):
    """Federated averaging of normalised updates.

    Clients must report a_i as `step_weight`. Where all report the same this is FedAvg. Parameters are those of
    `UpdateStrategy`.
    """

    requires = ("step_weight",)

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return τ_eff ρ_i / a_i, and τ_eff."""
        a = updates.reported("step_weight")
        effective = updates.weights @ a
        return effective * updates.limited(updates.weights / a), {"effective_steps": effective}
