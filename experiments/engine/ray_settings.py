"""Ray's settings, made before it starts."""

from __future__ import annotations

import os


def quiet_ray() -> None:
    """Send no usage statistics; choose now what Ray otherwise announces as a future default at every start."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
