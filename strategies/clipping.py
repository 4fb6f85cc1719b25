"""MedianClip: no client moves the model, its buffers or its counters much further than most do.

Lengths are compared with the median of the round's clients, of an even number the lower of the two in the middle: as
long as fewer than half of them are hostile, an honest client's is at least as long. What most clients leave as it is
has a median of zero, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .layers import LayerMap

Array = npt.NDArray[Any]


class MedianClip:
    """What is left of what each client sent.

    Parameters
    ----------
    multiple : float
        ≥ 1. An update longer than this many times the median is scaled down to that.
    layers : LayerMap
    start : sequence of ndarray
        θ_t.
    sent : sequence of sequence of ndarray
        The tensors of m ≥ 1 clients, vetted.
    lengths : Tensor, (m,), float64
        Euclidean, of each update, over all trainable tensors.

    Attributes
    ----------
    factors : Tensor, (m, 1), float64, or None
        What updates are multiplied by; None where all are kept.
    notes : dict of int to str
        Of the clients of which something was cut, in what, by position.
    """

    def __init__(
        self,
        multiple: float,
        layers: LayerMap,
        start: Sequence[Array],
        sent: Sequence[Sequence[Array]],
        lengths: Tensor,
    ) -> None:
        self.notes: dict[int, str] = {}
        self._start = start
        self._kinds = layers.kinds
        self._updates = self._factors(lengths.tolist(), multiple, "its update")
        self.factors: Tensor | None = None
        if min(self._updates) < 1:
            self.factors = torch.tensor(self._updates, dtype=torch.float64, device=lengths.device)[:, None]
        # As one group: a buffer that is constant with most clients would have a median of its own, of zero.
        buffers = layers.indices("buffer")
        apart = [float(np.linalg.norm([_distance(arrays[t], start[t]) for t in buffers])) for arrays in sent]
        self._buffers = self._factors(apart, multiple, "what it made of the buffers")
        self._ceilings: dict[int, Array] = {}
        for t in layers.indices("counter"):
            if start[t].dtype.kind != "b":
                self._ceilings[t] = _ceiling([arrays[t] for arrays in sent], start[t], multiple)
                for i, arrays in enumerate(sent):
                    if (arrays[t].astype(start[t].dtype) > self._ceilings[t]).any():
                        self._note(i, f"counter {layers.names[t]!r} rises too fast")

    def tensors(self, index: int, sent: Sequence[Array]) -> list[Array]:
        """Return one tensor of each client, clipped; those that are kept are the same objects."""
        kind, start = self._kinds[index], self._start[index]
        if kind == "counter":
            ceiling = self._ceilings.get(index)
            return list(sent) if ceiling is None else [np.minimum(x.astype(start.dtype), ceiling) for x in sent]
        factors = self._updates if kind == "trainable" else self._buffers
        return [x if f == 1 else np.asarray(start + f * _apart(x, start)) for x, f in zip(sent, factors, strict=True)]

    def _factors(self, lengths: Sequence[float], multiple: float, what: str) -> list[float]:
        median = sorted(lengths)[(len(lengths) - 1) // 2]
        found = []
        for i, length in enumerate(lengths):
            factor = multiple * median / length if length > multiple * median else 1.0
            found.append(factor)
            if factor < 1:
                times = f"{length / median:.3g} times as long as" if median else "not zero as is"
                self._note(i, f"{what} is {times} the median")
        return found

    def _note(self, i: int, note: str) -> None:
        self.notes[i] = f"{self.notes[i]}; {note}" if i in self.notes else note


def _apart(array: Array, start: Array) -> Array:
    """What a client added to a tensor, float64; relative to θ_t as it can hold it."""
    return np.asarray(array.astype(np.float64) - start.astype(array.dtype))


def _distance(array: Array, start: Array) -> float:
    """‖array − start‖, also of numbers that cannot be squared."""
    apart = np.abs(_apart(array, start)).reshape(-1)
    largest = float(apart.max(initial=0.0))
    return largest * float(np.linalg.norm(apart / largest)) if largest else 0.0


def _ceiling(sent: Sequence[Array], start: Array, multiple: float) -> Array:
    """Return start + ⌈multiple · median rise⌉, number by number, or the dtype's largest, in the dtype of `start`."""
    with np.errstate(over="ignore"):  # differences are taken modulo 2^64, where they are exact for every dtype
        low = start.astype(np.uint64)
        counts = [x.astype(start.dtype) for x in sent]
        rises = [np.where(x > start, x.astype(np.uint64) - low, np.uint64(0)) for x in counts]
        median = np.sort(np.stack(rises), axis=0)[(len(sent) - 1) // 2]
        room = np.uint64(np.iinfo(start.dtype).max) - low
        wanted = np.ceil(multiple * median.astype(np.float64))
        fits = wanted < 2**63
        allowed = np.where(fits, np.where(fits, wanted, 0.0).astype(np.uint64), room)
        return np.asarray(low + np.minimum(allowed, room)).astype(start.dtype)
