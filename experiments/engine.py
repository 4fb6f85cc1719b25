"""Engines that run virtual clients; everything that reaches into Flower's internals is here.

`flower` is Flower's own Ray simulation. `flwr.simulation.run_simulation` is deprecated in favour of `flwr run`,
but it is the only way to run a simulation inside a process that composes its own configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


def run(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    """Run both apps on the engine `cfg["simulation"]` describes, until the ServerApp returns.

    Raises
    ------
    Exception
        Whatever the ServerApp raised.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray announces a future default at every start; choosing it now silences that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation  # reads the environment when imported

    sim = cfg["simulation"]
    with flower_log_to(Path(cfg["output_dir"]) / "flower.log"):
        run_simulation(
            server_app=server_app,
            client_app=client_app,
            num_supernodes=cfg["num_clients"],
            backend_config={
                "init_args": {
                    "num_cpus": sim["num_cpus"],
                    "object_store_memory": int(sim["object_store_mb"] * 2**20),
                    "include_dashboard": False,
                    "log_to_driver": False,
                    "logging_level": logging.ERROR,
                },
                "client_resources": {"num_cpus": sim["client_cpus"], "num_gpus": sim["client_gpus"]},
            },
        )


@contextmanager
def flower_log_to(path: Path) -> Iterator[None]:
    """Send Flower's log, with clients' tracebacks, to a file instead of the console."""
    logger = logging.getLogger("flwr")
    handlers, propagate = list(logger.handlers), logger.propagate
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    logger.handlers, logger.propagate = [file], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file.close()
