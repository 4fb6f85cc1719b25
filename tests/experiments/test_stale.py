"""Stale answers in whole runs: the same bits on every engine, counted in each round, and their effect on FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import FitIns, FitRes, Scalar
from safetensors.numpy import load_file

from client_apps import make_client_app, stale
from client_apps.app import TaskClient
from experiments.config import check, compose
from experiments.engine import SerialGrid, VirtualGrid, serve_on
from experiments.engine.ray_grid import RayGrid
from experiments.server_app import count_stale, make_server_app

from .cli import rounds, run

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLIENTS = 12
SMALL = (
    f"num_clients={CLIENTS}", "clients_per_round=6", "num_rounds=5", "evaluation.every=5", "strategy=fedavg",
    "client.lr=0.1", "model.hidden=[16]", "tracking.progress=false", "tracking.tensorboard=false",
)  # fmt: skip
SOMETIMES = "client.stale_update=0.5"


def configured(folder: Path, *overrides: str) -> dict[str, Any]:
    return compose([*SMALL, *overrides, f"output_dir={folder}"])


def serve(cfg: dict[str, Any], grid: VirtualGrid) -> list[dict[str, Any]]:
    """Run all rounds; what was recorded of each."""
    serve_on(grid, make_server_app(cfg, check(cfg)))
    return recorded(Path(cfg["output_dir"]))


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The records of the rounds, without the times."""
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in rounds(folder)]


def serial(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    cfg = configured(folder, *overrides)
    return serve(cfg, SerialGrid(make_client_app(cfg), CLIENTS))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The run in one process, one client after the other, with Ditto, too."""
    folder = tmp_path_factory.mktemp("serial")
    return folder, serial(folder, SOMETIMES, "client.ditto_lambda=0.5", "evaluation=federated")


@pytest.mark.parametrize("vectorize", ["auto", "false"])
def test_ray_gives_the_same_bits_in_groups_and_alone(reference: Any, vectorize: str, tmp_path: Path) -> None:
    folder, expected = reference
    overrides = [SOMETIMES, "client.ditto_lambda=0.5", "evaluation=federated", f"client.vectorize={vectorize}"]
    if vectorize == "false":  # other bits than a stack's, so that they have a run of their own to be compared with
        folder = tmp_path / "serial"
        expected = serial(folder, *overrides)
    cfg = configured(tmp_path / "ray", *overrides)
    with RayGrid(make_client_app(cfg), CLIENTS, init_args={"num_cpus": 1, "object_store_memory": 128 * 2**20}) as grid:
        assert serve(cfg, grid) == expected
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "ray" / "model.safetensors").read_bytes()


def test_flowers_engine_gives_the_same_bits(reference: Any, tmp_path: Path) -> None:
    folder, expected = reference
    found = run(
        *SMALL, SOMETIMES, "client.ditto_lambda=0.5", "evaluation=federated", "simulation=flower",
        "simulation.num_cpus=1", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    assert recorded(tmp_path) == expected
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_round_counts_its_stale_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configured(tmp_path, SOMETIMES)
    asked: list[tuple[int, int]] = []
    fit = TaskClient.fit

    def noted(self: TaskClient, ins: FitIns) -> FitRes:
        asked.append((int(ins.config["server_round"]), self.cid))
        return fit(self, ins)

    monkeypatch.setattr(TaskClient, "fit", noted)
    records = serve(cfg, SerialGrid(make_client_app(cfg), CLIENTS))[1:]
    expected = [0] * 5
    for number, cid in asked:
        earlier = any(other == cid and before < number for before, other in asked)
        expected[number - 1] += earlier and stale.drawn(0.5, 0, cid, number)
    assert [r["stale_updates"] for r in records] == expected
    assert expected[0] == 0
    assert 0 < sum(expected) < 24


def test_where_all_are_always_stale_fedavg_goes_back_and_forth(tmp_path: Path) -> None:
    everybody, always = ("clients_per_round=12",), "client.stale_update=1"
    models = {}
    for name, overrides in {
        "start": ("num_rounds=1", "client.lr=1e-30"),
        "one": ("num_rounds=1", always),
        "two": ("num_rounds=2", always),
        "five": ("num_rounds=5", always),
    }.items():
        records = serial(tmp_path / name, *everybody, *overrides)
        models[name] = load_file(tmp_path / name / "model.safetensors")
        assert [r.get("stale_updates") for r in records[1:]] == [None if name == "start" else 0, 12, 12, 12, 12][
            : len(records) - 1
        ]
    # θ1 is trained. After that all send θ0 in round 2, θ1 in round 3, which they received then, θ0 in round 4, ...
    for name, same in (("two", "start"), ("five", "one")):
        for key, tensor in models[name].items():
            np.testing.assert_allclose(tensor, models[same][key], rtol=0, atol=1e-6)
    assert any(not np.allclose(models["one"][key], models["start"][key], atol=1e-3) for key in models["one"])


def test_without_it_a_round_says_nothing_of_it(tmp_path: Path) -> None:
    assert not [key for record in serial(tmp_path, "num_rounds=1") for key in record if "stale" in key]


def test_answers_are_counted_that_say_they_are_stale() -> None:
    results: list[tuple[int, dict[str, Scalar]]] = [(10, {"stale": 1}), (9, {"stale": 0}), (8, {"stale": 1}), (7, {})]
    assert count_stale(results) == {"stale_updates": 2}
    assert count_stale([]) == {"stale_updates": 0}
