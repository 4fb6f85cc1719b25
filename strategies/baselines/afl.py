"""AFL: agnostic federated learning, for the worst mixture of the clients.

Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, arXiv 1902.00146: θ and the clients' weights λ play
against each other, θ ← θ + server_lr Σ λ_i g_i and λ ← Proj_simplex(λ + η_λ F), F_i the loss of client i at θ_t;
the result is the average of the iterates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from flwr.common import Parameters
from torch import Tensor

from ..model import Successor
from ..options import is_integer, is_real, require
from ..solvers import simplex
from ..span import SpanStrategy
from ..updates import ClientUpdates, LayerDirection


class AFL(SpanStrategy):
    """Agnostic federated learning.

    Clients are asked for F_i as `initial_loss`. The method is stated for full participation. With a sample of the
    clients, the λ of those who are absent stay as they are up to the projection, and those present are weighted by
    theirs, scaled to sum to one; a client seen for the first time gets the weight 1 / (clients known).

    Parameters
    ----------
    lambda_lr : float
        η_λ > 0.
    average_iterates : bool
        Evaluate and save the average of θ_0, ..., θ_t, as the method says, or θ_t itself. Clients train on θ_t
        either way.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    remembers = ("average",)
    requires = ("initial_loss",)

    def __init__(self, *, lambda_lr: float = 0.01, average_iterates: bool = True, **common: Any) -> None:
        super().__init__(**common)
        require("lambda_lr", lambda_lr, "a number above 0", is_real(lambda_lr) and lambda_lr > 0)
        require("average_iterates", average_iterates, "true or false", isinstance(average_iterates, bool))
        self.lambda_lr = lambda_lr
        self.average_iterates = average_iterates
        self.records = {"lambda": {}, "iterates": 0}
        self._evaluated: tuple[Parameters, Parameters] | None = None

    def coefficients(self, updates: ClientUpdates) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the λ of those present, scaled to sum to one, and the largest of all."""
        known = self._with_new(updates)
        values = [known[name] for name in self.identities(updates)]
        present = torch.tensor(values, dtype=torch.float64, device=updates.device)
        total = present.sum()
        largest = torch.tensor(max(known.values()), dtype=torch.float64, device=updates.device)
        if float(total) <= 0:  # the worst mixture holds nobody of this round: no reason to prefer anyone
            return torch.full_like(present, 1 / len(present)), {"largest_lambda": largest}
        return updates.limited(present / total), {"largest_lambda": largest}

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Weight the clients; the average of the iterates starts at θ_0."""
        for layer, direction in zip(updates.layers.layers, super().solve(updates), strict=True):
            average = self.memory.get(f"average/{layer.name}")
            if self.average_iterates and average is None and self._model is not None:
                average = self._model.flat(layer, self.device)
            yield direction if average is None else direction.remembering(average=average)

    def conclude(self, updates: ClientUpdates) -> None:
        """Raise λ by the losses, project, and average the iterates."""
        known = self._with_new(updates)
        for name, loss in zip(self.identities(updates), updates.reported("initial_loss").tolist(), strict=True):
            known[name] += self.lambda_lr * loss
        projected = simplex.project(torch.tensor(list(known.values()), dtype=torch.float64))
        self.records["lambda"] = dict(zip(known, projected.tolist(), strict=True))
        if not self.average_iterates or self._model is None:
            return
        self.records["iterates"] += 1
        for layer in self._model.layers.layers:
            average = self.memory[f"average/{layer.name}"]
            average += (self._model.flat(layer, self.device) - average) / (self.records["iterates"] + 1)

    def evaluated(self, parameters: Parameters) -> Parameters:
        """Return the average of the iterates, with the other tensors of the global model."""
        model = self._model
        if not self.average_iterates or model is None or parameters is not model.parameters or not self.memory:
            return parameters
        if self._evaluated is None or self._evaluated[0] is not parameters:
            average = Successor(model)
            for layer in model.layers.layers:
                average.move(layer, self.memory[f"average/{layer.name}"] - model.flat(layer, self.device))
            self._evaluated = parameters, average.with_buffers_as_they_are()
        return self._evaluated[1]

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Require λ by client and the number of iterates."""
        weights, iterates = records.get("lambda"), records.get("iterates")
        fine = isinstance(weights, Mapping) and all(is_real(w) and w >= 0 for w in weights.values())
        fine = fine and (not weights or abs(sum(weights.values()) - 1) < 1e-6)
        fine = fine and is_integer(iterates) and iterates >= 0 and bool(memory) == (iterates > 0)
        require(
            "the state's records", records, "λ by client, and a number of iterates where their average is kept", fine
        )

    def _with_new(self, updates: ClientUpdates) -> dict[str, float]:
        """Return λ by client, in canonical order of their first round, those of this round included."""
        known: dict[str, float] = dict(self.records["lambda"])
        new = [name for name in self.identities(updates) if name not in known]
        if new:
            count = len(known) + len(new)
            known = {name: weight * (count - len(new)) / count for name, weight in known.items()}
            known.update(dict.fromkeys(new, 1 / count))
        return known
