"""`python -m experiments.run`: one run from a composed configuration, or a sweep of them with `-m`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import hydra
import rich
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from client_apps import make_client_app
from client_apps.errors import ConfigError
from strategies import NotEnoughClients, RoundsFailed

from . import engine
from .checkpoint import AUTO, NothingToDo
from .config import check, message_of, to_dict
from .resume import claimed
from .server_app import make_server_app

logger = logging.getLogger(__name__)

# What a person can mend gets a sentence; anything else is a defect and keeps its traceback.
_EXPECTED = (
    ConfigError,
    engine.EngineFailed,
    NotEnoughClients,
    RoundsFailed,
    OSError,
    HydraException,
    OmegaConfBaseException,
)
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
    try:
        server_app = make_server_app(cfg, task)
    except NothingToDo as found:
        rich.get_console().print(str(found), markup=False, highlight=False, soft_wrap=True)
        return
    engine.run(cfg, server_app, make_client_app(cfg))


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _job(cfg: DictConfig) -> None:
    job = HydraConfig.get()
    if job.mode is not RunMode.MULTIRUN:
        _resume(to_dict(cfg, job.overrides.task))
        return
    try:
        if any(o.startswith("output_dir=") for o in job.overrides.task):
            raise ConfigError("output_dir names the folder of one run; in a sweep set hydra.sweep.dir.")
        _resume({**to_dict(cfg, job.overrides.task), "output_dir": job.runtime.output_dir})
    except Exception as error:  # noqa: BLE001  one cell of a sweep must not take the others with it
        _tell(error)
        _failed_jobs.append(" ".join(job.overrides.task))


def _resume(cfg: Mapping[str, Any]) -> None:
    """Run a configuration, unless `skip_finished` is on and its folder says that there is nothing to do."""
    if cfg.get("skip_finished") is not True:
        run(cfg)
        return
    with claimed(cfg) as reason:
        if reason is None:
            run({**cfg, "resume": cfg.get("resume") or AUTO})
        else:
            line = f"Skipped {cfg['output_dir']}: {reason}"
            rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _tell(error: Exception) -> None:
    sentence = f"{type(error).__name__}: {message_of(error)}"
    logger.error(sentence, exc_info=None if isinstance(error, _EXPECTED) else error)


def main() -> None:
    """Run the command line; the exit status is 1 if a run failed."""
    # Hydra would print the traceback of every error and end the process; this way errors come back here.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _job()
    except _EXPECTED as error:
        sys.exit(f"{type(error).__name__}: {message_of(error)}")
    except ValueError as error:  # Hydra's, for a group without a choice
        if "override" not in str(error):
            raise
        sys.exit(
            f"ConfigError: a config group was set to null; name one of its options, as in strategy=craft ({error})"
        )
    if _failed_jobs:
        sys.exit(f"{len(_failed_jobs)} of the sweep's runs failed: {'; '.join(_failed_jobs)}")


if __name__ == "__main__":
    main()
