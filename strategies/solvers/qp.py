"""Quadratic programs in a few hundred multipliers, solved by libraries on the CPU, with a certificate.

    nonnegative:  min ½ xᵀKx − bᵀx            s.t. x ≥ 0            (Lawson and Hanson's NNLS, by SciPy)
    box_simplex:  min ½ λᵀGλ                  s.t. Σλ = 1, l ≤ λ ≤ u (interior point, by Clarabel)

Both are bounded in time: NNLS by its number of exchanges, Clarabel by its clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import clarabel
import numpy as np
import scipy.optimize
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

Matrix = NDArray[np.float64]

# Exchanges of NNLS a variable; it usually takes one, and cycling takes for ever.
_EXCHANGES = 10
SECONDS = 60.0
"""Longest time of a solve by Clarabel."""


class NoSolution(ArithmeticError):
    """A solver did not finish; the message says which."""


@dataclass(frozen=True)
class QPSolution:
    """A minimiser and how far it is from optimal.

    Attributes
    ----------
    x : Tensor, (m,), float64
        On the device of the problem's matrix.
    kkt : Tensor, 0-d, float64
        Largest violation of the optimality conditions, relative to the problem's scale: 0 at the optimum.
    """

    x: Tensor
    kkt: Tensor


def nonnegative(K: Tensor, b: Tensor) -> QPSolution:
    """Minimise ½ xᵀKx − bᵀx over x ≥ 0.

    Parameters
    ----------
    K : Tensor, (m, m), float64
        Positive definite.
    b : Tensor, (m,), float64

    Returns
    -------
    QPSolution
        `kkt` is the largest of |min(w, 0)| and |x·w| / max x, with w = Kx − b the gradient, over max |b|.

    Raises
    ------
    NoSolution
        If K is not positive definite, or no solver finishes.
    """
    if not len(b):
        return QPSolution(b.clone(), b.sum())
    # NumPy would use threads of its own for matrices, which wait by spinning and take PyTorch's the processor.
    on_cpu, target = K.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    matrix, vector = on_cpu.numpy(), target.numpy()
    scale = float(target.abs().max())
    if scale == 0 or bool((target <= 0).all()):  # the gradient at 0 is −b
        return QPSolution(torch.zeros_like(b), torch.zeros((), dtype=b.dtype, device=b.device))
    lower, failed = torch.linalg.cholesky_ex(on_cpu)
    if bool(failed):
        raise NoSolution("the clients' Gram matrix is not positive definite")
    right = torch.linalg.solve_triangular(lower, (target / scale)[:, None], upper=False)[:, 0]
    try:
        x = scipy.optimize.nnls(lower.T.numpy(), right.numpy(), maxiter=_EXCHANGES * len(vector))[0] * scale
    except RuntimeError:  # too many exchanges
        m, size = len(vector), float(matrix.diagonal().max())
        x = _clarabel(matrix / size, -vector / scale, np.zeros(m), np.full(m, np.inf), total=None) * (scale / size)
    w = (on_cpu @ torch.from_numpy(x) - target).numpy()
    largest = max(float(x.max()), np.finfo(np.float64).tiny)
    kkt = max(-min(float(w.min()), 0.0), float(np.abs(x * w).max()) / largest) / scale
    return QPSolution(torch.from_numpy(x).to(b.device), torch.tensor(kkt, dtype=b.dtype, device=b.device))


def box_simplex(G: Tensor, lower: Tensor, upper: Tensor) -> QPSolution:
    """Minimise ½ λᵀGλ over Σλ = 1, lower ≤ λ ≤ upper.

    Parameters
    ----------
    G : Tensor, (m, m), float64
        Positive semidefinite.
    lower, upper : Tensor, (m,), float64
        Σ lower ≤ 1 ≤ Σ upper.

    Returns
    -------
    QPSolution
        `kkt` is the gap λᵀGλ − min over the set of λ'ᵀGλ, which bounds the distance to the optimal value, over
        the largest G_ii.

    Raises
    ------
    NoSolution
        If the solver does not finish.
    """
    matrix, low, high = _array(G), _array(lower), _array(upper)
    scale = max(float(matrix.diagonal().max()), np.finfo(np.float64).tiny)
    if (low == high).all() or not matrix.any():
        x = low + (high - low) * (1 - low.sum()) / max((high - low).sum(), np.finfo(np.float64).tiny)
    else:
        x = np.clip(_clarabel(matrix / scale, np.zeros(len(low)), low, high, total=1.0), low, high)
    p = matrix @ x
    # The linear program fills the cheapest first.
    best, left = low.copy(), 1 - low.sum()
    for i in np.argsort(p, kind="stable"):
        best[i] += min(left, high[i] - low[i])
        left -= best[i] - low[i]
    kkt = max(float((x - best) @ p), 0.0) / scale
    return QPSolution(torch.from_numpy(x).to(G.device), torch.tensor(kkt, dtype=G.dtype, device=G.device))


def _clarabel(P: Matrix, q: Matrix, lower: Matrix, upper: Matrix, total: float | None) -> Matrix:
    m = len(q)
    identity = sparse.identity(m, format="csc")
    bounded = np.isfinite(upper)
    rows = [-identity, identity[bounded]]
    right = [-lower, upper[bounded]]
    cones = [clarabel.NonnegativeConeT(m + int(bounded.sum()))]
    if total is not None:
        rows.insert(0, sparse.csc_matrix(np.ones((1, m))))
        right.insert(0, np.array([total]))
        cones.insert(0, clarabel.ZeroConeT(1))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = SECONDS
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    # It perturbs each linear system, and with dense matrices has ended a few per cent short of the optimum.
    settings.static_regularization_enable = False
    A = sparse.vstack(rows, format="csc")
    found = clarabel.DefaultSolver(sparse.csc_matrix(np.triu(P)), q, A, np.concatenate(right), cones, settings).solve()
    x = np.array(found.x)
    # "Almost" and "insufficient progress" end close to the optimum; how close, the caller's certificate says.
    if str(found.status) not in ("Solved", "AlmostSolved", "InsufficientProgress") or not np.isfinite(x).all():
        raise NoSolution(f"the quadratic program of {m} clients was not solved: {found.status}")
    return x


def _array(tensor: Tensor) -> Matrix:
    return tensor.detach().to("cpu", torch.float64).numpy()
