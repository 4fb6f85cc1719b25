"""FedFV: clients' updates are projected off each other's before they are averaged.

Wang et al., "Federated Learning with Fair Averaging", IJCAI 2021, arXiv 2104.14937, algorithms 1 to 3. Clients are
ordered by their loss before training. Each update but those of the α share with the largest losses is projected
on the normal plane of every other client's original update that it is in conflict with, in that order. The mean is
then projected off the summed updates of absent clients in conflict with it, of the last τ rounds, newest last, and
scaled to the length of the plain mean. (A public implementation, easyFL's, counts the present round among the τ.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import UpdateStrategy
from ..history import UpdateHistory, check_history, joint_gram
from ..options import is_integer, is_real, require
from ..updates import ClientUpdates, LayerDirection


class FedFV(UpdateStrategy):
    """Federated fair averaging, over all layers together, clients counting equally.

    Clients are asked for their loss as `initial_loss`. The updates of the last τ rounds are kept in float32.

    Parameters
    ----------
    alpha : float
        α in [0, 1]: share of the clients, those with the largest losses, whose updates stay as they are.
    tau : int
        τ ≥ 0: rounds in which an absent client is remembered; 0 keeps nothing.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers_rows = ("past",)
    requires = ("initial_loss",)

    def __init__(self, *, alpha: float = 0.1, tau: int = 1, **common: Any) -> None:
        super().__init__(**common)
        require("alpha", alpha, "in [0, 1]", is_real(alpha) and 0 <= alpha <= 1)
        require("tau", tau, "an integer of at least 0", is_integer(tau) and tau >= 0)
        self.alpha = alpha
        self.tau = tau
        self.history = UpdateHistory(self)

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Project in coefficients, from inner products alone; then combine each layer."""
        rows = self.history.absent(updates, self._round - self.tau)
        layers = updates.layers.layers
        m = len(updates)
        gram = torch.zeros((m + len(rows),) * 2, dtype=torch.float64, device=updates.device)
        for layer in layers:
            past = self.history.layer(layer, rows) if rows else torch.empty(0, layer.size)
            gram += joint_gram(updates, layer, past)
        losses = updates.reported("initial_loss").tolist()
        order = sorted(range(m), key=losses.__getitem__)
        mean = torch.zeros(len(gram), dtype=gram.dtype, device=gram.device)
        mean[:m] = project_off(gram[:m, :m], order, self.alpha).mean(dim=0)
        numbers = self.history.rounds(rows)
        for number in sorted(set(numbers)):
            group = [m + k for k, came in enumerate(numbers) if came == number]
            mean = _without_conflict(gram, mean, group)
        norm = (mean @ gram @ mean).clamp(min=0).sqrt()
        plain = gram[:m, :m].sum().clamp(min=0).sqrt() / m
        # What is left of updates that cancel is rounding error, and must not be scaled up.
        real = norm > 1e-12 * gram.diagonal().max().sqrt()
        mean = mean * torch.where(real, plain / torch.where(real, norm, 1.0), 0.0)
        for layer in layers:
            absent = mean[m:] @ self.history.layer(layer, rows).to(torch.float64) if rows else None
            yield updates.combine(layer, mean[:m], absent)

    def conclude(self, updates: ClientUpdates) -> None:
        """Remember this round's updates."""
        if self.tau:
            self.history.store(updates, self._round, self._round + 1 - self.tau)

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Require whose the stored updates are."""
        check_history(records, memory)


def project_off(gram: Tensor, order: list[int], alpha: float) -> Tensor:
    """Project each update off those it is in conflict with.

    Parameters
    ----------
    gram : Tensor, (m, m), float64
        ⟨g_i, g_j⟩ of the original updates.
    order : list of int
        Clients by ascending loss.
    alpha : float
        The last m − ⌈(m − 1)(1 − α)⌉ of them keep their updates, if α > 0.

    Returns
    -------
    Tensor, (m, m), float64
        Row i are the coefficients of client i's projected update in the original ones.
    """
    m = len(gram)
    coefficients = torch.eye(m, dtype=gram.dtype, device=gram.device)
    products = gram.clone()  # row i: of client i's projected update with each original one
    moves = torch.ones(m, dtype=torch.bool, device=gram.device)
    if alpha > 0:
        moves[order[math.ceil((m - 1) * (1 - alpha)) :]] = False
    for j in order:  # all clients at once: each looks at the others in the same order
        squared = gram[j, j]
        conflict = moves & (products[:, j] < 0)
        conflict[j] = False
        step = torch.where(conflict, products[:, j] / torch.where(squared > 0, squared, 1.0), 0.0)
        coefficients[:, j] -= step
        products -= step[:, None] * gram[j]
    return coefficients


def _without_conflict(gram: Tensor, vector: Tensor, group: list[int]) -> Tensor:
    """Project a combination off the sum of those of a group that it is in conflict with."""
    products = gram @ vector
    total = torch.zeros_like(vector)
    total[group] = (products[group] < 0).to(gram.dtype)
    dot, squared = total @ products, total @ gram @ total
    step = torch.where((dot < 0) & (squared > 0), dot / torch.where(squared > 0, squared, 1.0), 0.0)
    return vector - step * total
