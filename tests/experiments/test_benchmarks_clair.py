"""CLAIR's benchmark: solves are measured, solvers reach the same minimum, and files are written."""

import csv

import pytest
import torch

from experiments.benchmarks import clair as benchmark
from strategies.solvers import clair


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices are so small that threads would only wait for each other; cells are told by their environment."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows(one_thread):
    """A tiny run of each kind, in this process."""

    def here(_, function, **given):
        return getattr(benchmark, function)(**given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "cell", here)
        return benchmark.run([(benchmark.ALL, 6, 8), (benchmark.CLIENTS, 6, 8)], [(6, 8)], repeats=1)


def check(row):
    assert "note" not in row, row
    assert (row["pairs"], row["repeats"], row["converged"]) == (15, 1, True)
    assert row["seconds"] > 0
    assert row["extra_mb"] >= 0


def test_both_forms_are_measured(rows):
    solves = [row for row in rows if row["section"] == "solve"]
    assert [(row["form"], row["clients"], row["q"]) for row in solves] == [
        (benchmark.ALL, 6, 8), (benchmark.CLIENTS, 6, 8),
    ]  # fmt: skip
    for row in solves:
        check(row)


def test_a_solve_is_measured_in_a_process_of_its_own():
    check(benchmark.cell("experiments.benchmarks.clair", "measure", form=benchmark.ALL, clients=6, side=8, repeats=1))


def test_others_reach_the_same_minimum(rows):
    against = [row for row in rows if row["section"] == "against"]
    assert [row["who"] for row in against] == [benchmark.PAIRS, benchmark.STEPS, benchmark.PAIRS, benchmark.CVXPY]
    assert all(abs(row["gap"]) < 1e-5 for row in against if "gap" in row)
    assert [row["ratio"] for row in against if row["who"] == benchmark.PAIRS] == [1, 1]
    assert against[1]["converged"]


def test_rows_are_shown_and_saved(rows, tmp_path):
    refused = {"section": "solve", "form": benchmark.ALL, "clients": 9, "q": 8, "p": 8, "note": "it would take 9 GB"}
    missing = {"section": "against", "who": benchmark.CVXPY, "note": "not installed"}
    solves, others = benchmark.tables([*rows, refused, missing])
    assert list(solves.columns[4].cells)[-1] == "–"
    assert "all pairs, K = 9: it would take 9 GB" in solves.caption
    assert "CVXPY: not installed" in others.caption
    benchmark.save([*rows, refused], tmp_path)
    with (tmp_path / "clair.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == benchmark.FIELDS
    assert read[-1]["note"] == "it would take 9 GB"


def test_a_solve_that_memory_refuses_is_a_row_with_the_sentence(monkeypatch):
    monkeypatch.setattr(clair, "solve", _refuses_large)
    row = benchmark.measure(benchmark.ALL, 6, 16)
    assert row["note"] == "it would take 9 GB; use form='clients'."
    assert "seconds" not in row


def _refuses_large(weights, **_):
    if weights.shape[1] > 8:
        raise benchmark.TooLargeError("it would take 9 GB; use form='clients'.")


def test_many_pairs_are_stopped_early_and_say_so(monkeypatch):
    monkeypatch.setattr(benchmark, "_MANY", 100)
    monkeypatch.setattr(benchmark, "_MOST", 3 * 15 * 64)
    row = benchmark.measure(benchmark.ALL, 6, 8, repeats=1)
    assert (row["iterations"], row["converged"]) == (3, False)
    assert row["note"] == "stopped after 3 of up to 2000 iterations"
    monkeypatch.setattr(benchmark, "_MOST", 15 * 64 - 1)
    row = benchmark.measure(benchmark.ALL, 6, 8, repeats=1)
    assert row == {"pairs": 15, "note": "skipped: an iteration passes over 9.6e+02 numbers, for minutes"}


def test_a_cell_that_fails_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(benchmark, "cell", lambda *_, **__: {"note": "failed: no"})
    rows = benchmark.run([(benchmark.ALL, 6, 8)], [(6, 8)])
    assert [row["note"] for row in rows] == ["failed: no"] * 3
    benchmark.tables(rows)


def test_clients_are_of_low_rank_but_for_a_fifth():
    weights, benign, rank = benchmark.make_clients(10, 64)
    assert (weights.shape, weights.dtype, rank) == ((10, 64, 64), torch.float64, 2)
    assert benign.tolist() == [True] * 8 + [False] * 2
    values = torch.linalg.svdvals((weights[:8] - weights[:8].mean(0)).reshape(-1, 64))
    assert values[rank - 1] > 1.5 * values[rank]
