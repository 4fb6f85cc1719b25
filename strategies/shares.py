"""Shares of a round: what each client counts, by its size and up to a largest share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def capped_shares(sizes: Sequence[float], largest: float | None) -> tuple[list[float], list[int]]:
    """Divide 1 among clients by their sizes, so that none gets more than `largest`.

    Clients above it are held to it and the others share what is left by their sizes, until none is above it: the
    shares are min(largest, s · size) with the one s for which they sum to 1. Where that cannot be, with fewer than
    1 / largest clients, all get the same; so do those left over where their sizes are all zero.

    Parameters
    ----------
    sizes : sequence of int or float, (m,)
        Finite and ≥ 0. Counted exactly: what is left beside a client of 2^63 examples is not lost to rounding.
    largest : float or None
        In (0, 1]; None: no limit.

    Returns
    -------
    (list of float, list of int)
        The shares, and the positions, ascending, of the clients that got less than their sizes ask for.
    """
    whole = _integers(sizes)
    total, m = sum(whole), len(whole)
    if not total:
        return [1 / max(m, 1)] * m, []
    if largest is None:
        return [n / total for n in whole], []
    part, unit = float(largest).as_integer_ratio()
    if m * part <= unit:
        return [1 / m] * m, [i for i, n in enumerate(whole) if n * m > total]
    order = sorted(range(m), key=whole.__getitem__, reverse=True)
    left, rest, count = unit, total, 0  # of the 1, in units of 1 / unit; of the sizes; clients held to the largest
    while whole[order[count]] * left > part * rest:
        left -= part
        rest -= whole[order[count]]
        count += 1
    held = set(order[:count])
    lowered = [i for i, n in enumerate(whole) if n * unit > part * total]
    if not rest:
        whole, rest = [1] * m, m - count
    return [part / unit if i in held else n * left / (unit * rest) for i, n in enumerate(whole)], lowered


def limited(sizes: Tensor, largest: float | None, among: Tensor | None = None) -> Tensor:
    """Lower what clients count until nobody's part of the sum is above `largest`; the sum stays.

    Parameters
    ----------
    sizes : Tensor, (m,), float64
        Finite and ≥ 0.
    largest : float or None
        As for `capped_shares`. The sizes come back untouched where it is None or nobody is above it.
    among : Tensor, (m,), bool, optional
        The clients that count at all; the sizes of the others are 0, and stay so.
    """
    if largest is None:
        return sizes
    chosen = torch.ones_like(sizes, dtype=torch.bool) if among is None else among
    shares, lowered = capped_shares(sizes[chosen].tolist(), largest)
    if not lowered:
        return sizes
    found = torch.zeros_like(sizes)
    found[chosen] = torch.tensor(shares, dtype=sizes.dtype, device=sizes.device) * sizes.sum()
    return found


def _integers(sizes: Sequence[float]) -> list[int]:
    """The same numbers, multiplied by a power of two that makes integers of them all."""
    ratios = [size.as_integer_ratio() for size in sizes]
    unit = max((denominator for _, denominator in ratios), default=1)
    return [numerator * (unit // denominator) for numerator, denominator in ratios]
