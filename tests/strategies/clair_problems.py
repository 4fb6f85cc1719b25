"""Problems that CLAIR is tested on: clients with a common row space and contaminated ones, as least squares sees them.

The reference simulation of METHODS.md, section 3: W_k = W_0 + B_k A with orthonormal rows of A and B_k ~ N(0, 1/q),
contaminated clients W_0 + B'_k A'_k with a row space of their own and entries of B'_k of standard deviation 1.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """What the server sees of each client, (K, q, p), and what it does not."""

    weights: np.ndarray
    truth: np.ndarray
    bad: np.ndarray
    common: np.ndarray  # A, (r, p)

    def error(self, estimates):
        """Mean over benign clients of the sum of squared errors of their entries."""
        return float(np.square(np.asarray(estimates) - self.truth).sum((1, 2))[~self.bad].mean())


def row_space(rng, r, p):
    """Draw r orthonormal rows."""
    return np.linalg.qr(rng.normal(size=(p, r)))[0].T


def problem(count, bad, seed, *, n=200, p=20, q=10, r=2, het=0.0, scale=1.0, colluding=False, shuffled=True):
    """Draw a problem: `bad` of `count` clients are contaminated, and every client has n samples.

    `het` is the standard deviation of what benign clients have of their own off the subspace, `scale` that of the
    entries of B'_k, of which the benign ones have 1/√q; colluding contaminated clients share one row space. n = None
    is without noise.
    """
    rng = np.random.default_rng(seed)
    common = row_space(rng, r, p)
    theirs = row_space(rng, r, p)
    is_bad = np.zeros(count, bool)
    is_bad[rng.permutation(count)[:bad] if shuffled else np.arange(count - bad, count)] = True
    start = rng.normal(size=(q, p))
    truth = np.empty((count, q, p))
    weights = np.empty_like(truth)
    for k in range(count):
        if is_bad[k]:
            own = theirs if colluding else row_space(rng, r, p)
            truth[k] = start + scale * rng.normal(size=(q, r)) @ own
        else:
            truth[k] = start + rng.normal(size=(q, r)) / np.sqrt(q) @ common
            truth[k] += het * rng.normal(size=(q, p)) @ (np.eye(p) - common.T @ common)
        weights[k] = truth[k] if n is None else least_squares(rng, truth[k], n)
    return Problem(weights, truth, is_bad, common)


def least_squares(rng, W, n):
    """Estimate W from n samples y = W x + noise, x and the noise standard normal."""
    q, p = W.shape
    X = rng.normal(size=(n, p))
    Y = X @ W.T + rng.normal(size=(n, q))
    return np.linalg.lstsq(X, Y, rcond=None)[0].T
