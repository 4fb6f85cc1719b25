"""CLAIR: clients that differ in a common subspace get refined weights of their own; the others are found and left out.

He, Chen, Feng, "CLAIR: collaborative low-rank alignment and identifiable recovery", arXiv 2605.21217; the mathematics
is in `strategies.solvers.clair`. The server needs neither the weights that clients began with nor their adapters: it
looks at the matrices they send, and at differences of those only.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from flwr.common import FitIns, Parameters, Scalar, ndarray_to_bytes
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from torch import Tensor

from .base import UpdateStrategy
from .layers import Layer, LayerMap
from .model import GlobalModel
from .options import is_count, is_integer, is_real, require, require_choice
from .solvers import clair
from .solvers.clair import ClairSolution
from .solvers.lowrank import TooLargeError
from .updates import ClientUpdates, LayerDirection

logger = logging.getLogger(__name__)

CONTAMINATED = ("keep", "leave_out")

# Numbers of a matrix up to which it is among those chosen by default.
_DEFAULT_SIZE = 2**22
# No client's own part is larger: updates beyond cannot be squared.
_LARGEST = 1e150
# Clients up to which a round's metrics hold a table of all pairs.
_PAIRS_REPORTED = 50
_BASIS, _PERSONAL = "basis", "personal"


class CLAIR(UpdateStrategy):
    """Votes clients in or out by the row space of their matrices, and refines the members' weights.

    Members' matrices become W_k P̂ + W̄ (I − P̂): the part in the subspace that they share stays the client's own, the
    rest, mostly noise, is averaged. The global model is the mean of the members' models, weighted by their numbers of
    examples, in all its tensors; a member receives it with its own matrices in the next `configure_fit` and
    `configure_evaluate`. A client that was voted out, or has never been voted on, receives the global model. One that
    is absent keeps its last vote, and its own part, which is projected on each new subspace.

    With fewer than three clients, or where no majority agrees, a round is FedAvg's and says so (`clair_warning`); votes
    and the members' own parts stay as they were.

    The round's metrics: `contaminated_clients` (JSON: each one's id, identity (its partition where known), votes,
    comparisons, and margin: votes/comparisons − ½), `clients_contaminated`, `clients_left_out`, `vote_margins` (JSON,
    by identity), `gain` and `cost` of collaboration (sums over matrices, see `ClairSolution`), `subspace_rank` (the
    largest), `noise_level`, `program_residual` and `program_gap` (the largest), and up to 50 clients `pair_distances`
    (JSON, a row a client: ‖S_(j,k)(I − P̂)‖_F/τ, root mean square over matrices; above 1 two clients disagree).

    Parameters
    ----------
    matrices : str, int or sequence of them, optional
        Names of tensors (or shell patterns: "*.attn.*"), or positions in the model. None: all 2-D trainable tensors
        with two rows and columns or more, of at most 4 million numbers.
    rank : int, optional
        Of the shared subspace, e.g. LoRA's; no matrix has more rows or columns used. None: found in each matrix.
    noise : float, optional
        Standard deviation of an entry's noise. None: estimated.
    refit : bool
        Ours: fit the subspace anew to the members and vote again, see `strategies.solvers.clair`.
    form : {"pairs", "clients"}
        The paper's program over all pairs of clients, or the smaller one with a block for each client.
    pair_degree : int, optional
        With form="pairs": compare each client with so many others only, at random (an even number).
    personalise : bool
        False: everybody receives the global model.
    contaminated : {"keep", "leave_out"}
        Whether a client that was voted out is sampled for training again. One that is left out gets no further vote.
    tolerance, max_iterations : float, int
        Of the program.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range, or `matrices` names no matrix of the model.
    """

    remembers_rows = (_BASIS, _PERSONAL)

    def __init__(
        self,
        *,
        matrices: str | int | Sequence[str | int] | None = None,
        rank: int | None = None,
        noise: float | None = None,
        refit: bool = True,
        form: Literal["pairs", "clients"] = "pairs",
        pair_degree: int | None = None,
        personalise: bool = True,
        contaminated: Literal["keep", "leave_out"] = "keep",
        tolerance: float = 1e-6,
        max_iterations: int = 300,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.matrices = _asked(matrices)
        require("rank", rank, "an integer of at least 0, or None", rank is None or (is_integer(rank) and rank >= 0))
        fine = noise is None or (is_real(noise) and 0 < noise < 1e150)
        require("noise", noise, "a number above 0 and below 1e150, or None", fine)
        require("refit", refit, "true or false", isinstance(refit, bool))
        require_choice("form", form, clair.FORMS)
        fine = pair_degree is None or (is_count(pair_degree) and pair_degree % 2 == 0)
        require("pair_degree", pair_degree, "an even number of at least 2, or None", fine)
        require("personalise", personalise, "true or false", isinstance(personalise, bool))
        require_choice("contaminated", contaminated, CONTAMINATED)
        require("tolerance", tolerance, "a number above 0", is_real(tolerance) and tolerance > 0)
        require("max_iterations", max_iterations, "an integer of at least 1", is_count(max_iterations))
        self.rank = rank
        self.noise = noise
        self.refit = refit
        self.form = form
        self.pair_degree = pair_degree
        self.personalise = personalise
        self.contaminated = contaminated
        self.tolerance = float(tolerance)
        self.max_iterations = int(max_iterations)
        self.records.update(margins={}, personal=[])
        self._shares: Tensor | None = None  # of the members, in the round that is being aggregated
        self._found: dict[int, ClairSolution] = {}  # by tensor
        self._report: dict[str, Scalar] = {}
        self._left_out = 0

    # ---- which matrices ------------------------------------------------------------------------------------------

    def chosen(self, layers: LayerMap) -> dict[int, str]:
        """Return the positions and names of the matrices that are looked at.

        Raises
        ------
        ValueError
            If one asked for is not there, or no matrix.
        """
        possible = {
            t: name
            for t, (name, shape, kind) in enumerate(zip(layers.names, layers.shapes, layers.kinds, strict=True))
            if kind == "trainable" and len(shape) == 2 and 0 not in shape
        }
        if self.matrices is None:
            shapes = layers.shapes
            return {t: n for t, n in possible.items() if min(shapes[t]) > 1 and math.prod(shapes[t]) <= _DEFAULT_SIZE}
        found: dict[int, str] = {}
        for asked in self.matrices:
            those = [t for t, name in possible.items() if _matches(asked, t, name)]
            if not those:
                raise ValueError(
                    f"matrices={asked!r} is no trainable 2-D tensor of the model; those are "
                    f"{', '.join(f'{n} ({t})' for t, n in possible.items()) or 'none'}."
                )
            found.update({t: possible[t] for t in those})
        return dict(sorted(found.items()))

    # ---- a round -------------------------------------------------------------------------------------------------

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Choose clients as ever; with contaminated="leave_out" without those that were voted out."""
        drawn = super().configure_fit(server_round, parameters, client_manager)
        if self.contaminated == "leave_out":
            kept = [(client, ins) for client, ins in drawn if self._margin(client.cid) >= 0]
            if not kept:
                logger.warning("round %d: all clients drawn were voted out before; they train anyway", self._round)
                kept = drawn
            self._left_out = len(drawn) - len(kept)
            self._sampled = len(kept)
            return kept
        return drawn

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Find the members, and yield the mean of their updates, layer by layer."""
        self._shares, self._found, self._report = updates.weights, {}, {}
        chosen = self.chosen(updates.layers)
        warnings = []
        if len(updates) < 3:
            warnings.append(f"{len(updates)} clients are too few to vote, three are needed: the round is FedAvg's")
        elif not chosen:
            warnings.append("the model has no matrix to look at: the round is FedAvg's")
        else:
            solutions = self._solutions(updates, list(chosen))
            members = solutions[0].members
            if 2 * int(members.sum()) > len(updates):
                self._found = dict(zip(chosen, solutions, strict=True))
                shares = torch.where(members, updates.weights, 0.0)
                self._shares = updates.limited(shares / shares.sum(), members)
            else:
                warnings.append("the round is FedAvg's")
            warnings += [
                f"{name}: {solution.warning}"
                for name, solution in zip(chosen.values(), solutions, strict=True)
                if solution.warning is not None
            ]
            self._report = self._describe(updates, solutions)
        self._report["clients_left_out"] = self._left_out
        if warnings:
            for warning in warnings:
                logger.warning("round %d: %s", self._round, warning)
            self._report["clair_warning"] = "; ".join(warnings[:5])
        for layer in updates.layers.layers:
            yield updates.combine(layer, self._shares)

    def _solutions(self, updates: ClientUpdates, chosen: Sequence[int]) -> list[ClairSolution]:
        m = len(updates)
        pairs = None
        if self.form == "pairs" and self.pair_degree is not None and self.pair_degree < m - 1:
            pairs = clair.random_pairs(m, self.pair_degree, seed=self._round)
        try:
            blocks = self._matrices(updates, chosen)
            return clair.solve_jointly(
                blocks,
                rank=None if self.rank is None else min(self.rank, *(min(b.shape[1:]) for b in blocks)),
                noise=self.noise,
                pairs=pairs,
                refit=self.refit,
                form=self.form,
                client_weights=updates.weights,
                max_weight_share=updates.max_weight_share,
                tolerance=self.tolerance,
                max_iterations=self.max_iterations,
            )
        except TooLargeError as error:
            raise ArithmeticError(str(error).rstrip(".")) from error

    def _matrices(self, updates: ClientUpdates, chosen: Sequence[int]) -> list[Tensor]:
        """Return the clients' matrices less those of the global model, (m, q, p) each, float64."""
        found = {}
        for layer in updates.layers.layers:
            if not set(layer.tensors) & set(chosen):
                continue
            rows = updates.layer(layer)
            for t, columns in _columns(updates.layers, layer):
                if t in chosen:
                    found[t] = rows[:, columns].reshape(len(updates), *updates.layers.shapes[t])
        return [found[t] for t in chosen]

    def _describe(self, updates: ClientUpdates, solutions: Sequence[ClairSolution]) -> dict[str, Scalar]:
        first = solutions[0]
        settled = bool(self._found)
        votes, comparisons = first.votes.tolist(), first.comparisons.tolist()
        margins = [round(v, 6) for v in first.margins.tolist()]
        out = [i for i, member in enumerate(first.members.tolist()) if not member] if settled else []
        clients, names = updates.clients, self.identities(updates)
        listed = [
            {"client": clients[i], "identity": names[i], "votes": votes[i], "comparisons": comparisons[i],
             "margin": margins[i]}
            for i in out
        ]  # fmt: skip
        for entry in listed:
            logger.info("round %d: client %s is voted out: %s", self._round, entry["client"], json.dumps(entry))
        report: dict[str, Scalar] = {
            "clients_contaminated": len(out),
            "contaminated_clients": json.dumps(listed),
            "vote_margins": json.dumps(dict(zip(names, margins, strict=True))),
            "gain": sum(s.gain for s in solutions),
            "cost": sum(s.cost for s in solutions),
            "subspace_rank": max(s.rank for s in solutions),
            "noise_level": max(s.noise for s in solutions),
            "program_residual": max(s.certificate.residual for s in solutions),
            "program_gap": max(s.certificate.gap for s in solutions),
        }
        if len(updates) <= _PAIRS_REPORTED:
            report["pair_distances"] = json.dumps(_table(solutions, len(updates)))
        return report

    def shares(self, updates: ClientUpdates) -> Tensor:
        """Return ρ over the members."""
        assert self._shares is not None
        return self._shares

    # ---- what is remembered: votes, subspaces, and the members' own parts ----------------------------------------

    def conclude(self, updates: ClientUpdates) -> None:
        """Keep the votes and the members' own parts, as coefficients in the subspace."""
        if not self._found:
            return
        solutions = list(self._found.values())
        names = self.identities(updates)
        members = solutions[0].members.tolist()
        self.records["margins"].update(zip(names, solutions[0].margins.tolist(), strict=True))
        if not self.personalise:
            return
        before = self.records["personal"]
        kept = [i for i, name in enumerate(before) if name not in set(names)]
        own = [i for i, member in enumerate(members) if member]
        tensors = self._require_model().layers.names
        for t, solution in self._found.items():
            basis, name = solution.basis.contiguous(), tensors[t]
            rows = (solution.refined[own] - solution.mean) @ basis
            past = self.memory.pop(f"{_PERSONAL}/{name}", None), self.memory.pop(f"{_BASIS}/{name}", None)
            if not solution.rank:  # nothing is anybody's own
                continue
            old = rows.new_zeros(len(kept), *rows.shape[1:])
            if past[0] is not None and past[1] is not None:
                old = past[0][kept].view(len(kept), len(solution.mean), past[1].shape[1]) @ (past[1].T @ basis)
            self.memory[f"{_BASIS}/{name}"] = basis
            self.memory[f"{_PERSONAL}/{name}"] = torch.cat([old, rows]).flatten(1)
        self.records["personal"] = [before[i] for i in kept] + [names[i] for i in own]
        self._found = {}

    def more_metrics(self) -> dict[str, Scalar]:
        """Return the report of this round's vote."""
        return self._report

    def sent_to(self, cid: str, parameters: Parameters) -> Parameters:
        """Return the global model with a member's own matrices."""
        name = self.sampler.identity(cid)
        personal: list[str] = self.records["personal"]
        if not self.personalise or name not in personal or self._margin(cid) < 0 or self._model is None:
            return parameters
        row, model = personal.index(name), self._model
        if parameters is not model.parameters:
            model = GlobalModel(parameters, self.layers)
        tensors = list(parameters.tensors)
        for t, tensor in self.chosen(model.layers).items():
            basis, old = self.memory.get(f"{_BASIS}/{tensor}"), model.arrays[t]
            if basis is None:
                continue
            rows = self.memory[f"{_PERSONAL}/{tensor}"]
            if old.shape != (rows.shape[1] // basis.shape[1], len(basis)):  # another model than that of the rounds
                return parameters
            part = rows[row].view(len(old), basis.shape[1]) @ basis.T
            with np.errstate(over="ignore"):
                new = np.asarray(old + part.cpu().numpy()).astype(old.dtype)
            if not np.isfinite(new).all():
                logger.warning("client %s receives the global model: its own %s is not finite", cid, tensor)
                return parameters
            tensors[t] = ndarray_to_bytes(new)
        return Parameters(tensors, parameters.tensor_type)

    def _margin(self, cid: str) -> float:
        return float(self.records["margins"].get(self.sampler.identity(cid), 0.0))

    # ---- state -------------------------------------------------------------------------------------------------------

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Refuse records without margins, or that name other clients than there are rows."""
        margins, personal = records.get("margins"), records.get("personal")
        fine = (
            isinstance(margins, Mapping)
            and all(isinstance(name, str) and is_real(m) and abs(m) <= 0.5 for name, m in margins.items())
            and isinstance(personal, list)
            and all(isinstance(name, str) for name in personal)
            and len(set(personal)) == len(personal)
            and all(len(rows) == len(personal) for key, rows in memory.items() if key.startswith(_PERSONAL))
        )
        require("the state's records", records, "a margin for each client, and a name for each client's row", fine)

    def check_memory(self, memory: object) -> dict[str, Tensor]:
        """Return a saved state's bases and rows on `device`."""
        if not isinstance(memory, Mapping):
            raise ValueError("the state's memory must be a dict of tensors; pass what state_dict() returned.")
        copied = {}
        for key, value in memory.items():
            kind, _, name = str(key).partition("/")
            real = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2
            if kind not in self.remembers_rows or not real or not bool((value.abs() < _LARGEST).all()):
                raise ValueError(f"the state's memory {key!r} is not a matrix of finite numbers that CLAIR keeps.")
            other = _PERSONAL if kind == _BASIS else _BASIS
            if f"{other}/{name}" not in memory:
                raise ValueError(f"the state's memory lacks {other}/{name}; pass what state_dict() returned.")
            copied[str(key)] = value.detach().to(self.device, torch.float64, copy=True)
            if kind == _BASIS and not _is_orthonormal(copied[str(key)]):
                raise ValueError(f"the state's memory {key!r} is not orthonormal; pass what state_dict() returned.")
        return copied

    def check_layers(self, layers: LayerMap, memory: dict[str, Tensor]) -> None:
        """Refuse what was remembered of other matrices."""
        chosen = self.chosen(layers)
        remembered = {key.partition("/")[2] for key in memory}
        if not remembered <= set(chosen.values()):
            raise ValueError(
                f"the state remembers the matrices {', '.join(sorted(remembered))}, and this strategy looks at "
                f"{', '.join(chosen.values()) or 'none'}; resume with the model and the matrices= that were saved."
            )
        for t, name in chosen.items():
            if name not in remembered:
                continue
            q, p = layers.shapes[t]
            basis, rows = memory[f"{_BASIS}/{name}"], memory[f"{_PERSONAL}/{name}"]
            if basis.shape[0] != p or rows.shape[1] != q * basis.shape[1]:
                raise ValueError(
                    f"the state remembers {name!r} of another shape than the model's {q} x {p}; resume with the model "
                    "that was saved."
                )


def _asked(matrices: Any) -> tuple[str | int, ...] | None:
    if matrices is None:
        return None
    several = isinstance(matrices, Sequence) and not isinstance(matrices, str)
    found = tuple(matrices) if several else (matrices,)
    fine = bool(found) and all(isinstance(m, str) or (is_integer(m) and m >= 0) for m in found)
    require("matrices", matrices, "names, patterns or positions of 2-D tensors, or None for all that fit", fine)
    return found


def _is_orthonormal(basis: Tensor) -> bool:
    gram = basis.T @ basis
    return bool((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max() < 1e-6)


def _matches(asked: str | int, position: int, name: str) -> bool:
    if isinstance(asked, str):
        return fnmatch.fnmatchcase(name, asked)
    return asked == position


def _columns(layers: LayerMap, layer: Layer) -> Iterator[tuple[int, slice]]:
    """Where in a layer's vector each of its tensors is."""
    offset = 0
    for t in layer.tensors:
        size = math.prod(layers.shapes[t])
        yield t, slice(offset, offset + size)
        offset += size


def _table(solutions: Sequence[ClairSolution], m: int) -> list[list[float]]:
    """‖S_(j,k)(I − P̂)‖_F/τ for all pairs of m clients, root mean square over matrices; 0 where not compared."""
    squares = torch.zeros(len(solutions[0].pairs), dtype=torch.float64, device=solutions[0].votes.device)
    for solution in solutions:
        if solution.threshold > 0:
            squares += (solution.distances / solution.threshold).square() / len(solutions)
    table = torch.zeros(m, m, dtype=torch.float64, device=squares.device)
    j, k = solutions[0].pairs.T
    table[j, k] = table[k, j] = squares.sqrt()
    return [[float(f"{value:.3g}") for value in row] for row in table.tolist()]
