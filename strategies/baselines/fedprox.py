"""FedProx: FedAvg of clients that are held near the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127: client i minimises
F_i(w) + (μ/2)‖w − w_t‖²; the server averages as FedAvg does.
"""

from __future__ import annotations

from typing import Any

from flwr.common import Scalar

from ..options import is_real, require
from .fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a proximal term on the clients.

    Clients get μ as `proximal_mu` in the fit config, the key of Flower's FedProx, and must add the term to their
    loss; those of this suite do. With μ = 0 this is FedAvg.

    Parameters
    ----------
    proximal_mu : float
        μ ≥ 0.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If μ is negative.
    """

    def __init__(self, *, proximal_mu: float = 0.01, **common: Any) -> None:
        super().__init__(**common)
        require("proximal_mu", proximal_mu, "a number of at least 0", is_real(proximal_mu) and proximal_mu >= 0)
        self.proximal_mu = float(proximal_mu)

    def fit_config(self) -> dict[str, Scalar]:
        """Add μ."""
        return {**super().fit_config(), "proximal_mu": self.proximal_mu}
