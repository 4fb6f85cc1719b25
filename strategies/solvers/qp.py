"""Quadratic programs in a few hundred multipliers, solved by libraries on the CPU, with a certificate.

    nonnegative:  min ½ xᵀKx − bᵀx            s.t. x ≥ 0            (Lawson and Hanson's NNLS, by SciPy)
    box_simplex:  min ½ λᵀGλ                  s.t. Σλ = 1, l ≤ λ ≤ u (interior point, by Clarabel)

Both are bounded in time: NNLS by its number of exchanges, Clarabel by its clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import clarabel
import scipy.optimize
import torch
from scipy import sparse
from torch import Tensor

# Exchanges of NNLS a variable; it usually takes one, and cycling takes for ever.
_EXCHANGES = 10
SECONDS = 60.0
"""Longest time of a solve by Clarabel."""
TINY = torch.finfo(torch.float64).tiny


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
    matrix, vector = _on_cpu(K), _on_cpu(b)
    scale = float(vector.abs().max())
    if scale == 0 or bool((vector <= 0).all()):  # the gradient at 0 is −b
        return QPSolution(torch.zeros_like(b), torch.zeros((), dtype=b.dtype, device=b.device))
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise NoSolution("the clients' Gram matrix is not positive definite")
    right = torch.linalg.solve_triangular(lower, (vector / scale)[:, None], upper=False)[:, 0]
    try:
        found, _ = scipy.optimize.nnls(lower.T.numpy(), right.numpy(), maxiter=_EXCHANGES * len(vector))
        x = torch.from_numpy(found) * scale
    except RuntimeError:  # too many exchanges
        size = float(matrix.diagonal().max())
        none, endless = torch.zeros_like(vector), torch.full_like(vector, torch.inf)
        x = _clarabel(matrix / size, -vector / scale, none, endless, total=None) * (scale / size)
    w = matrix @ x - vector
    largest = max(float(x.max()), TINY)
    kkt = max(-min(float(w.min()), 0.0), float((x * w).abs().max()) / largest) / scale
    return QPSolution(x.to(b.device), torch.tensor(kkt, dtype=b.dtype, device=b.device))


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
    matrix, low, high = _on_cpu(G), _on_cpu(lower), _on_cpu(upper)
    scale = max(float(matrix.diagonal().max()), TINY)
    if bool((low == high).all()) or not bool(matrix.any()):
        x = low + (high - low) * (1 - low.sum()) / max(float((high - low).sum()), TINY)
    else:
        x = _clarabel(matrix / scale, torch.zeros_like(low), low, high, total=1.0).clamp(low, high)
    p = matrix @ x
    # The linear program fills the cheapest first: what is left for each when those before it are full.
    order = p.argsort(stable=True)
    room = (high - low)[order]
    left = (1 - low.sum()) - (room.cumsum(0) - room)
    best = low.clone()
    best[order] += torch.minimum(left.clamp(min=0), room)
    kkt = ((x - best) @ p / scale).clamp(min=0)
    return QPSolution(x.to(G.device), kkt.to(G.device))


def _clarabel(P: Tensor, q: Tensor, lower: Tensor, upper: Tensor, total: float | None) -> Tensor:
    m = len(q)
    identity = sparse.identity(m, format="csc")
    bounded = torch.isfinite(upper).numpy()
    rows = [-identity, identity[bounded]]
    right = [-lower, upper[torch.isfinite(upper)]]
    cones = [clarabel.NonnegativeConeT(m + int(bounded.sum()))]
    if total is not None:
        rows.insert(0, sparse.csc_matrix(torch.ones((1, m), dtype=torch.float64).numpy()))
        right.insert(0, torch.tensor([total], dtype=torch.float64))
        cones.insert(0, clarabel.ZeroConeT(1))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = SECONDS
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    # It perturbs each linear system, and with dense matrices has ended a few per cent short of the optimum.
    settings.static_regularization_enable = False
    A = sparse.vstack(rows, format="csc")
    found = clarabel.DefaultSolver(
        sparse.csc_matrix(P.triu().numpy()), q.numpy(), A, torch.cat(right).numpy(), cones, settings
    ).solve()
    x = torch.tensor(list(found.x), dtype=torch.float64)
    # "Almost" and "insufficient progress" end close to the optimum; how close, the caller's certificate says.
    if str(found.status) not in ("Solved", "AlmostSolved", "InsufficientProgress") or not bool(torch.isfinite(x).all()):
        raise NoSolution(f"the quadratic program of {m} clients was not solved: {found.status}")
    return x


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
