"""Ditto in whole runs: personal models live through rounds and engines, and are summarised next to the global one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.app import ArrayRecord, Message
from flwr.common import FitIns, FitRes, Scalar, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from safetensors.numpy import load_file

from client_apps import make_client_app, personal
from client_apps.app import TaskClient
from client_apps.arrays import get_arrays
from client_apps.tasks import Task, build
from experiments.config import check, compose
from experiments.engine import SerialGrid, VirtualGrid, serve_on
from experiments.engine.ray_grid import RayGrid
from experiments.engine.virtual import FIRST_NODE
from experiments.evaluation import Evaluator
from experiments.server_app import make_server_app

from .cli import rounds

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLIENTS = 12
SMALL = (
    f"num_clients={CLIENTS}", "clients_per_round=6", "num_rounds=4", "evaluation=federated", "evaluation.every=2",
    "strategy=fedavg", "client.lr=0.1", "model.hidden=[16]", "tracking.progress=false", "tracking.tensorboard=false",
)  # fmt: skip
PERSONAL = {"personal_accuracy", "personal_accuracy_std", "personal_worst10", "personal_best10", "personal_loss"}


def configured(folder: Path, *overrides: str) -> dict[str, Any]:
    return compose([*SMALL, *overrides, f"output_dir={folder}"])


def serve(cfg: dict[str, Any], grid: VirtualGrid) -> list[dict[str, Any]]:
    """Run all rounds; what was recorded of each, without the times."""
    serve_on(grid, make_server_app(cfg, check(cfg)))
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in rounds(Path(cfg["output_dir"]))]


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The run in one process, with Ditto."""
    folder = tmp_path_factory.mktemp("serial")
    cfg = configured(folder, "client.ditto_lambda=0.1")
    return folder, serve(cfg, SerialGrid(make_client_app(cfg), CLIENTS))


def test_both_models_are_reported_and_the_personal_ones_fit_their_clients(serial: Any) -> None:
    evaluated = [r for r in serial[1] if "accuracy" in r]
    assert [r["round"] for r in evaluated] == [2, 4]
    assert all(r.keys() >= PERSONAL for r in evaluated)
    last = evaluated[-1]
    # One or two classes for most clients: half of them have learnt theirs.
    assert last["personal_accuracy"] > last["accuracy"] + 0.1
    assert last["personal_worst10"] <= last["personal_accuracy"] <= last["personal_best10"]


def test_the_global_model_and_its_figures_stay_the_same(serial: Any, tmp_path: Path) -> None:
    folder, with_ditto = serial
    cfg = configured(tmp_path)
    without = serve(cfg, SerialGrid(make_client_app(cfg), CLIENTS))
    assert not [key for record in without for key in record if "personal" in key]
    assert without == [{k: v for k, v in r.items() if "personal" not in k} for r in with_ditto]
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])


def test_a_ray_worker_reports_the_same(serial: Any, tmp_path: Path) -> None:
    folder, expected = serial
    cfg = configured(tmp_path, "client.ditto_lambda=0.1")
    # A worker keeps nothing of a client: its model comes back with the answer and goes along with the next message.
    with RayGrid(make_client_app(cfg), CLIENTS, init_args={"num_cpus": 1, "object_store_memory": 128 * 2**20}) as grid:
        found = serve(cfg, grid)
    assert found == expected
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What a client app sets for its clients; one made by hand, as here, has whatever there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_client_finds_its_model_in_the_next_round(tmp_path: Path) -> None:
    cfg = configured(tmp_path, "client.ditto_lambda=0.5")
    task: Task = build(cfg)
    grid, client = SerialGrid(make_client_app(cfg), CLIENTS), TaskClient(build(cfg), 3)
    for number in (1, 2, 3):
        model = ndarrays_to_parameters([a + np.float32(0.01 * number) for a in get_arrays(task.new_model())])
        ins = FitIns(model, {"server_round": number})
        message = Message(compat.fitins_to_recorddict(ins, keep_input=True), FIRST_NODE + 3, "train")
        (reply,) = grid.send_and_receive([message])
        result: FitRes = compat.recorddict_to_fitres(reply.content, keep_input=True)
        assert result.metrics == client.fit(ins).metrics
    record = grid._contexts[FIRST_NODE + 3].state[personal.KEY]
    assert isinstance(record, ArrayRecord)
    assert record == client.state[personal.KEY]


def evaluator() -> Evaluator:
    return Evaluator(build(compose(list(SMALL))), CLIENTS, lambda *_: None)


def client(cid: int, correct: int, loss_sum: float, **more: Scalar) -> dict[str, Scalar]:
    return {"partition_id": cid, "correct": correct, "loss_sum": loss_sum, **more}


def test_personal_models_are_summarised_as_the_global_one_is() -> None:
    results = [
        (4, client(0, 1, 8.0, personal_correct=4, personal_loss_sum=1.0)),
        (0, client(1, 0, 0.0, personal_correct=0, personal_loss_sum=0.0)),  # no test data: left out
        (2, client(2, 2, 2.0, personal_correct=1, personal_loss_sum=2.0)),
    ]
    found = evaluator().from_clients(results)
    assert {key: found[key] for key in PERSONAL} == {
        "personal_accuracy": 0.75,
        "personal_accuracy_std": 0.25,
        "personal_worst10": 0.5,
        "personal_best10": 1.0,
        "personal_loss": 0.5,
    }
    assert (found["accuracy"], found["worst10"], found["clients_evaluated"]) == (0.625, 0.25, 2)


def test_without_personal_models_nothing_is_said_of_them() -> None:
    found = evaluator().from_clients([(4, client(0, 1, 8.0)), (2, client(2, 2, 2.0))])
    assert found.keys() == {"accuracy", "accuracy_std", "worst10", "best10", "accuracy_weighted", "clients_evaluated"}


@pytest.mark.parametrize("strategy", ["fedavg", "craft"])
def test_the_experiment_compares_ditto_with_and_without_craft(strategy: str) -> None:
    cfg = compose(["experiment=craft_ditto", f"strategy={strategy}"])
    assert cfg["strategy"]["name"] == strategy
    assert (cfg["client"]["ditto_lambda"], cfg["evaluation"]["mode"]) == (1.0, "federated")
    assert build(cfg).num_clients == 100
    text = Path(__file__).parents[2].joinpath("conf", "experiment", "craft_ditto.yaml").read_text("utf-8")
    swept = yaml.safe_load(text)["hydra"]["sweeper"]["params"]
    assert [word.strip() for word in swept["strategy"].split(",")] == ["fedavg", "craft"]


def test_the_experiment_may_have_another_data_set_and_model() -> None:
    cfg = compose(["experiment=craft_ditto", "dataset=digits", "model=mlp", "client.ditto_lambda=null"])
    assert (cfg["dataset"]["name"], cfg["model"]["name"], build(cfg).personal) == ("digits", "mlp", False)
