"""CLAIR: which clients are contaminated, which subspace the others share, and refined weights for each of those.

He, Chen, Feng, "CLAIR: collaborative low-rank alignment and identifiable recovery", arXiv 2605.21217. Benign clients
hold W_k = W_0 + B_k A with a common A (r × p) and W_0 unknown; the server sees Ŵ_k = W_k + noise. Differences of two
clients are low-rank with the row space of A, but for those with a contaminated client (`strategies.solvers.lowrank`):

    D_(j,k) = Ŵ_j − Ŵ_k;    min ½ Σ ω_g‖D_g − L_g − S_g‖_F² + λ_L‖L‖_* + λ_S Σ‖S_g‖_F

P̂ projects on the top-r right singular vectors of L. Client k is a member iff at least (K − 1)/2 of its pairs have
‖S_(j,k)(I − P̂)‖_F ≤ τ, and members' weights become W_k P̂ + W̄ (I − P̂) with W̄ their mean. With s the standard deviation
of an entry's noise (derived by us; the paper's constants are not public):

    λ_L = s √K (√(Kq) + √p),   λ_S = s √2 (√(qp) + √(2 log G)),   τ = ½ s √(q(p − r)).

`refit=True`, ours and no part of the paper: a soft threshold lets λ_S of every block of a contaminated client leak into
L. So the subspace is fitted anew to the members, by the singular vectors of their centred weights, and the vote is
taken again with what is outside it, unshrunk: j and k agree iff

    ‖(W_j − W_k)(I − P̂)‖_F ≤ √2 s (√(q(p − r)) + √(2 log G)).

After LoRA what clients do not share is of low rank, too, and no noise. With a given rank, where the median singular
value says that there is no noise, s is that of what is left beyond r singular values, and j and k agree up to 1.5 times
the median distance between members. Subspace and vote are repeated until nobody changes sides. They begin with the
pairs that agree whatever the subspace is, because no more than r singular values of their difference are larger than
noise, and with the half of the clients that is in most of them. At the end a member that is far outside of what the
others share without it, having turned the subspace to itself, is barred, and those that are left vote once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..options import is_count, is_integer, is_real, require, require_choice
from ..shares import limited
from .lowrank import Certificate, Decomposition, chunks, require_memory, solve_clients, solve_pairs
from .noise import noise_of_pairs, noise_of_stack, noise_of_tails, of_usual_size

FORMS = ("pairs", "clients")

# Pairs whose singular values are computed: all, or a random regular graph of about so many numbers.
_PAIR_NUMBERS = 2**23
# Rows or columns of a matrix from which its singular values are computed through a Gram matrix.
_SMALL = 64
_ROUNDS = 20
# Where clients differ in parts of low rank, whose lengths vary, those up to this many times as far as is usual agree.
_USUAL = 1.5
# A member this many times as far (squared) outside of what the others share as they are in the middle is alone with it;
# of fewer clients than these nobody can say; so many are looked at.
_LONE, _FEWEST, _SUSPECTS = 2.25, 5, 64
# How much larger than at first sight the noise of the members may be found to be.
_NOISE_SLACK = 1.2
# The noise is taken to be this share of a typical difference at least: below, λ would be too small to be solved for.
_QUIET = 1e-4
# λ of a program without noise.
_LEAST = 1e-150
# What cannot be squared any more.
_LARGEST = 1e150


@dataclass(frozen=True)
class ClairSolution:
    """What CLAIR finds in one matrix of each client.

    Attributes
    ----------
    refined : Tensor, (K, q, p), float64
        W_k P̂ + W̄ (I − P̂) for members; the others' weights as they came.
    members : Tensor, (K,), bool
        The set found; with several matrices, by all of them together.
    basis : Tensor, (p, r), float64
        Orthonormal; P̂ = basis · basisᵀ.
    rank : int
        r.
    mean : Tensor, (q, p), float64
        W̄ of the members (of all, without members).
    gain, cost : float
        What collaboration takes off a member's squared error, (1 − 1/|C|) q (p − r) s², and what it adds: the error
        of the subspace, r (p − r) s²/|C| by first-order perturbation and what P̂ differs from the refitted one, and what
        members have outside of it, ‖(W_k − W̄)(I − P̂)‖_F² beyond noise. Estimates; where s is estimated too, what looks
        like noise counts as noise, after LoRA all that is outside.
    warning : str or None
        One sentence where no majority agrees, the cost exceeds the gain, or the program is not solved as asked.
    votes, comparisons : Tensor, (K,), int64
        In how many of how many comparisons a client agrees; with several matrices, in all of them.
    noise : float
        s.
    lambda_low, lambda_sparse, threshold : float
        λ_L, λ_S, τ.
    pairs : Tensor, (G, 2), int64
        The pairs (j, k) compared.
    certificate : Certificate
        Of the program.
    """

    refined: Tensor
    members: Tensor
    basis: Tensor
    rank: int
    mean: Tensor
    gain: float
    cost: float
    warning: str | None
    votes: Tensor
    comparisons: Tensor
    noise: float
    lambda_low: float
    lambda_sparse: float
    threshold: float
    pairs: Tensor
    certificate: Certificate
    _decomposition: Decomposition = field(repr=False)
    _rotation: Tensor | None = field(repr=False)
    _final: Tensor | None = field(repr=False)

    @cached_property
    def projector(self) -> Tensor:
        """P̂, (p, p), float64."""
        return self.basis @ self.basis.T

    @cached_property
    def low_rank(self) -> Tensor:
        """L, (G, q, p), float64; with form="clients" M, (K, q, p)."""
        return self._original(self._decomposition.low_rank)

    @cached_property
    def sparse(self) -> Tensor:
        """S, (G, q, p), float64; with form="clients" C, (K, q, p)."""
        return self._original(self._decomposition.sparse)

    @cached_property
    def distances(self) -> Tensor:
        """‖S_(j,k)(I − P̂)‖_F of each pair, (G,), float64, with the final P̂: what the paper's vote looks at."""
        assert self._final is not None
        return _outside_sparse(self._decomposition, self._final)

    @property
    def margins(self) -> Tensor:
        """How far each client is from being voted out, (K,), float64: votes/comparisons − ½, in [−½, ½]."""
        return self.votes / self.comparisons.clamp(min=1) - 0.5

    @property
    def converged(self) -> bool:
        """Whether the program was solved to its tolerance."""
        return self.certificate.converged

    @property
    def iterations(self) -> int:
        """Iterations of the program."""
        return self.certificate.iterations

    def _original(self, blocks: Tensor) -> Tensor:
        return blocks if self._rotation is None else blocks @ self._rotation.T


def solve(
    weights: Tensor,
    *,
    rank: int | None = None,
    noise: float | None = None,
    pairs: Tensor | Sequence[tuple[int, int]] | None = None,
    pair_weights: Tensor | None = None,
    refit: bool = False,
    form: str = "pairs",
    client_weights: Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 300,
) -> ClairSolution:
    """Find members, subspace and refined weights of one matrix.

    Parameters
    ----------
    weights : Tensor, (K, q, p), any real floating dtype
        Ŵ_k. Anything common to all may have been added; computed in float64 on the tensor's device.
    rank : int, optional
        r, 0 ≤ r ≤ min(q, p). None: the largest relative gap in the singular values of the members' centred weights
        above those of noise.
    noise : float, optional
        s > 0, the standard deviation of an entry's noise, σ/√n for least squares. None: see `strategies.solvers.noise`.
    pairs : (G, 2) integers, optional
        Which clients are compared; each at least once. None: all. See `random_pairs`.
    pair_weights : Tensor, (G,), optional
        ω_g > 0; 1 by default.
    refit : bool
        See above.
    form : {"pairs", "clients"}
        The paper's program, or the smaller one with a block for each client, which is another estimator.
    client_weights : Tensor, (K,), optional
        ≥ 0, for the mean W̄; equal by default.
    tolerance, max_iterations : float, int
        Of the program, see `strategies.solvers.lowrank`.

    Returns
    -------
    ClairSolution

    Raises
    ------
    ValueError
        On wrong shapes or dtypes, values that are not finite, or an option out of range; one sentence.
    TooLargeError
        If the program does not fit into memory; a `MemoryError` that says what to do.
    """
    return solve_jointly(
        [weights],
        rank=rank,
        noise=noise,
        pairs=pairs,
        pair_weights=pair_weights,
        refit=refit,
        form=form,
        client_weights=client_weights,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )[0]


def solve_jointly(
    matrices: Sequence[Tensor],
    *,
    rank: int | None = None,
    noise: float | None = None,
    pairs: Tensor | Sequence[tuple[int, int]] | None = None,
    pair_weights: Tensor | None = None,
    refit: bool = False,
    form: str = "pairs",
    client_weights: Tensor | None = None,
    max_weight_share: float | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 300,
) -> list[ClairSolution]:
    """Find members by several matrices of the same K clients, whose votes are added up; see `solve`.

    Parameters
    ----------
    matrices : sequence of Tensor, each (K, q_i, p_i)
        At least one. `rank` and `noise` hold for each of them.
    max_weight_share : float, optional
        In (0, 1]: no member counts more than this share of W̄, see `strategies.shares.capped_shares`.

    Returns
    -------
    list of ClairSolution
        One a matrix, all with the same members, votes and comparisons.
    """
    _check_options(rank, noise, form, tolerance, max_iterations)
    if not matrices:
        raise ValueError("CLAIR needs at least one matrix of each client.")
    blocks = [_checked(w) for w in matrices]
    count, device = len(blocks[0]), blocks[0].device
    if any(len(w) != count for w in blocks):
        raise ValueError(f"all matrices must be of the same clients, not of {sorted({len(w) for w in blocks})}.")
    graph = _checked_pairs(pairs, count, device)
    omega = _checked_weights("pair_weights", pair_weights, len(graph), device, positive=True)
    shares = _checked_weights("client_weights", client_weights, count, device, positive=False)
    parts = [_Matrix(w, graph, omega, form, rank, noise, tolerance, max_iterations) for w in blocks]
    if rank is None:
        _settle(parts, _agreeing(parts))
    for part in parts:
        part.decompose()
    votes, comparisons = _tally(parts, [part.sparse_votes() for part in parts], graph)
    members = 2 * votes >= comparisons
    if refit:
        starts = [_agreeing(parts), members]
        if not any(min(part.q, part.p) > 2 * part.rank for part in parts):
            starts.reverse()  # pairs of so few rows or columns agree whatever they are
        for start in starts:
            found = _settle(parts, start)
            if found is not None:
                members, votes, comparisons = _without_loners(parts, found)
                break
    among = members if bool(members.any()) else torch.ones_like(members)
    shares = torch.where(among, shares, 0.0)
    shares = shares if bool(shares.sum() > 0) else among.to(shares.dtype)
    shares = limited(shares / shares.sum(), max_weight_share, among)
    return [part.solution(members, votes, comparisons, shares, refit=refit) for part in parts]


def random_pairs(count: int, degree: int, seed: int = 0) -> Tensor:
    """Draw a random regular graph of pairs, for more clients than all pairs are affordable for.

    Parameters
    ----------
    count : int
        K.
    degree : int
        Pairs that each client is part of, 2 ≤ degree < K; an odd one needs an even K.
    seed : int

    Returns
    -------
    Tensor, (K · degree / 2, 2), int64
        Connected: a cycle through all clients in random order, and chords of random lengths along it.
    """
    require("count", count, "an integer of at least 3", is_count(count) and count >= 3)
    fits = is_count(degree) and 2 <= degree < count and (degree % 2 == 0 or count % 2 == 0)
    require("degree", degree, f"from 2 to {count - 1}, and even unless the number of clients is", fits)
    require("seed", seed, "an integer from 0 to 2^63 - 1", is_integer(seed) and 0 <= seed < 2**63)
    generator = torch.Generator().manual_seed(int(seed))
    order = torch.randperm(count, generator=generator)
    others = 2 + torch.randperm(max((count - 1) // 2 - 1, 0), generator=generator)
    offsets = [1, *others[: degree // 2 - 1].tolist()]
    position = torch.arange(count)
    edges = [torch.stack([order, order[(position + offset) % count]], dim=1) for offset in offsets]
    if degree % 2:
        half = position[: count // 2]
        edges.append(torch.stack([order[half], order[half + count // 2]], dim=1))
    found = torch.cat(edges).sort(dim=1).values
    return found[(found[:, 0] * count + found[:, 1]).argsort()]


class _Matrix:
    """One matrix of each client: its program, its subspace, and which pairs of clients agree."""

    def __init__(
        self,
        weights: Tensor,
        pairs: Tensor,
        omega: Tensor,
        form: str,
        rank: int | None,
        noise: float | None,
        tolerance: float,
        max_iterations: int,
    ) -> None:
        self.count, self.q, self.p = weights.shape
        self.original, self.pairs, self.omega, self.form = weights, pairs, omega, form
        self.tolerance, self.max_iterations = tolerance, max_iterations
        # An entry that some client has is subtracted, so that what is common to all leaves no rounding behind, and no
        # client, however far off, puts any into the others.
        self.center = weights.median(dim=0).values
        self.blocks = (weights - self.center).contiguous()
        self.rotation: Tensor | None = None
        if self.p > self.count * self.q:  # the rows span less: both norms are the same in coordinates of their span
            self.rotation = torch.linalg.qr(self.blocks.reshape(-1, self.p).T).Q
            self.blocks = (self.blocks @ self.rotation).contiguous()
        self.given_rank, self.given_noise = rank, noise
        self.irregular = False  # whether what is not shared is of low rank itself, and no noise
        limit = min(self.q, self.p)
        if rank is not None:
            require("rank", rank, f"an integer from 0 to {limit}, for matrices of {self.q} x {self.p}", rank <= limit)
        self.sampled = self._sample()
        self.values = self._pair_values()
        self.rank = self._pilot_rank() if rank is None else int(rank)
        self.noise = self._noise()
        self.basis: Tensor | None = None
        self.decomposition: Decomposition | None = None

    # ---- noise and rank ------------------------------------------------------------------------------------------

    def _sample(self) -> Tensor:
        """Pairs whose singular values are affordable: all compared, or a random regular graph."""
        most = max(_PAIR_NUMBERS // (self.q * self.blocks.shape[2]), 4 * self.count)
        if len(self.pairs) <= most:
            return self.pairs
        degree = min(2 * (most // self.count), self.count - 1)
        return random_pairs(self.count, degree - degree % 2).to(self.pairs.device)

    def _pair_values(self) -> Tensor:
        found = []
        for rows in chunks(len(self.sampled), self.q * self.blocks.shape[2]):
            j, k = self.sampled[rows].T
            found.append(_singular_values(self.blocks[j] - self.blocks[k]))
        return torch.cat(found) if found else self.blocks.new_zeros(0, min(self.q, self.p))

    def _pilot_rank(self) -> int:
        """How many singular values of a pair's difference are larger than noise, the lower quartile over pairs."""
        noise = self._noise_for(0)
        if not len(self.values) or noise == 0:
            return 0
        edge = math.sqrt(2) * noise * (math.sqrt(self.q) + math.sqrt(self.p))
        found = int((self.values > edge).sum(1).to(torch.float64).quantile(0.25))
        return min(found, self._most_rank)

    @property
    def _most_rank(self) -> int:
        """Leaves a row and a column of noise, where there are any to leave."""
        return max(min(self.q, self.p) - 1, 1)

    def _noise(self) -> float:
        return self._noise_for(self.rank) if self.given_noise is None else float(self.given_noise)

    def _noise_for(self, rank: int) -> float:
        if self.given_noise is not None:
            return float(self.given_noise)
        if self.count < 2:
            return 0.0
        smaller = min(self.q, self.p)
        found = noise_of_pairs(self.values, self.q, self.p, rank) if rank < smaller else math.inf
        if smaller <= max(2 * rank, 4) and self.count > 2:
            found = min(found, noise_of_stack(self.blocks - self.blocks.mean(0), self.p))
        if self.given_rank is not None and rank < smaller:
            tail = noise_of_tails(self.values, self.q, self.p, rank)
            self.irregular = found < tail / 2
            found = tail if self.irregular else found
        typical = self._typical()
        found = typical if found == math.inf else found
        return max(found, _QUIET * typical, self._rounding())

    def _typical(self) -> float:
        """What an entry's standard deviation would be if all differences were noise."""
        if not len(self.values):
            return 0.0
        return float(self.values.norm(dim=1).quantile(0.25)) / math.sqrt(2 * self.q * self.p)

    def _rounding(self) -> float:
        """What rounding puts into an entry; for identical clients there is no other noise."""
        largest = float(self.original.abs().flatten(1).amax(dim=1).median())
        return largest * torch.finfo(torch.float64).eps

    def rerank(self, members: Tensor) -> None:
        """Find the rank anew: the largest relative gap in the singular values of the members' centred weights."""
        if self.given_rank is not None:
            return
        flat = self._centred(members)
        values = torch.linalg.eigvalsh(flat.T @ flat).clamp(min=0).sqrt().flip(0)
        freedom = (int(members.sum()) - 1) * self.q
        edge = 1.02 * self._noise_for(self.rank) * (math.sqrt(freedom) + math.sqrt(self.p))
        values = values[values > edge][: self._most_rank]
        if len(values):
            following = torch.cat([values[1:], values.new_tensor([edge])])
            self.rank = int((values / following).argmax()) + 1
        else:
            self.rank = 0
        self.noise = self._noise()

    # ---- the program -----------------------------------------------------------------------------------------------

    @property
    def lambda_low(self) -> float:
        """λ_L for the pairs there are: √K is the largest singular value of ΩΔ where all pairs are, with weights 1."""
        largest = 1.0
        if self.form == "clients" or not len(self.pairs):
            largest = float(self.count)
        elif len(self.pairs) == self.count * (self.count - 1) // 2 and bool((self.omega == self.omega[0]).all()):
            largest = self.count * float(self.omega[0]) ** 2
        else:
            laplacian = self.blocks.new_zeros(self.count, self.count)
            j, k = self.pairs.T
            squares = self.omega.square()
            laplacian.index_put_((j, k), -squares, accumulate=True)
            laplacian = laplacian + laplacian.T
            largest = float(torch.linalg.eigvalsh(laplacian - torch.diag(laplacian.sum(1)))[-1])
        return self.noise * math.sqrt(largest) * (math.sqrt(self.count * self.q) + math.sqrt(self.p))

    @property
    def lambda_sparse(self) -> float:
        """λ_S: what the noise of a block does not exceed."""
        size = math.sqrt(self.q * self.p)
        if self.form == "clients":
            return self.noise * self.count * (size + math.sqrt(2 * math.log(max(self.count, 1))))
        heaviest = float(self.omega.max()) if len(self.omega) else 1.0
        return heaviest * self.noise * math.sqrt(2) * (size + self._spread)

    @property
    def _spread(self) -> float:
        return math.sqrt(2 * math.log(max(len(self.pairs), 1)))

    @property
    def threshold(self) -> float:
        """τ."""
        return 0.5 * self.noise * math.sqrt(self.q * (self.p - self.rank))

    def decompose(self) -> None:
        """Solve the program; P̂ is then that of L."""
        # Without noise and without differences there is nothing to solve, and any λ gives that.
        low, sparse = (max(x, _LEAST) for x in (self.lambda_low, self.lambda_sparse))
        options: dict[str, Any] = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        if self.form == "pairs":
            self.decomposition = solve_pairs(self.blocks, self.pairs, self.omega, low, sparse, **options)
        else:
            self.decomposition = solve_clients(self.blocks, self.pairs, low, sparse, **options)
        self.basis = self.decomposition.basis[:, : self.rank]

    def sparse_votes(self) -> Tensor:
        """Which pairs agree by the paper's test, (G,) bool."""
        assert self.decomposition is not None
        return _outside_sparse(self.decomposition, self.basis) <= self.threshold

    # ---- the refit -------------------------------------------------------------------------------------------------

    def _centred(self, members: Tensor) -> Tensor:
        kept = self.blocks[members]
        return (kept - kept.mean(0)).reshape(-1, self.blocks.shape[2])

    def fit(self, members: Tensor) -> None:
        """P̂ from the members alone."""
        flat = self._centred(members)
        vectors = torch.linalg.eigh(flat.T @ flat)[1]
        self.basis = vectors.flip(1)[:, : self.rank]

    def pair_votes(self) -> Tensor:
        """Which of the sampled pairs differ by a matrix of the rank and noise, whatever the row space."""
        rest: Tensor = self.values[:, self.rank :].norm(dim=1)
        freedom = max((self.q - self.rank) * (self.p - self.rank), 0)
        limit = math.sqrt(2) * self.noise * (math.sqrt(freedom) + self._spread)
        if self.irregular:
            limit = _USUAL * float(rest.quantile(0.25))
        return (rest <= limit) & of_usual_size(self.values)

    def outside_votes(self, members: Tensor) -> Tensor:
        """Which pairs differ by no more than noise outside of the subspace fitted to the members, (G,) bool."""
        assert self.basis is not None
        flat = (self.blocks - (self.blocks @ self.basis) @ self.basis.T).flatten(1)
        distances = _distances(flat, self.pairs)
        if self.irregular:
            j, k = self.pairs.T
            among = distances[members[j] & members[k]]
            return distances <= _USUAL * (among.median() if len(among) else 0.0)
        freedom = self.q * (self.p - self.rank)
        noise = self.noise
        if self.given_noise is None:  # the quartile over pairs is somewhat low; the members' own noise, within bounds
            noise = min(max(noise, self._outside(members)), _NOISE_SLACK * noise)
        return distances <= math.sqrt(2) * noise * (math.sqrt(freedom) + self._spread)

    @property
    def noise_outside(self) -> float:
        """What noise puts outside of the subspace between two clients, and no more; where there is noise."""
        if self.irregular:
            return 0.0
        return math.sqrt(2) * self.noise * (math.sqrt(self.q * (self.p - self.rank)) + self._spread)

    def outside_of_others(self, those: Tensor) -> Tensor:
        """Return ‖(W_k − W̄_others)(I − P̂_others)‖_F² of each of these clients, (n,): both made without client k."""
        blocks = self.blocks[those]
        number, total = len(those), blocks.sum(0)
        flat = blocks - total / number
        gram = torch.einsum("kqi,kqj->ij", flat, flat)
        found = blocks.new_zeros(number)
        # With very many clients none of ordinary length turns the subspace to itself; the longest are looked at.
        suspects = flat.flatten(1).norm(dim=1).argsort(descending=True)[:_SUSPECTS].tolist()
        for k in suspects:
            apart = blocks[k] - (total - blocks[k]) / (number - 1)
            # Gram matrix of the others about their own mean.
            others = gram - (number - 1) / number * apart.T @ apart
            basis = torch.linalg.eigh(others)[1].flip(1)[:, : self.rank]
            found[k] = (apart - (apart @ basis) @ basis.T).square().sum()
        if len(suspects) < number:
            found[found == 0] = found[suspects].median()
        return found

    def _outside(self, members: Tensor) -> float:
        """Noise level by what the members have outside of the subspace."""
        number = int(members.sum())
        freedom = (number - 1) * self.q * (self.p - self.rank) - self.rank * (self.p - self.rank)
        if freedom <= 0:
            return self.noise
        assert self.basis is not None
        flat = self._centred(members)
        return float((flat - (flat @ self.basis) @ self.basis.T).norm()) / math.sqrt(freedom)

    # ---- the result ------------------------------------------------------------------------------------------------

    def solution(
        self, members: Tensor, votes: Tensor, comparisons: Tensor, shares: Tensor, *, refit: bool
    ) -> ClairSolution:
        """Refine the members' weights."""
        assert self.decomposition is not None
        number = int(members.sum())
        refits = refit and 2 * number > self.count
        if refits:
            self.fit(members)
        else:
            self.basis = self.decomposition.basis[:, : self.rank]
        basis = self.basis
        assert basis is not None
        among = members if number else torch.ones_like(members)
        # Not a product with zero shares: what is infinitely far off would still be in it.
        mean = torch.tensordot(shares[among], self.blocks[among], dims=1)
        apart = self.blocks[members] - mean
        personal = (apart @ basis) @ basis.T
        noise = self._outside(members) if self.irregular and number > 1 else self.noise
        gain, cost = self._balance(apart, personal, noise, basis)
        if self.rotation is not None:
            mean, personal, basis = mean @ self.rotation.T, personal @ self.rotation.T, self.rotation @ basis
        refined = self.original.clone()
        refined[members] = self.center + (mean + personal)
        certificate = self.decomposition.certificate
        warning = None
        if 2 * number <= self.count and self.count > 1:
            warning = f"no majority of the clients agrees: {number} of {self.count} do"
            if self.given_rank is None and self.noise <= _QUIET * self._typical():
                warning += "; what they differ in is of low rank and holds no noise, as after LoRA: give rank="
        elif cost > gain:
            warning = f"collaboration does not pay: it takes {gain:.3g} off a client's error and adds {cost:.3g}"
        elif not certificate.converged:
            warning = (
                f"the program was solved to a residual of {certificate.residual:.2g} in {certificate.iterations} "
                f"iterations only, not {self.tolerance:g}; raise max_iterations, or check the noise"
            )
        return ClairSolution(
            refined=refined,
            members=members,
            basis=basis,
            rank=basis.shape[1],
            mean=self.center + mean,
            gain=gain,
            cost=cost,
            warning=warning,
            votes=votes,
            comparisons=comparisons,
            noise=self.noise,
            lambda_low=self.lambda_low,
            lambda_sparse=self.lambda_sparse,
            threshold=self.threshold,
            pairs=self.pairs,
            certificate=certificate,
            _decomposition=self.decomposition,
            _rotation=self.rotation,
            _final=self.basis,
        )

    def _balance(self, apart: Tensor, personal: Tensor, noise: float, basis: Tensor) -> tuple[float, float]:
        number = len(apart)
        if number < 2:
            return 0.0, 0.0
        variance, rank = noise**2, basis.shape[1]
        gain = (1 - 1 / number) * self.q * (self.p - rank) * variance
        outside = float((apart - personal).square().sum()) / number
        flat = apart.reshape(-1, apart.shape[2])
        best = torch.linalg.eigh(flat.T @ flat)[1].flip(1)[:, :rank]
        moved = float(((apart @ best) @ best.T - personal).square().sum()) / number
        subspace = rank * (self.p - rank) * variance / number + moved
        # What the subspace missed of what it should hold is outside, too; it is not counted twice.
        return gain, subspace + max(0.0, outside - moved - gain)


def _singular_values(blocks: Tensor) -> Tensor:
    """Singular values of each block, the largest first; of large ones through a Gram matrix, to √eps of the largest."""
    if min(blocks.shape[1:]) <= _SMALL:
        values: Tensor = torch.linalg.svdvals(blocks)
        return values
    flat = blocks if blocks.shape[1] <= blocks.shape[2] else blocks.mT
    found: Tensor = torch.linalg.eigvalsh(flat @ flat.mT).clamp(min=0).sqrt().flip(1)
    return found


def _distances(flat: Tensor, pairs: Tensor) -> Tensor:
    """‖x_j − x_k‖ of rows of (K, d), (G,): through inner products, never a row for each pair."""
    gram = flat @ flat.T
    squares = gram.diagonal()
    j, k = pairs.T
    return (squares[j] + squares[k] - 2 * gram[j, k]).clamp(min=0).sqrt()


def _outside_sparse(decomposition: Decomposition, basis: Tensor | None) -> Tensor:
    """‖S_g (I − P̂)‖_F of each pair, (G,)."""
    assert basis is not None
    if (offsets := decomposition.offsets) is not None:
        return _distances((offsets - (offsets @ basis) @ basis.T).flatten(1), decomposition.pairs)
    found = decomposition.weights.new_zeros(len(decomposition.pairs))
    for rows, block in decomposition.sparse_blocks():
        rest = block - (block @ basis) @ basis.T
        found[rows] = rest.flatten(1).norm(dim=1)
    return found


def _tally(parts: Sequence[_Matrix], agree: Sequence[Tensor], pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Add the pairs' votes up: in how many of how many comparisons each client agrees."""
    count, device = parts[0].count, pairs.device
    votes = torch.zeros(count, dtype=torch.int64, device=device)
    comparisons = torch.zeros_like(votes)
    for each in agree:
        for side in pairs.T:
            votes.index_add_(0, side, each.to(torch.int64))
            comparisons.index_add_(0, side, torch.ones_like(side))
    return votes, comparisons


def _agreeing(parts: Sequence[_Matrix]) -> Tensor:
    """Members by the pairs alone, whatever the subspace, by matrices that can tell: the bare majority that agrees most.

    A contaminated client that agrees with a majority by chance would be in the subspace fitted to them, and stay.
    """
    telling = [part for part in parts if min(part.q, part.p) > part.rank] or list(parts)
    found = [_tally([part], [part.pair_votes()], part.sampled) for part in telling]
    votes, comparisons = (torch.stack(column).sum(0) for column in zip(*found, strict=True))
    share = votes / comparisons.clamp(min=1)
    most = share.sort(descending=True).values[len(share) // 2]
    agreeing: Tensor = (2 * votes >= comparisons) & (share >= most)
    return agreeing


def _settle(
    parts: Sequence[_Matrix], members: Tensor, barred: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Fit subspaces to the members and vote anew until nobody changes sides; None where no majority is left.

    Those that are barred agree with nobody.
    """
    count = len(members)
    seen: list[Tensor] = []
    votes = comparisons = torch.zeros(count, dtype=torch.int64, device=members.device)
    for _ in range(_ROUNDS):
        if 2 * int(members.sum()) <= count:
            return None
        for part in parts:
            part.rerank(members)
            part.fit(members)
        votes, comparisons = _tally(parts, [part.outside_votes(members) for part in parts], parts[0].pairs)
        if barred is not None:
            votes = torch.where(barred, 0, votes)
        found = 2 * votes >= comparisons
        if bool((found == members).all()) or any(bool((found == old).all()) for old in seen):
            members = found
            break
        seen.append(members)
        members = found
    return (members, votes, comparisons) if 2 * int(members.sum()) > count else None


def _without_loners(parts: Sequence[_Matrix], found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Bar members that hold up a part of the subspace alone, one after the other, while a majority remains.

    A client whose update is much larger than the others' turns a fitted subspace to itself, and is then well inside.
    """
    barred = torch.zeros_like(found[0])
    while (loner := _loner(parts, found[0])) is not None:
        barred[loner] = True
        again = _settle(parts, found[0] & ~barred, barred)
        if again is None:
            break
        found = again
    # The subspaces are those of the members found.
    for part in parts:
        part.rerank(found[0])
        part.fit(found[0])
    return found


def _loner(parts: Sequence[_Matrix], members: Tensor) -> int | None:
    """Return the member furthest outside of what the others share, if it is much further than is usual.

    Of several matrices the median counts: in a few of many a member may be alone.
    """
    those = members.nonzero()[:, 0]
    if len(those) < _FEWEST:
        return None
    found = []
    for part in parts:
        outside = part.outside_of_others(those)
        middle = outside.median()
        ratio = torch.where(middle > 0, outside / middle.clamp(min=_LEAST), 1.0)
        found.append(torch.where(outside > part.noise_outside**2, ratio, 1.0))
    ratios = torch.stack(found).quantile(0.5, dim=0)
    worst = int(ratios.argmax())
    return int(those[worst]) if float(ratios[worst]) > _LONE else None


def _check_options(rank: Any, noise: Any, form: Any, tolerance: Any, max_iterations: Any) -> None:
    fine = rank is None or (is_integer(rank) and rank >= 0)
    require("rank", rank, "an integer of at least 0, or None to find it", fine)
    fine = noise is None or (is_real(noise) and 0 < noise < _LARGEST)
    require("noise", noise, f"a number above 0 and below {_LARGEST:g}, or None to estimate it", fine)
    require_choice("form", form, FORMS)
    require("tolerance", tolerance, "a number above 0", is_real(tolerance) and tolerance > 0)
    require("max_iterations", max_iterations, "an integer of at least 1", is_count(max_iterations))


def _checked(weights: Any) -> Tensor:
    weights = torch.as_tensor(weights)
    if weights.ndim != 3 or 0 in weights.shape or not weights.is_floating_point():
        raise ValueError(
            "weights must be floating-point matrices of the clients, of shape (K, q, p) without a 0, not "
            f"{weights.dtype} of shape {tuple(weights.shape)}."
        )
    bad = ~torch.isfinite(weights).flatten(1).all(dim=1)
    if bool(bad.any()):
        raise ValueError(f"the weights of client {int(bad.nonzero()[0])} hold NaN or Inf; leave that client out.")
    wide: Tensor = weights.detach().to(torch.float64)
    if not float(wide.abs().max()) < _LARGEST:
        raise ValueError(f"the weights hold numbers beyond {_LARGEST:g}, which cannot be squared; scale them down.")
    return wide


def _checked_pairs(pairs: Any, count: int, device: torch.device) -> Tensor:
    if pairs is None:
        require_memory(2 * count * (count - 1) / 2, device, f"the list of all pairs of {count} clients")
        return torch.triu_indices(count, count, 1, device=device).T.contiguous()
    found = torch.as_tensor(pairs)
    if found.ndim != 2 or found.shape[1] != 2 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"pairs must be integers of shape (G, 2), not {found.dtype} of shape {tuple(found.shape)}.")
    found = found.to(device, torch.int64)
    if len(found) == 0 or int(found.min()) < 0 or int(found.max()) >= count or bool((found[:, 0] == found[:, 1]).any()):
        raise ValueError(f"each pair must be two different clients from 0 to {count - 1}, and there must be some.")
    ordered = found.sort(dim=1).values
    if len(torch.unique(ordered, dim=0)) < len(ordered):
        raise ValueError("each pair must occur once; some occur more often.")
    if len(torch.unique(found)) < count:
        raise ValueError("each client must be in a pair, or nothing can be said about it; see random_pairs.")
    return found


def _checked_weights(name: str, given: Any, count: int, device: torch.device, *, positive: bool) -> Tensor:
    if given is None:
        return torch.ones(count, dtype=torch.float64, device=device)
    found = torch.as_tensor(given).to(device, torch.float64)
    if found.shape != (count,):
        raise ValueError(f"{name} must have {count} entries, not the shape {tuple(found.shape)}.")
    fine = (found.abs() < 1e100).all() & ((found > 0).all() if positive else (found >= 0).all() & (found.sum() > 0))
    if not bool(fine):
        raise ValueError(f"{name} must be finite and {'above 0' if positive else 'at least 0, and not all 0'}.")
    return found
