"""CRAFT's solve: the smallest correction of a reference direction that gives each client its share.

    min_g  ½‖g − ĝ‖²   subject to   U g = ρ     (the paper)   or   U g ≥ ρ

Rows of U are the clients' updates at unit length, ρ_i client i's share of the data, ĝ the reference.
With equality the solution is g = ĝ + U⁺(ρ − Uĝ) (Wang, Liu, Thuerey, "CRAFT", arXiv 2605.21317). U is never
pseudo-inverted: with K = U Uᵀ (m × m, float64), α = K⁺(ρ − Uĝ) and g = ĝ + Uᵀα. With inequality g = ĝ + Uᵀα too,
where α solves the dual min ½αᵀKα − αᵀ(ρ − Uĝ) over α ≥ 0: clients that have their share already pull nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gram import column_blocks, gram
from ..options import is_real, require
from . import qp

CONSTRAINTS = ("equality", "inequality")

# Rounding leaves errors of a few eps in the unit-diagonal K, and with them eigenvalues of that size where
# exact arithmetic has zeros (duplicated clients). The floor of the cut is this many times m·eps.
ROUNDING = 64
# Added to K, relative to its largest eigenvalue, where K is too close to singular for a dual without bounds.
_SOFT = 1e-10


@dataclass(frozen=True)
class CraftSolution:
    """A direction and how well it serves the clients.

    Attributes
    ----------
    direction : Tensor, (d,), float64
        g.
    alignment : Tensor, (m,), float64
        U g, the component of g along each client's unit update; 0 for a client whose update is zero.
    residual : float
        ‖U g − ρ‖ / ‖ρ‖ over the clients with a non-zero update, with inequality of max(ρ − U g, 0): 0 where the
        constraints can be met.
    rank : int
        Numerical rank of U.
    kkt : float
        With inequality, how far the multipliers are from optimal, see `strategies.solvers.qp.nonnegative`; else 0.
    """

    direction: Tensor
    alignment: Tensor
    residual: float
    rank: int
    kkt: float = 0.0


@dataclass(frozen=True)
class Coefficients:
    """The solution in the span of the updates: g = ĝ + Σ_i coefficients_i · g_i.

    Attributes
    ----------
    coefficients : Tensor, (m,), float64
        Multipliers of the updates as given, not of the unit updates.
    alignment, residual, rank, kkt
        As in `CraftSolution`; the last three are 0-d tensors on the device of the Gram matrix.
    """

    coefficients: Tensor
    alignment: Tensor
    residual: Tensor
    rank: Tensor
    kkt: Tensor


def check_options(constraint: str, ridge: float, rtol: float | None) -> None:
    """Refuse options outside their range.

    Raises
    ------
    ValueError
        One sentence that names the option.
    """
    if constraint not in CONSTRAINTS:
        raise ValueError(f"constraint={constraint!r} is unknown; choose one of {', '.join(CONSTRAINTS)}.")
    require("ridge", ridge, "a finite number of at least 0", is_real(ridge) and ridge >= 0)
    require(
        "rtol", rtol, "in [0, 1), or None for the rounding floor", rtol is None or (is_real(rtol) and 0 <= rtol < 1)
    )


def coefficients(
    gram_matrix: Tensor,
    cross: Tensor,
    targets: Tensor,
    *,
    updates: Tensor | None = None,
    constraint: str = "equality",
    ridge: float = 0.0,
    rtol: float | None = None,
) -> Coefficients:
    """Solve in the span of the updates, from inner products alone.

    Parameters
    ----------
    gram_matrix : Tensor, (m, m), float64
        ⟨g_i, g_j⟩ of the updates as received.
    cross : Tensor, (m,), float64
        ⟨g_i, ĝ⟩.
    targets : Tensor, (m,), float64
        ρ. A client with a zero update is left out; if all targets are ≥ 0, the others' are scaled up to the
        same sum.
    updates : Tensor, (m, d), float64, optional
        The updates themselves, for a layer of d < m parameters: K = U Uᵀ has the non-zero eigenvalues of the
        smaller Uᵀ U, which is then solved instead. For equality only.
    constraint : {"equality", "inequality"}
    ridge : float
        Added to the diagonal of K. K has a unit diagonal, so ridge is relative to a client's own weight. With
        inequality it makes the constraints soft: ½‖g − ĝ‖² + ‖max(ρ − U g, 0)‖² / (2 ridge) is minimised. Where
        no g meets them all (opposite clients, a layer narrower than m), the violation is as small as can be.
    rtol : float, optional
        Directions of U with singular values up to rtol times the largest are dropped, i.e. eigenvalues of K
        up to rtol² times the largest. Never below a rounding floor of 64·m·eps.

    Raises
    ------
    ValueError
        If an inner product is not finite.
    qp.NoSolution
        If the dual of the inequality is not solved.
    """
    if not bool(torch.isfinite(gram_matrix).all() & torch.isfinite(cross).all()):
        raise ValueError(
            "inner products of the updates are not finite: an update holds NaN or Inf or is too large "
            "to square in float64."
        )
    m = gram_matrix.shape[0]
    norms = gram_matrix.diagonal().sqrt()
    active = norms > 0
    inverse = torch.where(active, 1 / torch.where(active, norms, 1.0), 0.0)
    K = (gram_matrix * inverse[:, None]).mul_(inverse)
    aligned = cross * inverse  # U ĝ
    kept = torch.where(active, targets, 0.0)
    # Scaling to the same sum is for shares: with targets of both signs it could turn them around.
    total = kept.sum()
    shares = (total > 0) & (targets >= 0).all()
    rho = kept * torch.where(shares, targets.sum() / torch.where(shares, total, 1.0), 1.0)

    cut = max(0.0 if rtol is None else rtol**2, ROUNDING * m * torch.finfo(torch.float64).eps)
    if constraint == "inequality":
        alpha, rank, kkt = _inequality(K, rho - aligned, active, cut, ridge)
        alignment = aligned + K @ alpha
        return Coefficients(
            alpha * inverse, alignment, _relative((rho - alignment).clamp(min=0) * active, rho), rank, kkt
        )
    U = updates * inverse[:, None] if updates is not None and 0 < updates.shape[1] < m else None
    factor = _full_rank_factor(K, active, cut) if U is None and ridge == 0 else None
    if factor is not None:
        alpha = torch.cholesky_solve((rho - aligned)[:, None], factor)[:, 0]
        rank = active.sum()
    else:
        eigenvalues, vectors = torch.linalg.eigh(K if U is None else U.T @ U)
        keep = eigenvalues > cut * eigenvalues[-1]
        if U is not None:  # an eigenvector v of UᵀU belongs to K's eigenvector U v / √λ
            vectors = U @ (vectors * torch.where(keep, eigenvalues.clamp(min=0).rsqrt(), 0.0))
        scaled = torch.where(keep, 1 / torch.where(keep, eigenvalues + ridge, 1.0), 0.0)
        alpha = vectors @ (scaled * (vectors.T @ (rho - aligned)))
        rank = keep.sum()

    alignment = aligned + K @ alpha
    kkt = torch.zeros((), dtype=K.dtype, device=K.device)
    return Coefficients(alpha * inverse, alignment, _relative((alignment - rho) * active, rho), rank, kkt)


def _relative(missed: Tensor, rho: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rho)
    relative: Tensor = torch.linalg.vector_norm(missed) / torch.where(size > 0, size, 1.0)
    return relative


def _inequality(K: Tensor, wanted: Tensor, active: Tensor, cut: float, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise ½αᵀ(K + ridge·I)α − αᵀ·wanted over α ≥ 0, over the active clients; return α, the rank of K, and KKT.

    With a singular K the dual may have no bound (no g meets the constraints). A slight ridge then gives the least
    violation; the multipliers it blows up cancel in Uᵀα, and are projected on what K sees, where nothing is left
    to cancel. KKT is that of the problem with the ridge. Constraints that can only be met by a g a thousand times
    longer than the shares (clients opposite but for 1e-5) are not met: the ridge gives up on them.
    """
    alpha = torch.zeros_like(wanted)
    rows = active.nonzero()[:, 0]
    if not len(rows):
        return alpha, active.sum(), alpha.sum()
    small, b = K[rows][:, rows], wanted[rows]
    eigenvalues, vectors = torch.linalg.eigh(small)
    keep = eigenvalues > cut * eigenvalues[-1]
    soft = max(ridge, 0.0 if bool(eigenvalues[0] > _SOFT * eigenvalues[-1]) else float(_SOFT * eigenvalues[-1]))
    found = qp.nonnegative(small + soft * torch.eye(len(rows), dtype=K.dtype, device=K.device), b)
    x, kkt = found.x, found.kkt
    if soft > ridge:
        x = _polished(small, b, x, cut)
        basis = vectors[:, keep]
        x = basis @ (basis.T @ x)
    alpha[rows] = x
    return alpha, keep.sum(), kkt


def _polished(K: Tensor, b: Tensor, x: Tensor, cut: float) -> Tensor:
    """Solve without the slight ridge where the multipliers that it left at zero say which constraints hold."""
    binding = x > 1e-12 * x.max()
    if not bool(binding.any()):
        return x
    part = K[binding][:, binding]
    eigenvalues, vectors = torch.linalg.eigh(part)
    keep = eigenvalues > cut * eigenvalues[-1]
    inverse = torch.where(keep, 1 / torch.where(keep, eigenvalues, 1.0), 0.0)
    exact = torch.zeros_like(x)
    exact[binding] = vectors @ (inverse * (vectors.T @ b[binding]))
    tolerance = 1e-9 * b.abs().max()
    slack = K @ exact - b
    fine = bool((slack > -tolerance).all() & (exact > -1e-9 * exact.abs().max()).all())
    return exact if fine else x


def _full_rank_factor(K: Tensor, active: Tensor, cut: float) -> Tensor | None:
    """Return the Cholesky factor of K, or None unless all its eigenvalues surely exceed cut · the largest.

    Nothing is cut then, and a factor takes a tenth of the time of eigenvalues or less. Proof: λ_min ≥ 1 / tr K⁻¹
    and λ_max ≤ ‖K‖_F. Clients without an update, zero rows of K, get a 1 on the diagonal; their α stays zero.
    """
    padded = K.clone()
    padded.diagonal().add_((~active).to(K.dtype))
    factor, failed = torch.linalg.cholesky_ex(padded)
    if bool(failed):
        return None
    bound = torch.linalg.vector_norm(padded) * torch.cholesky_inverse(factor, out=padded).trace()
    # The bound is itself subject to rounding, by far less than a factor of two above the floor of the cut.
    return factor if bool(bound < 0.5 / cut) else None


def solve(
    updates: Tensor,
    targets: Tensor,
    reference: Tensor | None = None,
    *,
    constraint: str = "equality",
    ridge: float = 0.0,
    rtol: float | None = None,
) -> CraftSolution:
    """Solve min ½‖g − ĝ‖² subject to U g = ρ, or U g ≥ ρ, for one layer.

    Parameters
    ----------
    updates : Tensor, (m, d), any real floating dtype
        Row i is client i's update (its weights after local training minus the global ones). Only the
        direction of each row matters; a zero row is left out.
    targets : Tensor, (m,)
        ρ, the component of g wanted along each unit update.
    reference : Tensor, (d,), optional
        ĝ; zero when None.
    constraint : {"equality", "inequality"}
    ridge, rtol
        See `coefficients`.

    Returns
    -------
    CraftSolution
        In float64, on the device of `updates`.

    Raises
    ------
    ValueError
        On wrong shapes or dtypes, values that are not finite, or an unknown option; one sentence.
    """
    check_options(constraint, ridge, rtol)
    updates = torch.as_tensor(updates)
    if updates.ndim != 2 or updates.shape[0] == 0 or not updates.is_floating_point():
        raise ValueError(
            f"updates must be a floating-point matrix (clients, parameters) with at least one row, "
            f"not {updates.dtype} of shape {tuple(updates.shape)}."
        )
    m, d = updates.shape
    device = updates.device
    rho = torch.as_tensor(targets).to(device, torch.float64)
    if rho.shape != (m,):
        raise ValueError(f"targets must have one entry per client, shape ({m},), not {tuple(rho.shape)}.")
    if not bool(torch.isfinite(rho).all()):
        raise ValueError("targets hold NaN or Inf; give each client a finite share.")
    start = None
    if reference is not None:
        start = torch.as_tensor(reference).to(device, torch.float64)
        if start.shape != (d,):
            raise ValueError(f"reference must have one entry per parameter, shape ({d},), not {tuple(start.shape)}.")
        if not bool(torch.isfinite(start).all()):
            raise ValueError("the reference holds NaN or Inf; pass None for no reference.")
    size = None
    if updates.dtype == torch.float64 and d:
        # Only directions matter; with a largest entry of 1 no row is too long or too short to be squared.
        # Rows of narrower dtypes never are.
        largest = updates.abs().amax(dim=1, keepdim=True)
        size = torch.where(largest > 0, largest, 1.0)

    def blocks() -> Iterator[tuple[slice, Tensor]]:
        for columns, block in column_blocks(updates):
            yield columns, block if size is None else block / size

    inner = gram(blocks(), m, start, device=device)
    narrow = torch.cat([block for _, block in blocks()], dim=1) if 0 < d < m else None
    found = coefficients(inner.matrix, inner.cross, rho, updates=narrow, constraint=constraint, ridge=ridge, rtol=rtol)
    direction = torch.zeros(d, dtype=torch.float64, device=device) if start is None else start.clone()
    for columns, block in blocks():
        direction[columns] += found.coefficients @ block
    return CraftSolution(direction, found.alignment, float(found.residual), int(found.rank), float(found.kkt))
