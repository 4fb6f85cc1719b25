"""CLAIR's study of linear models: what it measures is what it says, and what it writes is whole."""

import csv
import math

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.studies import clair_linear as study
from strategies.solvers.clair import solve


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick(tmp_path_factory, one_thread):
    """The folder and the rows of a quick study."""
    out = tmp_path_factory.mktemp("study") / "deeper" / "still"
    study.main(["--quick", "--repetitions", "2", "--out", str(out)])
    with (out / "results.csv").open() as file:
        return out, list(csv.DictReader(file))


def test_a_quick_study_writes_all_files(quick):
    out, rows = quick
    pictures = {"pairs.png", "subspace_error.png", "gain_cost.png", "share.png", "detection.png"}
    assert {path.name for path in out.iterdir()} == {*pictures, "results.csv", "results.md"}
    for name in pictures:
        with Image.open(out / name) as image:
            image.load()
            assert image.width > 600
    assert tuple(rows[0]) == study.FIELDS
    asked = [(sweep, value) for sweep, values in study.QUICK.items() for value in values]
    assert [(r["sweep"], float(r["value"]), r["estimator"]) for r in rows] == [
        (sweep, value, name) for sweep, value in asked for name in study.NAMES
    ]


def test_the_report_has_every_table_and_picture(quick):
    out, _ = quick
    text = (out / "results.md").read_text()
    assert text.count("\n## ") == 4 * len(study.QUICK)
    assert "`python -m experiments.studies.clair_linear --quick --repetitions 2 --out" in text
    assert text.count("](") == 5
    assert "nan" not in text
    for block in text.split("\n\n"):
        if block.startswith("| "):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_figures_are_finite_and_rates_are_rates(quick):
    _, rows = quick
    for row in rows:
        found = {key: float(row[key]) for key in study.MEASURES if row[key]}
        assert all(map(math.isfinite, found.values())), row
        assert all(0 <= found.get(key, 0) <= 1 for key in ("exact", "false_alarm", "missed", "warned", "converged"))
        assert found["error"] > 0
        assert ("subspace" in found) == (row["estimator"] in study.SOLVES)


def test_local_error_is_that_of_least_squares(quick):
    """With normal inputs and unit noise, the estimate's error is p q σ²/(n − p − 1) in the mean."""
    _, rows = quick
    for row in rows:
        if row["estimator"] == "local":
            expected = 20 * 10 / (float(row["samples"]) - 20 - 1)
            assert float(row["error"]) == pytest.approx(expected, rel=0.1)


def test_reference_figures():
    """METHODS.md, section 3: 1 of 10 clients contaminated, mean squared error of the others over repetitions."""
    seen = [study.measure(study.Setting(clients=10, share=0.1), seed) for seed in range(12)]
    mean = {name: float(np.mean([of[name]["error"] for of in seen])) for name in study.NAMES}
    reference = {"local": 1.14, "oracle_fedavg": 1.72, "oracle": 0.24}
    assert mean == pytest.approx({**mean, **reference}, rel=0.1)
    assert mean["oracle"] < mean["refit"] < 0.3


def test_gain_less_cost_is_what_the_error_falls_by():
    """Where the members are the benign clients, exactly; by sums over entries, not over rows of a projector."""
    setting = study.Setting(clients=10, heterogeneity=0.05)
    problem = study.problem_of(setting, 3)
    local = study.estimates_of(problem)
    solution = solve(torch.from_numpy(local), rank=2, refit=True)
    found = study.judge(problem, local, solution)
    assert found["exact"] == 1
    falls = np.square(local - problem.weights) - np.square(solution.refined.numpy() - problem.weights)
    assert found["true_gain"] - found["true_cost"] == pytest.approx(falls[problem.benign].sum() / 8, rel=1e-9)
    # Gain without the noise of the subspace, cost without its error: (1 - 1/8) q (p - r) s² and the same with .05².
    assert found["true_gain"] == pytest.approx(7 / 8 * 10 * 18 / (200 - 21), rel=0.15)
    assert found["true_cost"] == pytest.approx(7 / 8 * 10 * 18 * 0.05**2, rel=0.25)


def test_rates_by_hand():
    problem = study.problem_of(study.Setting(clients=5), 0)
    local = study.estimates_of(problem)
    solution = solve(torch.from_numpy(local), rank=2, refit=True)
    assert problem.benign.tolist() == [True] * 4 + [False]
    solution.members[:] = torch.tensor([False, True, True, True, True])
    found = study.judge(problem, local, solution)
    assert (found["exact"], found["false_alarm"], found["missed"], found["members"]) == (0, 0.25, 1, 4)


def test_repetitions_are_seeds_and_give_mean_and_standard_error():
    seen = [study.measure(study.Setting(clients=5), seed)["refit"]["error"] for seed in range(3)]
    (row,) = [row for row in study.run({"clients": [5]}, 3) if row["estimator"] == "refit"]
    assert row["error"] == pytest.approx(np.mean(seen))
    assert row["error_se"] == pytest.approx(np.std(seen, ddof=1) / math.sqrt(3))
    assert row["repetitions"] == 3


def test_a_single_repetition_has_no_standard_error(tmp_path):
    study.main(["--quick", "--sweep", "rank", "--repetitions", "1", "--out", str(tmp_path)])
    with (tmp_path / "results.csv").open() as file:
        row = next(csv.DictReader(file))
    assert row["error"]
    assert row["error_se"] == ""
    assert {path.name for path in tmp_path.iterdir()} == {"pairs.png", "results.csv", "results.md"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "clients,colour"], "'colour' is no sweep; known: clients, share, samples"),
        (["--sweep", ""], "'' is no sweep"),
        (["--repetitions", "0"], "must be an integer of at least 1, not '0'"),
        (["--repetitions", "many"], "must be an integer of at least 1, not 'many'"),
        (["--quack"], "unrecognized arguments: --quack"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        study.main(["--out", str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit):
        study.main(["--out", str(tmp_path / "file")])
    assert "cannot be made a folder" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_study_that_is_ended_leaves_nothing_half_written(tmp_path, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "measure", ended)
    with pytest.raises(KeyboardInterrupt):
        study.main(["--quick", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
