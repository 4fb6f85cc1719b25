"""The simplex: projection onto it, and the point of smallest norm in the convex hull of the updates.

The min-norm point is the common descent direction of multiple-gradient descent (Désidéri, "Multiple-gradient
descent algorithm", Comptes Rendus Mathématique 350, 2012): its inner product with every update is at least
its own squared length, so it is in conflict with none.
"""

from __future__ import annotations

import scipy.optimize
import torch
from torch import Tensor

from . import qp


def project(values: Tensor) -> Tensor:
    """Return the point of the probability simplex nearest to `values`, (m,).

    By sorting: Held, Wolfe, Crowder, "Validation of subgradient optimization", Mathematical Programming 6, 1974.
    """
    values = values - values.max()  # the same point, and no number too large to take 1 off
    ordered = values.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    count = int((ordered > excess).sum())
    return (values - excess[max(count, 1) - 1]).clamp(min=0)


def min_norm(gram_matrix: Tensor) -> qp.QPSolution:
    """Weights λ on the simplex that minimise ‖Σ λ_i g_i‖², from inner products alone.

    With R such that RᵀR = G, non-negative least squares of [R; 1ᵀ] x = [0; 1] gives x = λ / (1 + ‖Rλ‖²) (Lawson
    and Hanson, "Solving Least Squares Problems", 1974, chapter 23).

    Parameters
    ----------
    gram_matrix : Tensor, (m, m), float64
        G_ij = ⟨g_i, g_j⟩.

    Returns
    -------
    QPSolution
        `kkt` as for `qp.box_simplex`.

    Raises
    ------
    qp.NoSolution
        If no solver finishes.
    """
    m, device = len(gram_matrix), gram_matrix.device
    # NumPy would use threads of its own for matrices, which wait by spinning and take PyTorch's the processor.
    G = gram_matrix.detach().to("cpu", torch.float64)
    scale = float(G.diagonal().max())
    if m == 1 or scale <= 0:
        x = torch.full((m,), 1 / m, dtype=torch.float64, device=device)
        return qp.QPSolution(x, torch.zeros((), dtype=torch.float64, device=device))
    eigenvalues, vectors = torch.linalg.eigh(G / scale)
    R = eigenvalues.clamp(min=0).sqrt()[:, None] * vectors.T
    matrix = torch.cat([R, torch.ones((1, m), dtype=torch.float64)])
    right = torch.zeros(m + 1, dtype=torch.float64)
    right[-1] = 1
    try:
        found, _ = scipy.optimize.nnls(matrix.numpy(), right.numpy(), maxiter=10 * m)
    except RuntimeError:  # too many exchanges
        ones = torch.ones(m, dtype=torch.float64, device=device)
        return qp.box_simplex(gram_matrix, 0 * ones, ones)
    weights = torch.from_numpy(found / found.sum())
    p = G @ weights
    kkt = ((weights @ p - p.min()) / scale).clamp(min=0)
    return qp.QPSolution(weights.to(device), kkt.to(device))
