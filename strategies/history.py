"""UpdateHistory: the last update of clients that are absent now, for methods that still listen to them.

Rows lie in the strategy's `memory`, float32, one matrix (h, d_q) a layer, and so are saved and resumed with it;
`records` says whose they are and when they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .gram import column_blocks, gram
from .layers import Layer
from .options import is_integer, require
from .updates import ClientUpdates

KIND = "past"
"""Of the matrices in `memory`, and the key in `records`."""
_LARGEST = torch.finfo(torch.float32).max


class _Strategy(Protocol):
    memory: dict[str, Tensor]
    records: dict[str, Any]

    def identities(self, updates: ClientUpdates) -> list[str]: ...


class UpdateHistory:
    """The stored updates of a strategy.

    Parameters
    ----------
    strategy : UpdateStrategy
        With "past" among its `remembers_rows`; its `memory` and `records` hold everything.
    """

    def __init__(self, strategy: _Strategy) -> None:
        self._strategy = strategy
        strategy.records.setdefault(KIND, [])

    def absent(self, updates: ClientUpdates, since: int) -> list[int]:
        """Return the rows of clients that are not in this round and came in round `since` or later, oldest first."""
        present = set(self._strategy.identities(updates))
        rows = [(number, i) for i, (cid, number) in enumerate(self._rows()) if cid not in present and number >= since]
        return [i for _, i in sorted(rows)]

    def rounds(self, rows: list[int]) -> list[int]:
        """Return in which round each of these rows came."""
        return [self._rows()[i][1] for i in rows]

    def layer(self, layer: Layer, rows: list[int]) -> Tensor:
        """Return rows of a layer: (len(rows), d_q), float32."""
        return self._strategy.memory[f"{KIND}/{layer.name}"][rows]

    def store(self, updates: ClientUpdates, number: int, since: int) -> None:
        """Take in round `number`'s updates, and let go of those from before round `since`."""
        kept = self.absent(updates, since)
        listed = self._rows()
        for layer in updates.layers.layers:
            key = f"{KIND}/{layer.name}"
            past = self._strategy.memory.pop(key, None)
            rows = torch.empty((len(kept) + len(updates), layer.size), dtype=torch.float32, device=updates.device)
            if past is not None:
                rows[: len(kept)] = past[kept]
            del past
            for columns, block in updates.blocks(layer):
                rows[len(kept) :, columns] = block.clamp_(-_LARGEST, _LARGEST)  # or a float64 update could turn to Inf
            self._strategy.memory[key] = rows
        self._strategy.records[KIND] = [listed[i] for i in kept] + [
            [name, number] for name in self._strategy.identities(updates)
        ]

    def _rows(self) -> list[tuple[str, int]]:
        rows: list[tuple[str, int]] = self._strategy.records[KIND]
        return rows


def joint_gram(updates: ClientUpdates, layer: Layer, past: Tensor) -> Tensor:
    """Return the inner products of a layer's m updates and h stored ones, all among all: (m + h, m + h), float64."""
    m, h = len(updates), len(past)
    inner = updates.gram(layer, past if h else None)
    joint = torch.empty((m + h, m + h), dtype=torch.float64, device=updates.device)
    joint[:m, :m] = inner.matrix
    if h:
        joint[:m, m:] = inner.cross
        joint[m:, :m] = inner.cross.T
        joint[m:, m:] = gram(column_blocks(past), h, device=updates.device).matrix
    return joint


def check_history(records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `records` name a client and a round for each row in `memory`."""
    rows = records.get(KIND)
    matrices = [matrix for key, matrix in memory.items() if key.startswith(f"{KIND}/")]
    fine = (
        isinstance(rows, list)
        and all(_names_a_row(row) for row in rows)
        and bool(rows) == bool(matrices)
        and all(len(matrix) == len(rows) for matrix in matrices)
    )
    require("the state's records", records, "a client and a round for each stored update", fine)


def _names_a_row(row: object) -> bool:
    return isinstance(row, list | tuple) and len(row) == 2 and isinstance(row[0], str) and is_integer(row[1])
