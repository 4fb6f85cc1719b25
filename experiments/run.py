"""`python -m experiments.run`: one run from a composed configuration, or a sweep of them with `-m`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from client_apps import make_client_app
from client_apps.errors import ConfigError
from strategies import NotEnoughClients, RoundsFailed

from . import engine
from .config import check, message_of, to_dict
from .server_app import make_server_app

logger = logging.getLogger(__name__)

# What a person can mend gets a sentence; anything else is a defect and keeps its traceback.
_EXPECTED = (ConfigError, NotEnoughClients, RoundsFailed, FileExistsError)
_failed_jobs: list[str] = []


def run(cfg: Mapping[str, Any]) -> None:
    """Check a composed configuration and run it; results go to `cfg["output_dir"]`.

    Raises
    ------
    ConfigError
        Before any client starts, if the configuration cannot run.
    NotEnoughClients, RoundsFailed
        If the run cannot go on.
    """
    task = check(cfg)
    engine.run(cfg, make_server_app(cfg, task), make_client_app(cfg))


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _job(cfg: DictConfig) -> None:
    try:
        run(to_dict(cfg))
    except _EXPECTED as error:
        logger.error("%s: %s", type(error).__name__, message_of(error))
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise SystemExit(1) from None
        _failed_jobs.append(" ".join(HydraConfig.get().overrides.task))  # the other cells go on


def main() -> None:
    """Run the command line; the exit status is 1 if a run failed."""
    _job()
    if _failed_jobs:
        sys.exit(f"{len(_failed_jobs)} of the sweep's runs failed: {'; '.join(_failed_jobs)}")


if __name__ == "__main__":
    main()
