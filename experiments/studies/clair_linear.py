"""`python -m experiments.studies.clair_linear`: CLAIR's study of multi-response linear models, by its solver alone.

He, Chen, Feng, arXiv 2605.21217; the paper's sizes are not public. Every client has the least-squares estimate of its
matrix W_k (10 x 20), of `client_apps.data.linear.generate`. One quantity is varied at a time, the others stay at 20
clients of which a fifth is contaminated, 200 samples each, rank 2, no heterogeneity. All estimators see the same
problems: a repetition is a seed. Saves results.csv, results.md and pictures.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from client_apps.data.linear import LinearProblem, generate
from experiments import clair_pictures as pictures
from experiments.report import write_whole
from strategies.solvers.clair import ClairSolution, solve

Array = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is drawn: everything else is as `generate` has it by default."""

    clients: int = 20
    share: float = 0.2
    samples: int = 200
    rank: int = 2
    heterogeneity: float = 0.0
    contamination: float = 1.0


SWEEPS: dict[str, Sequence[float]] = {
    "clients": (5, 10, 20, 40, 80, 160),
    "share": (0.0, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45),
    "samples": (50, 100, 200, 500, 1000, 2000),
    "rank": (1, 2, 3, 4, 5),
    "heterogeneity": (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3),
    "contamination": (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0),
}
"""What is varied, fields of `Setting`, and over which values."""

QUICK: dict[str, Sequence[float]] = {
    "clients": (5, 10, 20),
    "share": (0.0, 0.2, 0.4),
    "samples": (100, 400),
    "rank": (1, 3),
    "heterogeneity": (0.0, 0.1, 0.3),
    "contamination": (0.1, 1.0),
}
"""The same with `--quick`."""

REPETITIONS, QUICK_REPETITIONS = 50, 3
MANY, FEW_REPETITIONS = 80, 5
"""From so many clients on, the pairs' program takes seconds: no more repetitions than this."""

NAMES = {
    "local": "local OLS",
    "fedavg": "FedAvg",
    "oracle_fedavg": "oracle FedAvg",
    "clair": "CLAIR",
    "refit": "CLAIR, refit",
    "unknown": "CLAIR, refit, rank unknown",
    "given": "CLAIR, refit, noise given",
    "oracle": "true members and P",
}
"""Estimators, in the order of the tables."""

SOLVES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "clair": lambda s: {"rank": s.rank},
    "refit": lambda s: {"rank": s.rank, "refit": True},
    "unknown": lambda s: {"refit": True},
    "given": lambda s: {"rank": s.rank, "refit": True, "noise": 1 / math.sqrt(s.samples)},
}
"""Those that are CLAIR's, and what `solve` is given."""

MEASURES = (
    "error", "exact", "false_alarm", "missed", "members", "rank_found", "subspace", "gain", "cost", "true_gain",
    "true_cost", "warned", "noise_found", "converged",
)  # fmt: skip
FIELDS = ("sweep", "value", *asdict(Setting()), "estimator", "repetitions",
          *(name for measure in MEASURES for name in (measure, f"{measure}_se")))  # fmt: skip
"""Columns of a row: of each measure the mean over repetitions and its standard error."""

Sheet = tuple[str, list[str], list[list[str]]]
"""A heading, titles of columns, and rows."""


# ---- one repetition ----------------------------------------------------------------------------------------------


def measure(setting: Setting, seed: int) -> dict[str, dict[str, float]]:
    """Draw a problem and judge every estimator by it.

    Parameters
    ----------
    setting : Setting
    seed : int
        Of the problem.

    Returns
    -------
    dict of str to dict of str to float
        For each of `NAMES` those of `MEASURES` that it has.
    """
    problem = problem_of(setting, seed)
    local = estimates_of(problem)
    found = {name: {"error": error(problem, given)} for name, given in simple(problem, local).items()}
    for name, options in SOLVES.items():
        found[name] = judge(problem, local, solve(torch.from_numpy(local), **options(setting)))
    return {name: found[name] for name in NAMES}


def problem_of(setting: Setting, seed: int) -> LinearProblem:
    """Draw a problem."""
    return generate(
        seed, setting.clients, float(setting.share), n=setting.samples, rank=setting.rank,
        heterogeneity=setting.heterogeneity, contamination=setting.contamination,
    )  # fmt: skip


def estimates_of(problem: LinearProblem) -> Array:
    """Return the clients' least-squares estimates, (K, q, p)."""
    return np.stack([problem.ols(k) for k in range(len(problem.weights))])


def simple(problem: LinearProblem, local: Array) -> dict[str, Array]:
    """Return what is no solve: estimates (K, q, p) by name."""
    benign, projector = problem.benign, problem.basis.T @ problem.basis
    mean = local[benign].mean(0)
    return {
        "local": local,
        "fedavg": np.broadcast_to(local.mean(0), local.shape),
        "oracle_fedavg": np.broadcast_to(mean, local.shape),
        "oracle": mean + (local - mean) @ projector,
    }


def error(problem: LinearProblem, estimates: Array) -> float:
    """Return the mean over benign clients of ‖W_hat − W_k‖_F²."""
    return float(np.square(estimates - problem.weights)[problem.benign].sum((1, 2)).mean())


def judge(problem: LinearProblem, local: Array, solution: ClairSolution) -> dict[str, float]:
    """Return the measures of a solve.

    With W̄ the true matrices' mean over the members and Ē that of their errors E_k = Ŵ_k − W_k, a benign member's error
    off the subspace is (W̄ − W_k + Ē)(I − P̂) instead of E_k (I − P̂). So the true gain is ‖E_k (I − P̂)‖² − ‖Ē (I − P̂)‖²
    and the true cost ‖(W̄ − W_k)(I − P̂)‖², means over benign members. Where the members are the benign clients, gain
    less cost is exactly what the refinement takes off the error of local estimates.
    """
    members, benign = solution.members.numpy(), problem.benign
    projector = solution.projector.numpy()
    outside = np.eye(len(projector)) - projector
    judged = members & benign
    found = {
        "error": error(problem, solution.refined.numpy()),
        "exact": float((members == benign).all()),
        "false_alarm": float((benign & ~members).sum() / benign.sum()),
        "members": float(members.sum()),
        "rank_found": float(solution.rank),
        "subspace": float(np.linalg.norm(projector - problem.basis.T @ problem.basis)),
        "gain": solution.gain,
        "cost": solution.cost,
        "warned": float(solution.warning is not None),
        "noise_found": solution.noise,
        "converged": float(solution.converged),
    }
    if not benign.all():
        found["missed"] = float((members & ~benign).sum() / (~benign).sum())
    if judged.any():
        noise, truth = (local - problem.weights) @ outside, problem.weights @ outside
        removed = np.square(noise[judged]).sum((1, 2)) - np.square(noise[members].mean(0)).sum()
        added = np.square(truth[members].mean(0) - truth[judged]).sum((1, 2))
        found |= {"true_gain": float(removed.mean()), "true_cost": float(added.mean())}
    return found


# ---- all of them -------------------------------------------------------------------------------------------------


def run(
    sweeps: Mapping[str, Sequence[float]] = SWEEPS,
    repetitions: int = REPETITIONS,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure every value of every sweep.

    Parameters
    ----------
    sweeps : mapping of str to sequence of float
        Fields of `Setting` and their values.
    repetitions : int
        Of each; fewer from `MANY` clients on.
    progress : callable
        Called with a line of text as each value starts.

    Returns
    -------
    list of dict
        A row for each value and estimator, with the keys of `FIELDS` that apply.
    """
    rows: list[Row] = []
    known: dict[Setting, list[Row]] = {}  # the middle of each sweep is the same
    for sweep, values in sweeps.items():
        for value in values:
            changed: dict[str, Any] = {sweep: value}
            setting = replace(Setting(), **changed)
            if setting not in known:
                progress(f"{sweep} = {value:g} ...")
                known[setting] = _summaries(setting, repetitions)
            rows += [{"sweep": sweep, "value": value, **row} for row in known[setting]]
    return rows


def _summaries(setting: Setting, repetitions: int) -> list[Row]:
    count = min(repetitions, FEW_REPETITIONS) if setting.clients >= MANY else repetitions
    seen = [measure(setting, seed) for seed in range(count)]
    rows = []
    for name in NAMES:
        row: Row = {**asdict(setting), "estimator": name, "repetitions": count}
        for key in MEASURES:
            values = np.array([of_seed[name][key] for of_seed in seen if key in of_seed[name]])
            if len(values):
                row[key] = float(values.mean())
            if len(values) > 1:
                row[f"{key}_se"] = float(values.std(ddof=1) / math.sqrt(len(values)))
        rows.append(row)
    return rows


# ---- tables --------------------------------------------------------------------------------------------------------

_TITLES = {
    "clients": "Clients K, a fifth contaminated",
    "share": "Share of contaminated clients, K = 20",
    "samples": "Samples n of a client",
    "rank": "Rank r of the shared row space",
    "heterogeneity": "Heterogeneity: standard deviation of a benign client's entries outside the shared row space",
    "contamination": "Contamination: standard deviation of the entries of a contaminated client's B_k (benign: .3)",
}
_OF_SOLVES = [(key, NAMES[key]) for key in SOLVES]


def sheets(rows: Sequence[Row]) -> list[Sheet]:
    """Return three tables a sweep: errors, detection and subspace, gain and cost."""
    found: list[Sheet] = []
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        at: dict[float, dict[str, Row]] = {}
        for row in rows:
            if row["sweep"] == sweep:
                at.setdefault(row["value"], {})[row["estimator"]] = row
        lines = [(f"{value:g}", of_value) for value, of_value in at.items()]
        found.append((
            f"{_TITLES[sweep]}: squared error of a benign client, ± standard error",
            [sweep, *NAMES.values()],
            [[value, *(_cell(of[key], "error") for key in NAMES)] for value, of in lines],
        ))  # fmt: skip
        found.append((
            f"{_TITLES[sweep]}: exact sets (%) / benign clients left out (%) / contaminated ones kept (%)",
            [sweep, *(title for _, title in _OF_SOLVES)],
            [[value, *(_rates(of[key]) for key, _ in _OF_SOLVES)] for value, of in lines],
        ))  # fmt: skip
        found.append((
            f"{_TITLES[sweep]}: subspace error, ± standard error, and the rank found",
            [sweep, *(title for _, title in _OF_SOLVES), "mean rank found where unknown"],
            [[value, *(_cell(of[key], "subspace") for key, _ in _OF_SOLVES), _mean(of["unknown"], "rank_found", 2)]
             for value, of in lines],
        ))  # fmt: skip
        found.append((
            f"{_TITLES[sweep]}: gain / cost, estimated → true; warnings (%)",
            [sweep, *(title for _, title in _OF_SOLVES)],
            [[value, *(_balance(of[key]) for key, _ in _OF_SOLVES)] for value, of in lines],
        ))  # fmt: skip
    return found


def _mean(row: Row, key: str, digits: int = 3) -> str:
    return f"{row[key]:.{digits}f}" if key in row else "–"


def _cell(row: Row, key: str) -> str:
    return _mean(row, key) + (f" ± {row[f'{key}_se']:.3f}" if f"{key}_se" in row else "")


def _rates(row: Row) -> str:
    return " / ".join(f"{100 * row[key]:.0f}" if key in row else "–" for key in ("exact", "false_alarm", "missed"))


def _balance(row: Row) -> str:
    estimated, true = (f"{_mean(row, f'{k}gain', 2)} / {_mean(row, f'{k}cost', 2)}" for k in ("", "true_"))
    return f"{estimated} → {true}; {100 * row['warned']:.0f}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables for a terminal."""
    made = []
    for heading, titles, lines in sheets(rows):
        table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, title in enumerate(titles):
            table.add_column(title, justify="right" if index else "left", overflow="fold")
        for line in lines:
            table.add_row(*line)
        made.append(table)
    return made


def markdown(rows: Sequence[Row], command: str, names: Sequence[str]) -> str:
    """Return the report's text, with pictures of these names."""
    counts = sorted({row["repetitions"] for row in rows}, reverse=True)
    text = [
        "# CLAIR on multi-response linear models",
        f"`{command}`",
        f"Means over {' or, from ' + str(MANY) + ' clients on, '.join(map(str, counts))} repetitions, whose seeds all "
        "settings share. What is not varied: 20 clients, a fifth of them contaminated, 200 samples each, rank 2, no "
        "heterogeneity, contamination 1; q = 10, p = 20, noise of variance 1, signal .3.",
    ]
    for heading, titles, lines in sheets(rows):
        rule = "| --- |" + " ---: |" * (len(titles) - 1)
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        text.append(f"## {heading}\n\n| {' | '.join(titles)} |\n{rule}\n{body}")
    text += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in names]
    return "\n\n".join(text) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ---- pictures ------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], out: Path) -> list[str]:
    """Draw what the rows have sweeps for into a folder, and return the files' names."""
    drawn = ["pairs.png"]
    solution = solve(torch.from_numpy(estimates_of(problem_of(Setting(), 0))), rank=Setting().rank)
    pictures.draw_pairs(
        pictures.square(len(solution.members), solution.pairs.numpy(), solution.distances.numpy()),
        solution.members.numpy(), solution.threshold, [str(k) for k in range(len(solution.members))], out / drawn[0],
    )  # fmt: skip
    if clients := _series(rows, "clients"):
        lines = _lines(clients, "subspace", ["clair", "refit"])
        pictures.draw_subspace_error(clients["clair"]["value"], lines, out / "subspace_error.png")
        drawn.append("subspace_error.png")
    if levels := _series(rows, "heterogeneity"):
        curves = {
            f"{title}, {kind}": (levels[key][f"{k}cost"], levels[key][f"{k}gain"], levels[key]["warned"])
            for key, title in (("refit", "noise estimated"), ("given", "noise given"))
            for k, kind in (("", "estimated"), ("true_", "true"))
        }
        pictures.draw_gain_cost(levels["refit"]["value"], curves, out / "gain_cost.png")
        drawn.append("gain_cost.png")
    if shares := _series(rows, "share"):
        pictures.draw_lines(
            100 * shares["clair"]["value"], _lines(shares, "error", [key for key in NAMES if key != "given"]),
            out / "share.png", title="Error of a benign client, 20 clients", xlabel="contaminated clients (%)",
            ylabel="squared error", log="y",
        )  # fmt: skip
        drawn.append("share.png")
    if strengths := _series(rows, "contamination"):
        pictures.draw_lines(
            strengths["clair"]["value"], _lines(strengths, "exact", list(SOLVES), 100.0), out / "detection.png",
            title="Exact set found, 20 clients, 4 contaminated", xlabel="contamination (benign signal: .3)",
            ylabel="solves (%)", log="x",
        )  # fmt: skip
        drawn.append("detection.png")
    return drawn


def _lines(
    series: Mapping[str, Mapping[str, Array]], measure: str, keys: Sequence[str], factor: float = 1.0
) -> dict[str, tuple[Array, Array]]:
    return {NAMES[key]: (factor * series[key][measure], factor * series[key][f"{measure}_se"]) for key in keys}


def _series(rows: Sequence[Row], sweep: str) -> dict[str, dict[str, Array]]:
    """Return each estimator's columns over a sweep; NaN where a row has no value."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["sweep"] == sweep:
            found.setdefault(row["estimator"], []).append(row)
    columns = ["value", *FIELDS[FIELDS.index("error") :]]
    return {
        name: {key: np.array([row.get(key, math.nan) for row in of], float) for key in columns}
        for name, of in found.items()
    }


# ---- the command line ----------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in SWEEPS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no sweep; known: {', '.join(SWEEPS)}")
    return list(dict.fromkeys(names))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.clair_linear", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("outputs/clair_linear_study"), metavar="DIR")
    parser.add_argument("--repetitions", type=_count, help=f"of each setting, {REPETITIONS} by default")
    parser.add_argument("--quick", action="store_true", help="few values, and 3 repetitions unless told")
    parser.add_argument(
        "--sweep", type=_names, default=list(SWEEPS), metavar="NAMES", help="some of " + ",".join(SWEEPS)
    )
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        parser.error(f"--out: {args.out} cannot be made a folder: {reason.strerror}")
    torch.set_num_threads(1)  # matrices are too small to be shared out
    console = Console()
    repetitions = args.repetitions or (QUICK_REPETITIONS if args.quick else REPETITIONS)
    values = QUICK if args.quick else SWEEPS
    rows = run({name: values[name] for name in args.sweep}, repetitions, progress=console.print)
    for table in tables(rows):
        console.print(table)
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "experiments.studies.clair_linear", *given])
    drawn = draw(rows, args.out)
    write_whole(args.out / "results.csv", as_csv(rows).encode())
    write_whole(args.out / "results.md", markdown(rows, command, drawn).encode())
    names = ", ".join([*drawn, "results.csv", "results.md"])
    console.print(f"Wrote {names} to {args.out}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
