"""Contaminated clients in whole runs: what they do to FedAvg and to the median, and what is recorded and reported."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flwr.common import Scalar
from matplotlib.axes import Axes
from safetensors.numpy import load_file

from client_apps import make_client_app
from client_apps.data.linear import generate
from experiments.config import check, compose
from experiments.curves import figure_of
from experiments.engine import SerialGrid, serve_on
from experiments.report import report
from experiments.runs import find_runs, group_runs
from experiments.server_app import count_attacked, make_server_app

from .cli import rounds, run

QUIET = ("simulation=serial", "tracking.progress=false", "tracking.tensorboard=false")


def serial(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run all rounds in this process; what was recorded of each."""
    cfg = compose([*QUIET, *overrides, f"output_dir={folder}"])
    serve_on(SerialGrid(make_client_app(cfg), cfg["num_clients"]), make_server_app(cfg, check(cfg)))
    return rounds(folder)


def by_name(folder: Path) -> Mapping[tuple[str, str | None], list[dict[str, Any]]]:
    """The records of a sweep's runs by strategy and attack."""
    found = {}
    for path in folder.glob("*/config.yaml"):
        cfg = yaml.safe_load(path.read_text())
        found[cfg["strategy"]["name"], cfg["client"]["attack"]] = rounds(path.parent)
    return found


# ---- digits --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and the median with ten clients, of whom two lie or none."""
    folder = tmp_path_factory.mktemp("sweep")
    found = run(
        "-m", *QUIET, "num_clients=10", "clients_per_round=10", "num_rounds=12", "evaluation.every=4", "client.lr=0.1",
        "dataset.partition.kind=iid", "client.attackers=2", "client.attack_strength=4", "client.attack=null,sign_flip",
        "strategy=fedavg,fedmedian", f"hydra.sweep.dir={folder}", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    return folder


def test_flipped_updates_hurt_fedavg_more_than_the_median(sweep: Path) -> None:
    final = {key: records[-1] for key, records in by_name(sweep).items()}
    lost = {
        strategy: final[strategy, None]["accuracy"] - final[strategy, "sign_flip"]["benign_accuracy"]
        for strategy in ("fedavg", "fedmedian")
    }
    # Two of ten that send −4 g make FedAvg's step (8 − 8)/10 of the honest one: it goes nowhere.
    assert final["fedavg", "sign_flip"]["benign_accuracy"] < 0.3
    assert lost["fedavg"] > 0.4
    assert lost["fedmedian"] < lost["fedavg"] / 2


def test_what_is_recorded_where_clients_lie_and_where_none_does(sweep: Path) -> None:
    for (_, attack), records in by_name(sweep).items():
        for record in (record for record in records if "accuracy" in record):
            assert record.get("attacked_updates") == (2 if attack and record["round"] else None)
            found = {key for key in record if key.startswith("benign")}
            assert found == ({"benign_accuracy", "benign_worst10", "benign_macro_f1"} if attack else set())


def test_the_report_has_a_setting_for_each_attack(sweep: Path) -> None:
    text = (sweep / "report.md").read_text()
    assert "## digits, mlp, iid\n" in text
    assert "## digits, mlp, iid, sign_flip by 2\n" in text
    (honest,) = (part for part in text.split("\n## ") if part.startswith("digits, mlp, iid\n"))
    (lying,) = (part for part in text.split("\n## ") if part.startswith("digits, mlp, iid, sign_flip by 2\n"))
    assert "benign accuracy" in lying
    assert "benign" not in honest
    with (sweep / "report.csv").open() as file:
        lines = {(line["setting"], line["strategy"]): line for line in csv.DictReader(file)}
    assert len(lines) == 4
    for (strategy, attack), records in by_name(sweep).items():
        line = lines["digits, mlp, iid" + (", sign_flip by 2" if attack else ""), strategy]
        shown = line["benign_accuracy_seed_mean"]
        assert (float(shown) if shown else None) == records[-1].get("benign_accuracy")


def test_runs_of_before_there_were_attacks_are_those_without_one(sweep: Path, tmp_path: Path) -> None:
    for path in sweep.glob("*/config.yaml"):
        cfg = yaml.safe_load(path.read_text())
        if cfg["client"]["attack"] is None and cfg["strategy"]["name"] == "fedavg":
            shutil.copytree(path.parent, tmp_path / "new")
            shutil.copytree(path.parent, tmp_path / "old")
            cfg["client"] = {key: value for key, value in cfg["client"].items() if "attack" not in key}
            del cfg["task"]
            (tmp_path / "old" / "config.yaml").write_text(yaml.safe_dump({**cfg, "seed": 1}))
    runs, left_out = find_runs([tmp_path])
    (group,) = group_runs(runs, None, left_out)
    assert [(row.label, len(row.runs)) for row in group.rows] == [("fedavg", 2)]
    assert not left_out


def test_updates_are_counted_that_say_they_are_contaminated() -> None:
    results: list[tuple[int, dict[str, Scalar]]] = [
        (9, {"attacked": 1}),
        (9, {"attacked": 0}),
        (9, {}),
        (8, {"attacked": 1}),
    ]
    assert count_attacked(results) == {"attacked_updates": 2}


def test_stale_and_contaminated_answers_are_counted_side_by_side(tmp_path: Path) -> None:
    records = serial(
        tmp_path, "num_clients=6", "clients_per_round=6", "num_rounds=2", "strategy=fedavg",
        "client.attack=scaled_noise", "client.attackers=[1]", "client.stale_update=1", "evaluation.every=2",
    )  # fmt: skip
    assert [(r["stale_updates"], r["attacked_updates"]) for r in records[1:]] == [(0, 1), (6, 1)]


# ---- linear models -------------------------------------------------------------------------------------------------

LINEAR = ("experiment=clair_linear", "strategy=fedavg")


@pytest.mark.parametrize("evaluation", ["federated", "server"])
def test_fedavg_on_linear_models_is_the_mean_of_the_least_squares_fits(evaluation: str, tmp_path: Path) -> None:
    (last,) = serial(tmp_path, *LINEAR, f"evaluation={evaluation}", "seed=4")[-1:]
    problem = generate(4, 10, 1)
    mean = np.mean([problem.ols(k) for k in range(10)], axis=0)
    np.testing.assert_allclose(load_file(tmp_path / "model.safetensors")["weight"], mean, rtol=0, atol=1e-6)
    errors = np.sum((mean - problem.weights) ** 2, axis=(1, 2))
    assert last["estimation_error"] == pytest.approx(errors.mean(), rel=1e-5)
    assert last["benign_estimation_error"] == pytest.approx(errors[:9].mean(), rel=1e-5)
    assert 0 < last["benign_r2"] < 1
    assert "attacked_updates" not in last  # honest, with a row space of its own


@pytest.mark.parametrize("contaminated", [[9], [0, 4, 9]])
def test_the_oracle_of_the_study_is_told_who_is_contaminated(contaminated: list[int], tmp_path: Path) -> None:
    who = f"dataset.contaminated={contaminated}"
    last = serial(tmp_path, "experiment=clair_linear", "strategy=oracle_fedavg", who)[-1]
    problem = generate(0, 10, contaminated)
    benign = [k for k in range(10) if k not in contaminated]
    mean = np.mean([problem.ols(k) for k in benign], axis=0)
    np.testing.assert_allclose(load_file(tmp_path / "model.safetensors")["weight"], mean, rtol=0, atol=1e-6)
    errors = np.sum((mean - problem.weights[benign]) ** 2, axis=(1, 2))
    assert last["benign_estimation_error"] == pytest.approx(errors.mean(), rel=1e-5)


def test_linear_runs_are_reported(tmp_path: Path) -> None:
    for solver in ("ols", "sgd"):
        for seed in (0, 1):
            serial(tmp_path / f"{solver}{seed}", *LINEAR, f"task.solver={solver}", f"seed={seed}", "num_rounds=2")
    assert report([tmp_path]) == tmp_path / "report.md"
    text = (tmp_path / "report.md").read_text()
    assert "## linear, linear, contaminated: [9]\n" in text
    assert "| benign R² | benign worst 10 % | estimation error | benign estimation error |" in text
    assert "| fedavg task.solver=ols | 2 |" in text
    assert "Left out" not in text
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_curves_of_a_single_round_are_points_that_can_be_seen(tmp_path: Path) -> None:
    serial(tmp_path, *LINEAR)
    runs, left_out = find_runs([tmp_path])
    (group,) = group_runs(runs, None, left_out)
    error = next(axes for axes in figure_of([group]).findobj(Axes) if axes.get_title() == "Estimation error")
    benign, everybody = sorted(error.lines, key=lambda line: line.get_ydata()[0])
    for line, name in ((benign, "benign_estimation_error"), (everybody, "estimation_error")):
        assert list(line.get_ydata()) == [runs[0].result(name)]
        assert (line.get_marker(), line.get_markevery()) == ("o", 1)  # of every 10 % of nothing there would be none


def test_a_full_gradient_step_a_round_leads_to_the_pooled_least_squares_fit(tmp_path: Path) -> None:
    """FedAvg of one step each is gradient descent on the mean of the losses (FedSGD, McMahan et al. 2017)."""
    serial(tmp_path, *LINEAR, "task.solver=sgd", "client.lr=4", "client.batch_size=200", "num_rounds=15", "seed=4")
    problem = generate(4, 10, 1)
    x, y = (np.concatenate(parts) for parts in zip(*map(problem.samples, range(10)), strict=True))
    found = load_file(tmp_path / "model.safetensors")["weight"]
    np.testing.assert_allclose(found, np.linalg.lstsq(x, y, rcond=None)[0].T, rtol=0, atol=1e-5)
