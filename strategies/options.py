"""Checks of what a user passes to a strategy, each failing in one sentence that names the option."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch


def is_real(value: object) -> TypeGuard[float]:
    """Say whether a value is a finite real number, Python's or NumPy's, and no bool."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def is_integer(value: object) -> TypeGuard[int]:
    """Say whether a value is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Say whether a value is an integer of at least 1."""
    return is_integer(value) and value >= 1


def require(name: str, value: Any, wanted: str, ok: bool) -> None:
    """Raise ValueError unless `ok`, naming the option, its value and what is wanted."""
    if not ok:
        raise ValueError(f"{name}={value!r} must be {wanted}.")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}.")


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device solves run on; "auto" is the GPU where there is one.

    Raises
    ------
    ValueError
        If there is no such device here.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"device={device!r} is not available here; use auto, cpu, or a GPU that torch sees."
        ) from error
    return found
