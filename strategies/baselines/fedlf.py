"""FedLF: per layer the common descent direction of the clients, of fairness, and of clients absent lately.

Pan et al., "FedLF: Layer-Wise Fair Federated Learning", AAAI 2024. Per layer all updates are scaled to their mean
length; a fairness update f = Σ h_i g_i is added, which turns the vector of losses towards equal ones, h being the
gradient of the negative cosine between the two; so are the last updates of clients absent now; the layer moves
along the min-norm point of their convex hull. All layers together are scaled to the length of the plain mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import UpdateStrategy
from ..history import UpdateHistory, check_history, joint_gram
from ..layers import Layer
from ..options import is_count, require
from ..solvers import simplex
from ..updates import ClientUpdates, LayerDirection


class FedLF(UpdateStrategy):
    """Layer-wise fair federated learning, clients counting equally.

    Clients are asked for their loss as `initial_loss`. Every client's last update is kept in float32 while it is
    listened to: up to `rounds` + 1 rounds of updates.

    Parameters
    ----------
    rounds : int, optional
        An absent client is listened to for this many rounds; 0 for none. Default, as the authors have it: the
        clients seen in earlier rounds over those in this one, rounded down, and none before there are more of them.
        Updates are kept for as long as rounds of the present size need them: where rounds become much smaller, the
        oldest may be gone.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers_rows = ("past",)
    requires = ("initial_loss",)

    def __init__(self, *, rounds: int | None = None, **common: Any) -> None:
        super().__init__(**common)
        wanted = "an integer of at least 0, or None"
        require("rounds", rounds, wanted, rounds is None or rounds == 0 or is_count(rounds))
        self.rounds = rounds
        self.records = {"clients": []}
        self.history = UpdateHistory(self)

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Solve each layer, then scale them all; two reads of the updates a layer."""
        rows = self.history.absent(updates, self._round - self._window(updates))
        fairness = fairness_weights(updates.reported("initial_loss"))
        solved = [self._solve_layer(updates, layer, rows, fairness) for layer in updates.layers.layers]
        if not solved:  # a model of counters alone
            return
        plain = torch.stack([length for _, length in solved]).norm()
        norm = torch.stack([torch.linalg.vector_norm(direction.vector) for direction, _ in solved]).norm()
        real = norm > 1e-12 * plain
        factor = torch.where(real, plain / torch.where(real, norm, 1.0), 0.0)
        for direction, _ in solved:
            yield direction.scaled(factor)

    def _solve_layer(
        self, updates: ClientUpdates, layer: Layer, rows: list[int], fairness: Tensor
    ) -> tuple[LayerDirection, Tensor]:
        """Return a layer's direction before the last scaling, and the length of its plain mean."""
        m = len(updates)
        past = self.history.layer(layer, rows) if rows else torch.empty(0, layer.size)
        gram = joint_gram(updates, layer, past)
        norms = gram.diagonal().sqrt()
        active = norms[:m] > 0
        mean_norm = norms[:m].sum() / active.sum().clamp(min=1)
        # Every row in terms of the updates and the stored ones; zero updates are left out.
        unit = torch.where(norms > 0, mean_norm / torch.where(norms > 0, norms, 1.0), 0.0)
        kept = (norms > 0).nonzero()[:, 0]
        hull = torch.diag(unit)[kept]
        fair = torch.cat([fairness, torch.zeros(len(rows), dtype=gram.dtype, device=gram.device)]) * unit
        squared = fair @ gram @ fair
        if bool(squared > (1e-12 * mean_norm) ** 2):  # equal losses have no fairness to gain
            hull = torch.cat([hull, (fair * mean_norm / squared.sqrt())[None]])
        if len(hull):
            found = simplex.min_norm(hull @ gram @ hull.T)
            alpha, report = found.x @ hull, {"kkt": found.kkt}
        else:
            alpha, report = torch.zeros(len(gram), dtype=gram.dtype, device=gram.device), {}
        absent = alpha[m:] @ past.to(torch.float64) if rows else None
        plain = gram[:m, :m].sum().clamp(min=0).sqrt() / m
        return updates.combine(layer, alpha[:m], absent).reporting(**report), plain

    def conclude(self, updates: ClientUpdates) -> None:
        """Remember this round's updates, and who has ever been here."""
        known = self.records["clients"]
        seen = set(known)
        known += [name for name in self.identities(updates) if name not in seen]
        window = max(1, len(known) // len(updates)) if self.rounds is None else self.rounds
        if window:
            self.history.store(updates, self._round, self._round + 1 - window)

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Require whose the stored updates are, and the clients known."""
        check_history(records, memory)
        clients = records.get("clients")
        fine = isinstance(clients, list) and all(isinstance(cid, str) for cid in clients)
        require("the state's records", records, "a list of clients", fine)

    def _window(self, updates: ClientUpdates) -> int:
        if self.rounds is not None:
            return self.rounds
        known = len(self.records["clients"])
        return known // len(updates) if known > len(updates) else 0


def fairness_weights(losses: Tensor) -> Tensor:
    """Return h, (m,): the gradient of minus the cosine between the losses F and (1, ..., 1), by F.

    h = (cos · F / ‖F‖ − 1/√m) / ‖F‖: positive for clients whose loss is above the others'.
    """
    norm = torch.linalg.vector_norm(losses)
    if not bool(norm > 0):
        return torch.zeros_like(losses)
    unit = losses / norm
    even = torch.full_like(losses, len(losses) ** -0.5)
    weights: Tensor = ((unit @ even) * unit - even) / norm
    return weights
