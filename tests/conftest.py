"""Fixtures shared by all rooms: devices present, real data where DATA_DIR names it, a quiet environment."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch

torch.set_num_threads(2)


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
