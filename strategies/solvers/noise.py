"""The noise level of clients' matrices, from their differences: robust to signals of low rank and to a minority.

A matrix of low rank hardly moves the median of the singular values of the noise it is added to (Gavish and Donoho 2014,
arXiv 1305.5870). Of the difference of two matrices W_j − W_k the median singular value, without the `rank` largest,
which are the signal's, is compared with that of unit noise of the shape that is left; a lower quartile over the pairs
does without those that a contaminated client is part of.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

# Numbers drawn for the median singular value of unit noise, and most matrices.
_DRAWN, _MATRICES = 400_000, 200
# Times the usual size of a difference from which its roundings may hide what others hold.
_FAR = 1e6


@lru_cache(maxsize=256)
def unit_quantile(q: int, p: int, share: float = 0.5) -> float:
    """Return the mean of a quantile of the singular values of q × p standard normal matrices, by simulation.

    The same for the same arguments, whatever the global generators' states.
    """
    q, p = min(q, p), max(q, p)
    generator = torch.Generator().manual_seed(q * 100_003 + p)
    count = max(1, min(_MATRICES, _DRAWN // (q * p)))
    total = 0.0
    for _ in range(count):
        drawn = torch.randn(q, p, generator=generator, dtype=torch.float64)
        total += float(torch.linalg.svdvals(drawn).quantile(share))
    return total / count


def noise_of_pairs(singular_values: Tensor, q: int, p: int, rank: int) -> float:
    """Estimate the standard deviation of an entry of W_k, of independent noise.

    Parameters
    ----------
    singular_values : Tensor, (G, min(q, p))
        Of W_j − W_k for pairs of clients, the largest first.
    q, p : int
        Shape of the W_k.
    rank : int
        Of the difference of two benign clients without noise; below min(q, p).

    Returns
    -------
    float
        0 where there is no pair.
    """
    if not len(singular_values):
        return 0.0
    medians = singular_values[:, rank:].quantile(0.5, dim=1)
    medians = medians[of_usual_size(singular_values)]
    return float(medians.quantile(0.25)) / math.sqrt(2) / unit_quantile(q - rank, p - rank)


def of_usual_size(singular_values: Tensor) -> Tensor:
    """Say which pairs' differences are no million times larger than usual: the others show roundings, not noise."""
    largest = singular_values[:, 0]
    if not len(largest):
        return largest <= 0
    usual: Tensor = largest <= _FAR * largest.quantile(0.25)
    return usual


def noise_of_tails(singular_values: Tensor, q: int, p: int, rank: int) -> float:
    """Estimate the same by all that is left of a pair's difference, where it is not of full rank, as after LoRA.

    The lower quartile over pairs of the root of the sum of the squared singular values after the `rank` largest, per
    degree of freedom. Arguments as of `noise_of_pairs`.
    """
    if not len(singular_values):
        return 0.0
    tails = singular_values[:, rank:].norm(dim=1)
    return float(tails.quantile(0.25)) / math.sqrt(2 * (q - rank) * (p - rank))


def noise_of_stack(stack: Tensor, p: int) -> float:
    """Estimate the same where pairs cannot tell, a single row having one singular value: from all clients at once.

    The lower quartile of the singular values of all matrices above each other is noise while what they differ in has
    less than three quarters of the dimensions there are.

    Parameters
    ----------
    stack : Tensor, (K, q, p'), float64
        W_k, centred by their mean, in any orthonormal coordinates of their rows' span.
    p : int
        Their number of columns.
    """
    count, q, width = stack.shape
    rows = (count - 1) * q
    values = torch.linalg.svdvals(stack.reshape(-1, width))[: min(rows, p)]
    return float(values.quantile(0.25)) / unit_quantile(rows, p, 0.25)
