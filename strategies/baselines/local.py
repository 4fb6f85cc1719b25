"""Local: no collaboration; each client goes on with what it has made of the model itself.

What personalisation has to beat. The global model is the weighted mean, which nobody but a newcomer receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.common import Parameters, ndarray_to_bytes
from torch import Tensor

from ..base import UpdateStrategy
from ..layers import Layer
from ..options import require
from ..updates import ClientUpdates, LayerDirection

_OWN = "own"


class Local(UpdateStrategy):
    """Sends each client its own trainable tensors back; buffers and counters are the global model's.

    Keeps a model for each client, in float64. Parameters are those of `UpdateStrategy`.
    """

    remembers_rows = (_OWN,)

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.records[_OWN] = []
        self._origin: dict[str, Tensor] = {}  # θ_t by layer, in the round that is being aggregated

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return the mean, for the global model."""
        return updates.combine(layer, updates.weights)

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Note what the updates are relative to."""
        model = self._require_model()
        self._origin = {layer.name: model.flat(layer, self.device) for layer in updates.layers.layers}
        return super().solve(updates)

    def conclude(self, updates: ClientUpdates) -> None:
        """Keep what each client has sent."""
        names, before = self.identities(updates), self.records[_OWN]
        kept = [i for i, name in enumerate(before) if name not in set(names)]
        for layer in updates.layers.layers:
            rows = updates.layer(layer) + self._origin[layer.name]
            past = self.memory.get(f"{_OWN}/{layer.name}")
            self.memory[f"{_OWN}/{layer.name}"] = rows if past is None else torch.cat([past[kept], rows])
        self.records[_OWN] = [before[i] for i in kept] + names
        self._origin = {}

    def sent_to(self, cid: str, parameters: Parameters) -> Parameters:
        """Return a client's own model, where it has sent one."""
        name, listed = self.sampler.identity(cid), self.records[_OWN]
        if name not in listed or self._model is None:
            return parameters
        row, tensors = listed.index(name), list(parameters.tensors)  # with the buffers of the model asked for
        for layer in self._model.layers.layers:
            flat = self.memory[f"{_OWN}/{layer.name}"][row].cpu().numpy()
            for t in layer.tensors:
                old = self._model.arrays[t]
                own, flat = flat[: old.size].reshape(old.shape), flat[old.size :]
                tensors[t] = ndarray_to_bytes(np.asarray(own.astype(old.dtype)))
        return Parameters(tensors, parameters.tensor_type)

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Refuse records that name other clients than there are rows."""
        listed = records.get(_OWN)
        fine = (
            isinstance(listed, list)
            and all(isinstance(name, str) for name in listed)
            and bool(listed) == bool(memory)
            and all(len(rows) == len(listed) for rows in memory.values())
        )
        require("the state's records", records, "a client's name for each row", fine)
