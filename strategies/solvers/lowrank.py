"""Low-rank plus block-sparse: the convex programs of CLAIR, solved by accelerated proximal gradient.

He, Chen, Feng, "CLAIR", arXiv 2605.21217. Of K clients' matrices W_k (q × p) the program sees differences only:

    min  ½ Σ_g ω_g ‖D_g − L_g − S_g‖_F² + λ_L ‖L‖_* + λ_S Σ_g ‖S_g‖_F,      D_g = W_j − W_k for each pair g = (j, k),

with L the blocks L_g stacked to (G q) × p. S is eliminated: for a given L its blocks are those of D − L, shortened by
λ_S/ω_g, so that the loss in L is Huber's of ‖D_g − L_g‖_F, and no client, however far off, pulls by more than λ_S.
The other form has a block for each client instead of each pair (L = ΔM and S = ΔC, Δ the incidence matrix of all pairs;
ΔᵀΔ = K I − 11ᵀ); it is another estimator.

Neither stacks what it can compute: D_g is made from the W_k when it is needed, and L is kept in factors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

# Numbers in a chunk of blocks: 32 MB in float64.
_CHUNK = 2**22
# Iterations between looks at the optimality residual, each of which costs a pass.
_EVERY = 5
# Factor on the regularisation from one warm start to the next, and the ratio of signal to λ_S from which there are any.
_CONTINUATION, _FAR = 10.0, 30.0
# Share of the memory available that one solve may take.
_SHARE = 0.8


class TooLargeError(MemoryError):
    """What a solve would have to keep does not fit into memory; the message says what to do instead."""


@dataclass(frozen=True)
class Certificate:
    """How far a solution is from optimal.

    Attributes
    ----------
    converged : bool
        Whether `residual` is within the tolerance.
    iterations : int
    residual : float
        Distance from zero to the objective's subdifferential at the solution, relative to the length of its norm's
        part: λ_L √rank(L), in the form for clients λ_S √K. No client's size enters.
    gap : float
        Duality gap at a feasible point made from the solution, relative to the objective; an upper bound of what the
        objective lies above its minimum.
    objective : float
    """

    converged: bool
    iterations: int
    residual: float
    gap: float
    objective: float


@dataclass(frozen=True)
class Decomposition:
    """L and S, in factors.

    Attributes
    ----------
    basis : Tensor, (p, ρ), float64
        Right singular vectors of the low-rank part, the strongest first; ρ is its rank.
    singular_values : Tensor, (ρ,), float64
        Its singular values: in the form for clients those of √K times the centred M, which is L's there.
    certificate : Certificate
    """

    weights: Tensor
    pairs: Tensor
    basis: Tensor
    singular_values: Tensor
    certificate: Certificate
    limits: Tensor
    left: Tensor | None
    offsets: Tensor | None

    @cached_property
    def low_rank(self) -> Tensor:
        """L, (G, q, p), a block for each pair; in the form for clients M, (K, q, p)."""
        q, p = self.weights.shape[1:]
        count = len(self.weights) if self.left is None else len(self.pairs)
        require_memory(count * q * p, self.weights.device, f"the {count} blocks of the low-rank part")
        if self.left is not None:
            return (self.left @ self.basis.T).view(-1, q, p)
        assert self.offsets is not None
        rest = _centred(self.weights - self.offsets)
        return _shrunk(rest.reshape(-1, p), float(self.limits[0]))[0].view(-1, q, p)

    @cached_property
    def sparse(self) -> Tensor:
        """S, (G, q, p); in the form for clients C, (K, q, p)."""
        if self.offsets is not None:
            return self.offsets
        q, p = self.weights.shape[1:]
        require_memory(len(self.pairs) * q * p, self.weights.device, f"the {len(self.pairs)} blocks of the sparse part")
        return torch.cat([block for _, block in self.sparse_blocks()] or [self.weights.new_zeros(0, q, p)])

    def sparse_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the blocks of S for the pairs, some at a time, (c, q, p)."""
        q, p = self.weights.shape[1:]
        for rows in chunks(len(self.pairs), q * p):
            j, k = self.pairs[rows].T
            if self.offsets is not None:
                yield rows, self.offsets[j] - self.offsets[k]
                continue
            assert self.left is not None
            rest = self.weights[j] - self.weights[k] - (self._left(rows) @ self.basis.T).view(-1, q, p)
            norms = rest.flatten(1).norm(dim=1)
            kept = (1 - self.limits[rows] / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(min=0)
            yield rows, rest * kept[:, None, None]

    def _left(self, rows: slice) -> Tensor:
        assert self.left is not None
        q = self.weights.shape[1]
        return self.left[rows.start * q : rows.stop * q]


def chunks(count: int, size: int) -> Iterator[slice]:
    """Cut `count` blocks of `size` numbers into pieces that fit a few times into a small memory."""
    step = max(1, _CHUNK // max(size, 1))
    for low in range(0, count, step):
        yield slice(low, min(low + step, count))


def available_memory(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device, as far as the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(numbers: float, device: torch.device, what: str) -> None:
    """Raise TooLargeError if so many float64 numbers do not fit on a device."""
    free = _SHARE * available_memory(device)
    if 8 * numbers > free:
        raise TooLargeError(
            f"{what} would take {8 * numbers / 1e9:.1f} GB where {free / 1e9:.1f} GB are free; use form='clients', or "
            "fewer pairs (random_pairs)."
        )


def solve_pairs(
    weights: Tensor,
    pairs: Tensor,
    pair_weights: Tensor,
    lambda_low: float,
    lambda_sparse: float,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 300,
) -> Decomposition:
    """Solve the program for pairs.

    Parameters
    ----------
    weights : Tensor, (K, q, p), float64
        W_k, centred by something robust, so that differences lose nothing.
    pairs : Tensor, (G, 2), int64
        (j, k) of each block.
    pair_weights : Tensor, (G,), float64
        ω_g > 0.
    lambda_low, lambda_sparse : float
        λ_L, λ_S > 0.
    tolerance : float
        Of `Certificate.residual`.
    max_iterations : int

    Returns
    -------
    Decomposition
        With `left`, (G q, ρ), so that L = left · basisᵀ.

    Raises
    ------
    TooLargeError
        If the factors of L do not fit into memory.
    """
    program = _PairProgram(weights, pairs, pair_weights)
    return program.solve(lambda_low, lambda_sparse, tolerance, max_iterations)


class _PairProgram:
    """FISTA on the Huber form; L = left · rightᵀ, and a pass over the pairs makes everything else."""

    def __init__(self, weights: Tensor, pairs: Tensor, pair_weights: Tensor) -> None:
        self.weights, self.pairs, self.omega = weights, pairs, pair_weights
        self.count, (_, self.q, self.p) = len(pairs), weights.shape
        self.step = 1.0 / float(pair_weights.max()) if len(pairs) else 1.0

    def solve(self, lambda_low: float, lambda_sparse: float, tolerance: float, max_iterations: int) -> Decomposition:
        zero = self._zero()
        state, used, residual = zero, 0, math.inf
        # From far away each step is λ_S long at most: larger λ first, so that it is not far.
        factor = self._first_factor(lambda_sparse)
        while True:
            if max_iterations - used <= 1:
                factor = 1.0
            last = factor <= 1.0
            accuracy = tolerance if last else 1e-2
            budget = max_iterations - used - (0 if last else 1)  # one is left for the program itself
            low, sparse = factor * lambda_low, factor * lambda_sparse
            state, singular_values, residual, took = self._descend(state, low, sparse, accuracy, budget)
            used += took
            if last:
                break
            factor = max(factor / _CONTINUATION, 1.0)
        left, basis = state
        objective, gap = self._gap(state, singular_values, lambda_low, lambda_sparse)
        certificate = Certificate(residual <= tolerance, used, residual, gap, objective)
        limits = lambda_sparse / self.omega
        return Decomposition(
            self.weights, self.pairs, basis, singular_values, certificate, limits, left=left, offsets=None
        )

    def _first_factor(self, lambda_sparse: float) -> float:
        if not self.count:
            return 1.0
        norms = torch.cat(
            [self._differences(rows).flatten(1).norm(dim=1) for rows in chunks(self.count, self.q * self.p)]
        )
        typical = float((norms * self.omega).median()) / lambda_sparse
        return 1.0 if typical <= _FAR else _CONTINUATION ** math.ceil(math.log(typical / _FAR, _CONTINUATION))

    def _zero(self) -> tuple[Tensor, Tensor]:
        return self.weights.new_zeros(self.count * self.q, 0), self.weights.new_zeros(self.p, 0)

    def _differences(self, rows: slice) -> Tensor:
        j, k = self.pairs[rows].T
        return self.weights[j] - self.weights[k]

    def _dense(self, state: tuple[Tensor, Tensor], rows: slice) -> Tensor:
        left, right = state
        return (left[rows.start * self.q : rows.stop * self.q] @ right.T).view(-1, self.q, self.p)

    def _pull(self, rest: Tensor, rows: slice, lambda_sparse: float) -> Tensor:
        """−∇ of the Huber loss at blocks D − L: ω_g of them, λ_S long at most."""
        norms = rest.flatten(1).norm(dim=1)
        tiny = torch.finfo(norms.dtype).tiny
        return rest * torch.minimum(self.omega[rows], lambda_sparse / norms.clamp(min=tiny))[:, None, None]

    def _descend(
        self, state: tuple[Tensor, Tensor], lambda_low: float, lambda_sparse: float, tolerance: float, budget: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor, float, int]:
        """Return L in factors, its singular values, the optimality residual and the number of iterations."""
        previous, ahead, momentum = state, state, 1.0
        singular_values = self.weights.new_zeros(state[0].shape[1])
        residual, iteration = math.inf, 0
        for iteration in range(1, budget + 1):
            state, singular_values = self._proximal_step(ahead, lambda_low, lambda_sparse)
            if iteration % _EVERY == 0 or iteration >= budget:
                residual = self._residual(ahead, state, lambda_low, lambda_sparse)
                if residual <= tolerance:
                    break
            # O'Donoghue and Candès 2015: momentum that points uphill starts anew.
            if _inner(_minus(ahead, state), _minus(state, previous)) > 0:
                momentum = 1.0
            following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            beta = (momentum - 1) / following
            ahead = state if beta == 0 else _joined(state, previous, 1 + beta, -beta)
            previous, momentum = state, following
        return state, singular_values, residual, iteration

    def _proximal_step(
        self, ahead: tuple[Tensor, Tensor], lambda_low: float, lambda_sparse: float
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Soft-threshold the singular values of Y = Z − t∇f(Z), through the p × p Gram matrix.

        Its relative accuracy of √eps is enough: steps are bounded by λ_S, so that Y is no larger than L plus that.
        """
        gram = self.weights.new_zeros(self.p, self.p)
        kept: list[Tensor] = []
        keeps = self.count * self.q * self.p <= 8 * _CHUNK
        for rows in chunks(self.count, self.q * self.p):
            moved = self._moved(ahead, rows, lambda_sparse)
            gram.addmm_(moved.T, moved)
            if keeps:
                kept.append(moved)
        eigenvalues, vectors = torch.linalg.eigh(gram)
        values = eigenvalues.clamp(min=0).sqrt().flip(0)
        threshold = self.step * lambda_low
        rank = int((values > threshold).sum())
        values, right = values[:rank], vectors.flip(1)[:, :rank]
        if not keeps:
            # The new left factor beside the last one and the two that momentum joins.
            require_memory(
                4 * self.count * self.q * rank, self.weights.device, f"the low-rank parts of {self.count} pairs"
            )
        left = self.weights.new_empty(self.count * self.q, rank)
        shrink = right * (1 - threshold / values)
        for i, rows in enumerate(chunks(self.count, self.q * self.p)):
            moved = kept[i] if keeps else self._moved(ahead, rows, lambda_sparse)
            torch.mm(moved, shrink, out=left[rows.start * self.q : rows.stop * self.q])
        return (left, right), values - threshold

    def _moved(self, ahead: tuple[Tensor, Tensor], rows: slice, lambda_sparse: float) -> Tensor:
        start = self._dense(ahead, rows)
        pull = self._pull(self._differences(rows) - start, rows, lambda_sparse)
        return start.add_(pull, alpha=self.step).reshape(-1, self.p)

    def _residual(
        self, ahead: tuple[Tensor, Tensor], state: tuple[Tensor, Tensor], lambda_low: float, lambda_sparse: float
    ) -> float:
        """‖∇f(L) − ∇f(Z) + (Z − L)/t‖: an element of the subdifferential at L, the proximal step having made it."""
        total = self.weights.new_zeros(())
        for rows in chunks(self.count, self.q * self.p):
            differences, before, now = self._differences(rows), self._dense(ahead, rows), self._dense(state, rows)
            change = self._pull(differences - before, rows, lambda_sparse)
            change -= self._pull(differences - now, rows, lambda_sparse)
            total += change.add_(before - now, alpha=1 / self.step).square().sum()
        return float(total.sqrt()) / (lambda_low * math.sqrt(max(1, state[0].shape[1])))

    def _gap(
        self, state: tuple[Tensor, Tensor], singular_values: Tensor, lambda_low: float, lambda_sparse: float
    ) -> tuple[float, float]:
        """Return the objective, and the duality gap relative to it.

        The dual is max Σ⟨Y_g, D_g⟩ − ‖Y_g‖²/(2ω_g) over ‖Y_g‖_F ≤ λ_S and ‖Y‖_2 ≤ λ_L; the pull, scaled down until the
        second holds, is feasible. Terms are paired block by block, so that nothing large cancels.
        """
        gram = self.weights.new_zeros(self.p, self.p)
        for rows in chunks(self.count, self.q * self.p):
            pull = self._pull(self._differences(rows) - self._dense(state, rows), rows, lambda_sparse)
            flat = pull.reshape(-1, self.p)
            gram.addmm_(flat.T, flat)
        largest = float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt()) if self.p else 0.0
        scale = min(1.0, lambda_low / largest) if largest > 0 else 1.0
        nuclear = lambda_low * float(singular_values.sum())
        loss, gap = 0.0, nuclear
        for rows in chunks(self.count, self.q * self.p):
            low = self._dense(state, rows)
            rest = self._differences(rows) - low
            pull, omega = self._pull(rest, rows, lambda_sparse), self.omega[rows]
            along = (pull * rest).sum((1, 2))
            half = pull.square().sum((1, 2)) / (2 * omega)
            loss += float((along - half).sum())
            gap += float(((1 - scale) * along - (1 - scale**2) * half).sum()) - scale * float((pull * low).sum())
        objective = loss + nuclear
        return objective, gap / objective if objective > 0 else 0.0


def _joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Return α a + β b in factors."""
    return torch.cat([alpha * a[0], beta * b[0]], dim=1), torch.cat([a[1], b[1]], dim=1)


def _minus(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> list[tuple[float, tuple[Tensor, Tensor]]]:
    return [(1.0, a), (-1.0, b)]


def _inner(a: list[tuple[float, tuple[Tensor, Tensor]]], b: list[tuple[float, tuple[Tensor, Tensor]]]) -> float:
    """⟨Σ s_i X_i, Σ t_j Y_j⟩ of matrices in factors."""
    return sum(s * t * float(((x[0].T @ y[0]) * (x[1].T @ y[1])).sum()) for s, x in a for t, y in b)


def solve_clients(
    weights: Tensor,
    pairs: Tensor,
    lambda_low: float,
    lambda_sparse: float,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 300,
) -> Decomposition:
    """Solve the program with a block for each client.

    min ½ K‖centre(W − M − C)‖_F² + λ_L √K ‖centre(M)‖_* + λ_S Σ_k‖C_k‖_F. M is eliminated: given C it is
    centre(W − C) with its singular values shortened by λ_L/√K, and what is left in C has the gradient −K times the
    part of centre(W − C) that this cuts off. C starts where every W_k but for a moderate part is its own, so that no
    client, however far off, is ever in the matrix whose singular values are taken.

    Parameters
    ----------
    weights : Tensor, (K, q, p), float64
        W_k, centred by something robust.
    pairs : Tensor, (G, 2), int64
        Of which `Decomposition.sparse_blocks` speaks.
    lambda_low, lambda_sparse : float
        λ_L, λ_S > 0.
    tolerance, max_iterations
        As of `solve_pairs`.

    Returns
    -------
    Decomposition
        With `offsets`, C, (K, q, p).
    """
    count, p = weights.shape[0], weights.shape[2]
    require_memory(6 * weights.numel(), weights.device, f"the blocks of {count} clients")
    cut = lambda_low / math.sqrt(count)
    limit = lambda_sparse / count
    norms = weights.flatten(1).norm(dim=1)
    start = max(float(norms.median()), limit)
    # What is kept is W − C, since C, next to a client far off, has no digits left for it.
    rest = weights * (start / norms.clamp(min=start))[:, None, None]

    def cut_off(found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the threshold cuts off centre(W − C), the basis of the rest, and its singular values."""
        flat = _centred(found).view(-1, p)
        low, basis, values = _shrunk(flat, cut)
        return (flat - low).view_as(weights), basis, values

    previous, ahead, momentum = rest, rest, 1.0
    residual, iteration = math.inf, 0
    for iteration in range(1, max_iterations + 1):
        pull, _, _ = cut_off(ahead)
        left = ahead - pull
        moved = weights - left
        size = moved.flatten(1).norm(dim=1)
        # C is `moved`, shortened by the limit.
        rest = left + moved * (limit / size.clamp(min=limit))[:, None, None]
        if iteration % _EVERY == 0 or iteration == max_iterations:
            # Both parts are divided by K; the subgradients of the sparse part are λ_S/K long.
            change = pull - cut_off(rest)[0] + rest - ahead
            residual = float(change.norm()) / (limit * math.sqrt(count))
            if residual <= tolerance:
                break
        if float(((ahead - rest) * (rest - previous)).sum()) > 0:
            momentum = 1.0
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = rest + (momentum - 1) / following * (rest - previous)
        previous, momentum = rest, following
    pull, basis, values = cut_off(rest)
    offsets = weights - rest
    sizes = offsets.flatten(1).norm(dim=1)
    objective = 0.5 * count * float(pull.square().sum()) + lambda_low * math.sqrt(count) * float(values.sum())
    objective += lambda_sparse * float(sizes.sum())
    # Dual: max K⟨Y, W⟩ − K‖Y‖²/2 over centred Y with K‖Y_k‖ ≤ λ_S and √K‖Y‖_2 ≤ λ_L; `pull` fulfils the last one.
    longest = float(pull.flatten(1).norm(dim=1).max())
    scale = min(1.0, limit / longest) if longest > 0 else 1.0
    low = _centred(rest) - pull
    gap = 0.5 * count * (1 - scale) ** 2 * float(pull.square().sum())
    gap += lambda_low * math.sqrt(count) * float(values.sum()) - scale * count * float((pull * low).sum())
    gap += float((lambda_sparse * sizes - scale * count * (pull * offsets).sum((1, 2))).sum())
    certificate = Certificate(
        residual <= tolerance, iteration, residual, gap / objective if objective > 0 else 0.0, objective
    )
    return Decomposition(
        weights, pairs, basis, values * math.sqrt(count), certificate, weights.new_tensor([cut]), None, offsets
    )


def _centred(blocks: Tensor) -> Tensor:
    return blocks - blocks.mean(0)


def _shrunk(flat: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shorten singular values; return the matrix, its right singular vectors and values, the largest first."""
    eigenvalues, vectors = torch.linalg.eigh(flat.T @ flat)
    values = eigenvalues.clamp(min=0).sqrt().flip(0)
    rank = int((values > threshold).sum())
    values, basis = values[:rank], vectors.flip(1)[:, :rank]
    return (flat @ (basis * (1 - threshold / values))) @ basis.T, basis, values - threshold
