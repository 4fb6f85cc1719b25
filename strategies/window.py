"""ModelWindow: the last few global models, each layer's held once, in memory or beyond a size on disk.

Rows lie in the strategy's `memory`, one matrix (p, d_q) a layer, and so are saved and resumed with it; they are a ring,
and `records` says how many are filled and which is the newest.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .layers import Layer
from .model import GlobalModel
from .options import is_integer, require

KIND = "window"
"""Of the matrices in `memory`, and the key in `records`."""


# Bytes. A window beyond this is a slip of the keyboard.
_LARGEST = 10**14


class _Strategy(Protocol):
    memory: dict[str, Tensor]
    records: dict[str, Any]
    device: torch.device


class ModelWindow:
    """The window of a strategy.

    Parameters
    ----------
    strategy : UpdateStrategy
        With "window" among its `remembers_rows`; its `memory` and `records` hold everything.
    length : int
        p, models at most.
    memory_mb : float
        Above this size, in 10^6 bytes, the window lies in temporary files of the system's temporary folder, which
        vanish with the process, instead of in memory.
    """

    def __init__(self, strategy: _Strategy, length: int, memory_mb: float) -> None:
        self._strategy = strategy
        self.length = length
        self._limit = 1e6 * memory_mb
        self._mapped: dict[str, Tensor] = {}  # the matrices that lie on disk
        strategy.records[KIND] = {"count": 0, "newest": length - 1}

    @property
    def full(self) -> bool:
        """Whether it holds p models."""
        return bool(self._strategy.records[KIND]["count"] == self.length)

    def layer(self, layer: Layer) -> list[Tensor]:
        """Return a layer of each model, newest first: (d_q,), views."""
        rows = self._strategy.memory[f"{KIND}/{layer.name}"]
        ring = self._strategy.records[KIND]
        return [rows[(ring["newest"] - i) % self.length] for i in range(ring["count"])]

    def check(self, model: GlobalModel) -> None:
        """Raise ValueError if windows of such models are larger than any machine's memory or disk."""
        if self._size(model) > _LARGEST:
            raise ValueError(
                f"window={self.length} models of this size take {self._size(model) / 1e12:.3g} TB; lower window."
            )

    def push(self, model: GlobalModel) -> None:
        """Take in a model in place of the oldest one."""
        ring, layers = self._strategy.records[KIND], model.layers.layers
        if not layers:  # a model of counters only: there is nothing to keep
            return
        dtypes = {layer.name: _dtype(model, layer) for layer in layers}
        size = self._size(model)
        newest = (ring["newest"] + 1) % self.length
        for layer in layers:
            rows = self._placed(layer, dtypes[layer.name], on_disk=size > self._limit)
            offset = 0
            for t in layer.tensors:
                part = torch.from_numpy(np.array(model.arrays[t].reshape(-1), dtype=dtypes[layer.name]))
                rows[newest, offset : offset + len(part)] = part
                offset += len(part)
        self._strategy.records[KIND] = {"count": min(ring["count"] + 1, self.length), "newest": newest}

    def _size(self, model: GlobalModel) -> int:
        """Bytes of a full window."""
        return sum(self.length * layer.size * np.dtype(_dtype(model, layer)).itemsize for layer in model.layers.layers)

    def _placed(self, layer: Layer, dtype: type[np.floating[Any]], *, on_disk: bool) -> Tensor:
        """Return a layer's rows where they belong, allocated or moved there at first."""
        key, memory = f"{KIND}/{layer.name}", self._strategy.memory
        rows = memory.get(key)
        wide = rows is None or rows.element_size() >= np.dtype(dtype).itemsize
        if rows is not None and wide and (not on_disk or rows is self._mapped.get(key)):
            return rows
        shape = (self.length, layer.size)
        if on_disk and layer.size:
            new = torch.from_numpy(_on_disk(shape, dtype))
        else:
            new = torch.zeros(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=self._strategy.device)
        if on_disk:
            self._mapped[key] = new
        if rows is not None:
            new.copy_(rows)
        memory[key] = new
        return new


def check_window(records: Mapping[str, Any], memory: Mapping[str, Tensor], length: int) -> None:
    """Raise ValueError unless `records` describe a ring of `length` models, and `memory` holds it."""
    ring = records.get(KIND)
    matrices = [matrix for key, matrix in memory.items() if key.startswith(f"{KIND}/")]
    fine = False
    if isinstance(ring, Mapping) and set(ring) == {"count", "newest"} and all(map(is_integer, ring.values())):
        count, newest = ring["count"], ring["newest"]
        # Rows are filled from the first one on.
        fine = 0 <= count <= length and (0 <= newest < length if count == length else newest == (count - 1) % length)
        fine = fine and bool(matrices) == (count > 0) and all(len(matrix) == length for matrix in matrices)
    require("the state's records", dict(records), f"those of a window of {length} models, which memory holds", fine)


def _on_disk(shape: tuple[int, int], dtype: type[np.floating[Any]]) -> np.ndarray:
    """Map zeros from a nameless temporary file, its space claimed: a full disk must not show at a later write."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        with tempfile.TemporaryFile(prefix="fedconcord-window-") as file:  # the map outlives the name
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
    except OSError as error:
        raise OSError(
            f"{size / 1e6:.0f} MB of FedRef's window of past models do not fit into {tempfile.gettempdir()} "
            f"({error.strerror}); free space there, set TMPDIR, or raise window_memory_mb."
        ) from error


def _dtype(model: GlobalModel, layer: Layer) -> type[np.floating[Any]]:
    """Float32 holds what models are made of; only one with wider tensors would be rounded."""
    return np.float64 if any(model.arrays[t].dtype.itemsize > 4 for t in layer.tensors) else np.float32
