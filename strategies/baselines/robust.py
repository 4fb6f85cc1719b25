"""FedMedian, FedTrimmedAvg, Krum: rules that a minority of arbitrary clients cannot move far.

Per coordinate: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, arXiv 1803.01498. Krum: Blanchard et
al., "Machine Learning with Adversaries", NeurIPS 2017. Clients count equally: a weight is only what a client says
of itself. Running statistics and counters go by the same rules, or a BatchNorm model would be open to anyone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base import UpdateStrategy
from ..gram import gram
from ..layers import Layer
from ..options import is_count, is_integer, is_real, require
from ..span import SpanStrategy
from ..updates import Array, ClientUpdates, LayerDirection


class FedTrimmedAvg(UpdateStrategy):
    """The mean of each coordinate without its lowest and highest values.

    Parameters
    ----------
    beta : float
        Share in [0, .5) cut off at each end, rounded down to whole clients.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If β is out of range.
    """

    def __init__(self, *, beta: float = 0.2, **common: Any) -> None:
        super().__init__(**common)
        require("beta", beta, "in [0, .5)", is_real(beta) and 0 <= beta < 0.5)
        self.beta = beta

    def trimmed(self, m: int) -> int:
        """Return how many of m clients are cut off at each end."""
        return min(math.floor(self.beta * m + 1e-9), (m - 1) // 2)

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Sort each coordinate and average what is left."""
        m = len(updates)
        cut = self.trimmed(m)
        vector = torch.empty(layer.size, dtype=torch.float64, device=updates.device)
        for columns, block in updates.blocks(layer):
            vector[columns] = block.sort(dim=0).values[cut : m - cut].mean(dim=0)
        return updates.measure(layer, vector)

    def merge_buffer(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Treat buffers like coordinates."""
        cut = self.trimmed(len(tensors))
        stacked = np.sort(np.stack([tensor.astype(np.float64) for tensor in tensors]), axis=0)
        return np.asarray(stacked[cut : len(tensors) - cut].mean(axis=0))

    def merge_counter(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Return the largest of what is left."""
        return np.asarray(np.sort(np.stack(list(tensors)), axis=0)[len(tensors) - 1 - self.trimmed(len(tensors))])


class FedMedian(FedTrimmedAvg):
    """The median of each coordinate; of an even number of clients the mean of the two in the middle.

    Parameters are those of `UpdateStrategy`.
    """

    def __init__(self, **common: Any) -> None:
        super().__init__(beta=0.0, **common)

    def trimmed(self, m: int) -> int:
        """Cut off all but one or two."""
        return (m - 1) // 2


class Krum(SpanStrategy):
    """The clients with the closest neighbours.

    Distances are taken in float64 between updates from which their coordinate-wise median is subtracted, so that
    neither what all clients share nor a few that are far off drown what tells the others apart.

    Parameters
    ----------
    num_malicious_clients : int
        f: a client's score is the sum of its squared distances to the m − f − 2 nearest others. With f > 0 a round
        of fewer than 2f + 3 clients fails: then f of them could outvote the others.
    num_clients_to_keep : int
        The k with the lowest scores are averaged; 1 is Krum, more is Multi-Krum.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    def __init__(self, *, num_malicious_clients: int = 0, num_clients_to_keep: int = 1, **common: Any) -> None:
        super().__init__(**common)
        f = num_malicious_clients
        require("num_malicious_clients", f, "an integer of at least 0", is_integer(f) and f >= 0)
        require("num_clients_to_keep", num_clients_to_keep, "an integer of at least 1", is_count(num_clients_to_keep))
        self.num_malicious_clients = num_malicious_clients
        self.num_clients_to_keep = num_clients_to_keep
        self._kept: list[int] = []  # of the round that is being aggregated

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return 1/k for the clients kept."""
        m, f = len(updates), self.num_malicious_clients
        if f and m < 2 * f + 3:
            raise ArithmeticError(
                f"Krum needs {2 * f + 3} clients in a round for num_malicious_clients={f}, there are {m}; sample more"
            )
        inner = torch.zeros((m, m), dtype=torch.float64, device=updates.device)
        for layer in updates.layers.layers:
            centred = ((columns, block - block.median(dim=0).values) for columns, block in updates.blocks(layer))
            inner += gram(centred, m, device=updates.device).matrix
        squared = inner.diagonal()
        distances = (squared[:, None] + squared - 2 * inner).clamp(min=0)
        near = max(1, m - f - 2)
        scores = distances.sort(dim=1).values[:, 1 : near + 1].sum(dim=1)
        kept = scores.sort(stable=True).indices[: self.num_clients_to_keep]
        self._kept = kept.tolist()
        alpha = torch.zeros_like(updates.weights)
        alpha[kept] = 1 / len(kept)
        return alpha, {}

    def merge_buffer(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Average those of the clients kept."""
        return np.asarray(np.mean([tensors[i].astype(np.float64) for i in self._kept], axis=0))

    def merge_counter(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Return the largest of the clients kept."""
        return np.asarray(np.maximum.reduce([tensors[i] for i in self._kept]))
