"""Fixtures shared by all rooms: devices present, real data where DATA_DIR names it, a quiet environment."""

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch

# With several test processes (`-n 2`) each has a core of its own.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@cache
def _starts_ray(file: str) -> bool:
    return "pytest.mark.ray" in (Path(__file__).parents[1] / file).read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start Ray come first: with several test processes they are what takes longest."""
    items.sort(key=lambda item: not _starts_ray(item.nodeid.split("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes a file stays in one, and all files that start Ray in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ray" if _starts_ray(file) else file

    config.option.loadscopereorder = False  # in the order in which they were collected
    return Together(config, log)


def devices() -> list[str]:
    """Every kind of device this machine has."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    """Each device present."""
    return request.param


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; cases that need it are skipped where it is not set."""
    value = os.environ.get("DATA_DIR")
    if not value:
        pytest.skip("DATA_DIR is not set: real data is not at hand")
    path = Path(value).resolve()
    if not path.is_dir():
        pytest.fail(f"DATA_DIR={value} is not a folder")
    return path


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Iterator[None]:
    """A test that left a log quieter than it found it would change what later ones see."""

    def settings() -> list[tuple[int, bool, bool]]:
        loggers = [logging.getLogger(name) for name in (None, "flwr", "strategies", "experiments")]
        return [(logger.level, logger.propagate, logger.disabled) for logger in loggers]

    before = settings()
    yield
    assert settings() == before
