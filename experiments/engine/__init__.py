"""Engines that run virtual clients.

`flower` is Flower's own Ray simulation. `ray` is our grid on Ray: the same apps, at a fraction of the cost.
`serial` runs them one client after the other in this process, for debugging and for very small models.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from . import internals
from .ray_settings import quiet_ray
from .serial import SerialGrid
from .virtual import EngineFailed, VirtualGrid

__all__ = ["ENGINES", "EngineFailed", "SerialGrid", "VirtualGrid", "flower_log_to", "run", "serve_on"]

ENGINES = ("flower", "ray", "serial")


def run(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    """Run both apps on the engine `cfg["simulation"]` describes, until the ServerApp returns.

    Raises
    ------
    Exception
        Whatever the ServerApp raised.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    engine = {"flower": _run_flower, "ray": _run_ray, "serial": _run_serial}[cfg["simulation"]["engine"]]
    with flower_log_to(Path(cfg["output_dir"]) / "flower.log"):
        engine(cfg, server_app, client_app)


def _run_flower(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    # Deprecated in favour of `flwr run`, but the only way to simulate inside a process that composes its own
    # configuration.
    from flwr.simulation import run_simulation

    quiet_ray()
    _announce(cfg)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=cfg["num_clients"],
        backend_config={"init_args": _init_args(cfg), "client_resources": {**_client_resources(cfg)}},
    )


def _run_ray(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    from .ray_grid import RayGrid

    _announce(cfg)
    # Hundreds of thousands of objects of loaded libraries will stay: the collector need not look through them again
    # each time a round has made some thousand messages.
    gc.collect()
    gc.freeze()
    try:
        with RayGrid(
            client_app, cfg["num_clients"], client_resources=_client_resources(cfg), init_args=_init_args(cfg)
        ) as grid:
            serve_on(grid, server_app)
    finally:
        gc.unfreeze()


def _run_serial(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    serve_on(SerialGrid(client_app, cfg["num_clients"]), server_app)


def serve_on(grid: VirtualGrid, server_app: ServerApp, run_config: Mapping[str, Any] | None = None) -> None:
    """Run a ServerApp on one of our grids until it returns."""
    context = Context(
        run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=dict(run_config or {})
    )
    with internals.whole_rounds(grid):
        server_app(grid, context)


def _init_args(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ray.init`: an existing cluster has its own sizes."""
    sim = cfg["simulation"]
    args = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if sim["address"]:
        return {**args, "address": sim["address"]}
    # "local": not the cluster that somebody else may have started on this machine.
    return {
        **args,
        "address": "local",
        "num_cpus": sim["num_cpus"],
        "object_store_memory": int(sim["object_store_mb"] * 2**20),
    }


def _client_resources(cfg: Mapping[str, Any]) -> dict[str, float]:
    return {"num_cpus": cfg["simulation"]["client_cpus"], "num_gpus": cfg["simulation"]["client_gpus"]}


def _announce(cfg: Mapping[str, Any]) -> None:
    if cfg["tracking"]["progress"]:
        sim = cfg["simulation"]
        where = f"the cluster at {sim['address']}" if sim["address"] else f"{sim['num_cpus']} CPUs"
        wait = "half a minute" if sim["engine"] == "flower" else "some seconds"
        rich.get_console().print(f"Starting Ray on {where}; until round 1 this takes {wait}.")


@contextmanager
def flower_log_to(path: Path) -> Iterator[None]:
    """Send Flower's log, with clients' tracebacks, to a file instead of the console."""
    logger = logging.getLogger("flwr")
    handlers, propagate = list(logger.handlers), logger.propagate
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, delay=True, errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    logger.handlers, logger.propagate = [file], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file.close()
