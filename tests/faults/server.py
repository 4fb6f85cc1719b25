"""Faults on the server's side: a configuration that cannot run, clients that are not there, a folder in use."""

from __future__ import annotations

import csv
import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server.client_manager import SimpleClientManager

from client_apps.app import make_client_app
from client_apps.errors import ConfigError
from experiments import server_app
from experiments.config import check
from experiments.engine import SerialGrid, serve_on
from experiments.report import main
from strategies import CRAFT, NotEnoughClients
from strategies.testing import Proxy

from ..experiments.cli import command, rounds
from .stage import Stage, fault


def refused(stage: Stage, *overrides: str) -> str:
    """Compose and check a configuration that cannot run; nothing may have begun."""
    with pytest.raises(ConfigError) as found:
        check(stage.config(*overrides))
    assert not (stage.folder / "run").exists()
    return f"ConfigError: {found.value}"


@fault("a key of the configuration is misspelt")
def misspelt(stage: Stage) -> str:
    return refused(stage, "num_round=3")


@fault("values that exclude each other")
def exclude(stage: Stage) -> str:
    return refused(stage, "clients_per_round=7")


@fault("a model that the data set does not fit")
def unfit(stage: Stage) -> str:
    return refused(stage, "model=resnet20")


@fault("the data is not there")
def no_data(stage: Stage) -> str:
    return refused(stage, "dataset=cifar10", f"data_dir={stage.folder / 'nowhere'}")


@fault("`output_dir` holds an earlier run")
def in_use(stage: Stage) -> str:
    run = stage.run("num_rounds=1")
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != "flower.log"}
    with pytest.raises(FileExistsError) as found:
        stage.run("num_rounds=1")
    assert {path: path.read_bytes() for path in before} == before
    return f"FileExistsError: {found.value}"


@fault("a federation of another size than the configuration's")
def other_size(stage: Stage) -> str:
    cfg = stage.config()
    app = server_app.make_server_app(cfg, check(cfg))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "_JOIN_SECONDS", 0.1)
        with pytest.raises(ConfigError) as found:
            serve_on(SerialGrid(make_client_app(cfg), 5), app)
    return f"ConfigError: {found.value}"


@fault("clients do not come")
def nobody(stage: Stage) -> str:
    manager = SimpleClientManager()
    manager.register(Proxy("7"))
    strategy = CRAFT(min_available_clients=3, min_fit_clients=3, wait_timeout=0.3)
    with pytest.raises(NotEnoughClients) as found:
        strategy.configure_fit(1, ndarrays_to_parameters([np.zeros(3, np.float32)]), manager)
    return f"NotEnoughClients: {found.value}"


@fault("a start model that holds NaN")
def bad_start(stage: Stage) -> str:
    manager = SimpleClientManager()
    manager.register(Proxy("7"))
    strategy = CRAFT(min_available_clients=1, min_fit_clients=1)
    with pytest.raises(ValueError, match="global model") as found:
        strategy.configure_fit(1, ndarrays_to_parameters([np.full(3, np.nan, np.float32)]), manager)
    return f"ValueError: {found.value}"


@fault("no client app can be made")
def no_clients(stage: Stage) -> str:
    """A `ClientApp` whose clients all raise, as one that lacks a package would."""
    cfg = stage.config("strategy.max_failed_rounds=2")

    def client_fn(context):  # type: ignore[no-untyped-def]
        raise ImportError("No module named 'monai'")

    with stage.listening(), pytest.raises(Exception, match="rounds in a row failed") as found:
        serve_on(SerialGrid(ClientApp(client_fn=client_fn), 6), server_app.make_server_app(cfg, check(cfg)))
    assert (stage.folder / "run" / "model.safetensors").exists()
    return f"{stage.log}\n{type(found.value).__name__}: {found.value}"


@fault("one run of a sweep fails")
def sweep(stage: Stage) -> str:
    found = command(
        sys.executable, "-m", "experiments.run", "-m", "simulation=serial", "num_clients=4", "clients_per_round=2",
        "num_rounds=1", "seed=0,1", "strategy.server_lr=1,-1", "tracking.progress=false", "tracking.tensorboard=false",
        f"hydra.sweep.dir={stage.folder}",
    )  # fmt: skip
    assert found.returncode == 1
    done = sorted(path.parent.name for path in stage.folder.glob("*/status.json"))
    assert len(done) == 2
    assert all(len(rounds(stage.folder / name)) == 2 for name in done)
    assert (stage.folder / "report.md").exists()
    return found.stdout


@fault("a run's records are damaged")
def damaged(stage: Stage) -> str:
    for name in ("good", "bad"):
        Stage(stage.folder / name).run("num_rounds=1")
    records = stage.folder / "bad" / "run" / "metrics.jsonl"
    records.write_text(records.read_text()[:-40])
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown), stage.listening():
        main([str(stage.folder)])
    with (stage.folder / "report.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 2  # a head, and the good one
    return shown.getvalue() + stage.log
