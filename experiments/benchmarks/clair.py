"""`python -m experiments.benchmarks.clair`: time and extra memory of CLAIR's solve, and other solvers side by side.

Low-rank clients with noise, a fifth of them contaminated. Each solve is a process of its own: both forms over the
number of clients, from 300 on also on a random graph of 20 pairs a client, and matrices as large as those of a
Transformer. Extra memory is the growth of the peak resident set during one solve. All pairs of many clients take very
long, so that there only the first iterations are measured, or none. Side by side, alternating in one process, are
the program for pairs, alternating proximal steps with a full SVD, and CVXPY, which has to be given a tiny one.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from client_apps.data.linear import generate
from strategies.solvers import clair
from strategies.solvers.lowrank import TooLargeError, solve_pairs

from .aggregation import Row, alternate, peak_growth
from .cells import answer, cell

_MODULE = "experiments.benchmarks.clair"  # whatever name it runs under

ALL, GRAPH, CLIENTS = "all pairs", "random pairs", "clients"

SOLVES: Sequence[tuple[str, int, int]] = (
    *((form, count, 64) for count in (10, 30, 100) for form in (ALL, CLIENTS)),
    (CLIENTS, 10, 768),
    (ALL, 10, 768),
    *((form, count, 64) for count in (300, 1000) for form in (CLIENTS, GRAPH)),
    (ALL, 300, 64),
    (ALL, 1000, 64),
)
"""What is measured: form, number of clients K, and q = p."""

QUICK: Sequence[tuple[str, int, int]] = (
    *((form, count, 64) for count in (10, 30) for form in (ALL, CLIENTS)),
    (GRAPH, 300, 16),
)

AGAINST, QUICK_AGAINST = ((10, 64), (20, 64), (40, 64)), ((10, 32),)
"""K and q = p of the comparison with alternating proximal steps."""

DEGREE = 20
# Numbers in all blocks of pairs from which on a solve is stopped early, and numbers in all its iterations then.
_MANY, _MOST = 2**27, 2**30
_NOISE = 0.07
_TOLERANCE = 1e-6  # of the optimality residual, as by default
_MOST_STEPS = 3000

PAIRS, STEPS, CVXPY = "program for pairs", "alternating proximal steps", "CVXPY"

FIELDS = (
    "section", "form", "clients", "pairs", "q", "p", "who", "seconds", "ratio", "repeats", "weights_mb", "extra_mb",
    "of_weights", "iterations", "converged", "exact", "gap", "note",
)  # fmt: skip
"""Columns of a row. `ratio` is to our program, `gap` how far above the minimum the objective is, relative; MB: 10^6."""


def make_clients(count: int, side: int, seed: int = 0) -> tuple[Tensor, Tensor, int]:
    """Make clients' matrices (K, side, side) as a server sees them, who is benign (K,), and their rank.

    Contaminated clients, a fifth, are about six times as far off as noise alone would be.
    """
    rank = max(2, side // 32)
    problem = generate(
        seed, count, 0.2, q=side, p=side, rank=rank, contamination=6 * math.sqrt(2) * _NOISE * math.sqrt(side / rank)
    )
    noise = np.random.default_rng([seed, count, side]).standard_normal(problem.weights.shape)
    return torch.from_numpy(problem.weights + _NOISE * noise), torch.from_numpy(problem.benign), rank


def measure(form: str, clients: int, side: int, repeats: int = 3, budget: float = 10.0) -> Row:
    """Measure solves in this process, which should be a fresh one."""
    small, _, rank = make_clients(5, 8)
    for each in clair.FORMS:  # libraries load and make their buffers on first use
        clair.solve(small, rank=rank, form=each)
    weights, benign, rank = make_clients(clients, side)
    pairs = clair.random_pairs(clients, DEGREE) if form == GRAPH else None
    number = clients * (clients - 1) // 2 if pairs is None else len(pairs)
    numbers = number * side * side
    most = _MOST // numbers if form != CLIENTS and numbers > _MANY else 2000
    if not most:
        return {"pairs": number, "note": f"skipped: an iteration passes over {numbers:.1e} numbers, for minutes"}
    size = weights.numel() * weights.element_size()
    row: Row = {"pairs": number, "weights_mb": size / 1e6}
    seconds: list[float] = []
    found: list[clair.ClairSolution] = []

    def call() -> None:
        found.clear()
        began = time.perf_counter()
        found.append(
            clair.solve(
                weights, rank=rank, pairs=pairs, form="clients" if form == CLIENTS else "pairs", max_iterations=most
            )
        )
        seconds.append(time.perf_counter() - began)

    try:
        extra = peak_growth(call)
        while len(seconds) < repeats and sum(seconds) < budget:
            call()
    except TooLargeError as reason:
        return {**row, "note": str(reason)}
    (solution,) = found
    row |= {
        "seconds": statistics.median(seconds), "repeats": len(seconds), "extra_mb": extra / 1e6,
        "of_weights": extra / size, "iterations": solution.iterations, "converged": solution.converged,
        "exact": bool((solution.members == benign).all()),
    }  # fmt: skip
    if not solution.converged:
        row["note"] = f"stopped after {solution.iterations} of up to 2000 iterations"
    return row


def against_steps(clients: int, side: int, repeats: int = 3, budget: float = 30.0) -> dict[str, list[Row]]:
    """Compare the program for pairs with alternating proximal steps, to the same optimality residual."""
    problem = _Problem(clients, side)
    given = (problem.differences, problem.low, problem.sparse, _TOLERANCE)
    certificate = problem.solve(_TOLERANCE).certificate
    objective, residual, steps = alternating(*given)
    calls = {PAIRS: lambda: problem.solve(_TOLERANCE), STEPS: lambda: alternating(*given)}
    ours, theirs = problem.rows(alternate(calls, repeats, budget, warm_ups=0))
    ours |= {"iterations": certificate.iterations, "gap": problem.gap(certificate.objective),
             "converged": certificate.converged}  # fmt: skip
    theirs |= {"iterations": steps, "gap": problem.gap(objective), "converged": residual <= _TOLERANCE}
    return {"rows": [ours, theirs]}


def against_cvxpy(clients: int = 6, q: int = 4, p: int = 5, repeats: int = 3) -> dict[str, list[Row]]:
    """Compare the program for pairs with CVXPY's, at a size that it can do."""
    cp: Any = import_module("cvxpy")  # for tests only, and without types that could be checked

    problem = _Problem(clients, q, p)
    D = problem.differences
    flat = D.reshape(-1, p).numpy()
    low, sparse = cp.Variable(flat.shape), cp.Variable(flat.shape)
    blocks = sum(cp.norm(sparse[g * q : (g + 1) * q], "fro") for g in range(len(D)))
    goal = 0.5 * cp.sum_squares(flat - low - sparse) + problem.low * cp.normNuc(low) + problem.sparse * blocks
    asked = cp.Problem(cp.Minimize(goal))
    calls: dict[str, Callable[[], object]] = {
        PAIRS: lambda: problem.solve(_TOLERANCE),
        CVXPY: lambda: asked.solve(solver=cp.CLARABEL),
    }
    rows = problem.rows(alternate(calls, repeats, 60.0))
    ours = problem.solve(_TOLERANCE)
    rows[0] |= {"iterations": ours.certificate.iterations, "gap": problem.gap(ours.certificate.objective)}
    rows[1] |= {"gap": problem.gap(float(asked.value)), "note": f"{cp.__version__}, Clarabel"}
    return {"rows": rows}


class _Problem:
    """A program for pairs, its λ as CLAIR sets them, and its minimum."""

    def __init__(self, clients: int, q: int, p: int | None = None) -> None:
        weights, _, rank = make_clients(clients, max(q, p or q))
        self.weights = weights[:, :q, : p or q].contiguous()
        found = clair.solve(self.weights, rank=min(rank, q), max_iterations=1)
        self.low, self.sparse, self.pairs = found.lambda_low, found.lambda_sparse, found.pairs
        self.differences = self.weights[self.pairs[:, 0]] - self.weights[self.pairs[:, 1]]
        self.least = self.solve(1e-10).certificate.objective

    def solve(self, tolerance: float) -> Any:
        """Solve by our program."""
        ones = torch.ones(len(self.pairs), dtype=torch.float64)
        return solve_pairs(self.weights, self.pairs, ones, self.low, self.sparse, tolerance=tolerance)

    def gap(self, objective: float) -> float:
        """How far above the minimum, relative to it."""
        return float(objective / self.least - 1)

    def rows(self, times: dict[str, list[float]]) -> list[Row]:
        """Make a row of each solver."""
        count, q, p = self.weights.shape
        medians = {who: statistics.median(seconds) for who, seconds in times.items()}
        what = {"clients": count, "pairs": len(self.pairs), "q": q, "p": p}
        return [
            {**what, "who": who, "seconds": s, "ratio": s / medians[PAIRS], "repeats": len(times[who])}
            for who, s in medians.items()
        ]


def alternating(
    differences: Tensor, lambda_low: float, lambda_sparse: float, tolerance: float, most: int = _MOST_STEPS
) -> tuple[float, float, int]:
    """Minimise over L and S in turn until the residual is within the tolerance; return objective, residual and steps.

    With weights ω = 1 each step is exact: L is D − S with its singular values shortened by λ_L, S is D − L with its
    blocks shortened by λ_S. What S changes by is then a subgradient at L: the residual of `solve_pairs`.
    """
    count, q, p = differences.shape
    sparse = torch.zeros_like(differences)
    objective, residual, step = math.inf, math.inf, 0
    while residual > tolerance and step < most:
        step += 1
        left, values, right = torch.linalg.svd((differences - sparse).view(-1, p), full_matrices=False)
        values = (values - lambda_low).clamp(min=0)
        rest = differences - ((left * values) @ right).view(count, q, p)
        norms = rest.flatten(1).norm(dim=1)
        before, sparse = sparse, rest * (1 - lambda_sparse / norms.clamp(min=lambda_sparse))[:, None, None]
        residual = float((sparse - before).norm()) / (lambda_low * math.sqrt(max(1, int((values > 0).sum()))))
        objective = float(0.5 * norms.clamp(max=lambda_sparse).square().sum()) + lambda_low * float(values.sum())
        objective += lambda_sparse * float((norms - lambda_sparse).clamp(min=0).sum())
    return objective, residual, step


def run(
    solves: Sequence[tuple[str, int, int]] = SOLVES,
    against: Sequence[tuple[int, int]] = AGAINST,
    *,
    repeats: int = 3,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure all solves and comparisons.

    Parameters
    ----------
    solves : sequence of (str, int, int)
        As `SOLVES`.
    against : sequence of (int, int)
        As `AGAINST`.
    repeats : int
        Of each call; fewer, at least one, where they take long.
    progress : callable
        Called with a line of text as each measurement starts.

    Returns
    -------
    list of dict
        Rows with the keys of `FIELDS`, those that apply; what cannot be measured has its reason under `note`.
    """
    rows: list[Row] = []
    for clients, side in against:
        progress(f"clair: against {STEPS}, K = {clients}, {side}x{side} ...")
        found = cell(_MODULE, "against_steps", clients=clients, side=side, repeats=repeats)
        missing = {"clients": clients, "q": side, "p": side, "who": STEPS, "note": found.get("note")}
        rows += [{"section": "against", **row} for row in found.get("rows", [missing])]
    if find_spec("cvxpy") is None:
        rows.append({"section": "against", "who": CVXPY, "note": "not installed; pip install cvxpy"})
    else:
        progress(f"clair: against {CVXPY} ...")
        found = cell(_MODULE, "against_cvxpy", repeats=repeats)
        missing = {"who": CVXPY, "note": found.get("note")}
        rows += [{"section": "against", **row} for row in found.get("rows", [missing])]
    for form, clients, side in solves:
        progress(f"clair: {form}, K = {clients}, {side}x{side} ...")
        found = cell(_MODULE, "measure", form=form, clients=clients, side=side, repeats=repeats)
        rows.append({"section": "solve", "form": form, "clients": clients, "q": side, "p": side, **found})
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """Make a table of solves and one of comparisons."""
    style: dict[str, Any] = {
        "box": box.SIMPLE_HEAD,
        "pad_edge": False,
        "padding": (0, 1, 0, 0),
        "title_justify": "left",
    }
    solves = Table(title="CLAIR's solve: seconds, and extra memory over the weights'", **style)
    for name in ("form", "K", "pairs", "size", "seconds", "iter.", "extra\nMB", "of\nweights", "set"):
        solves.add_column(name, justify="left" if name == "form" else "right", no_wrap=name in ("form", "set"))
    others = Table(title=f"the program for pairs and others; residual {_TOLERANCE:g}, gap: of the objective", **style)
    for name in ("who", "K", "size", "seconds", "ratio", "iter.", "gap"):
        others.add_column(name, justify="left" if name == "who" else "right", no_wrap=True)
    notes: dict[str, list[str]] = {"solve": [], "against": []}
    for row in rows:
        size = f"{row['q']}x{row['p']}" if "q" in row else "–"
        if row.get("note"):
            where = f", K = {row['clients']}" if "clients" in row else ""
            notes[row["section"]].append(f"{row.get('form') or row['who']}{where}: {row['note']}")
        if row["section"] == "solve":
            found = ("exact" if row["exact"] else "not exact") if row.get("converged") else "–"
            solves.add_row(
                row["form"], _cell(row, "clients", "d"), _cell(row, "pairs", "d"), size, _cell(row, "seconds", ".3g"),
                _cell(row, "iterations", "d"), _cell(row, "extra_mb", ".0f"), _cell(row, "of_weights", ".1f"), found,
            )  # fmt: skip
        else:
            others.add_row(
                row["who"], _cell(row, "clients", "d"), size, _cell(row, "seconds", ".3g"), _cell(row, "ratio", ".1f"),
                _cell(row, "iterations", "d"), _cell(row, "gap", ".1e"),
            )  # fmt: skip
    for table, section in ((solves, "solve"), (others, "against")):
        table.caption = "\n".join(notes[section]) or None
    return [solves, others]


def _cell(row: Row, key: str, form: str) -> str:
    return "–" if row.get(key) is None else format(row[key], form)


def save(rows: Sequence[Row], out: Path) -> None:
    """Write clair.csv into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    (out / "clair.csv").write_text(text.getvalue())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, one repetition")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        answer(args.cell, measure=measure, against_steps=against_steps, against_cvxpy=against_cvxpy)
        return
    console = Console()
    console.print(f"{os.cpu_count()} CPUs, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = run(
        QUICK if args.quick else SOLVES, QUICK_AGAINST if args.quick else AGAINST, repeats=1 if args.quick else 3,
        progress=console.print,
    )  # fmt: skip
    for each in tables(rows):
        console.print(each)
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
