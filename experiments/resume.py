"""Typing a sweep's command again: what has finished is kept, what was cut short goes on or is begun anew.

With ``skip_finished`` a run's folder decides what becomes of it:

===========================================  =======================================================================
no run in it                                 the run starts
another process is at work in it             skipped
a finished run of the same configuration     skipped
a finished run of another configuration      refused; nothing is touched
ended by RoundsFailed, same configuration    skipped: it would fail again
failed otherwise, or killed, and has a       it goes on from there
checkpoint of the same configuration
failed otherwise, or killed                  the folder is renamed to ``NAME.aside1`` (2, ...), and the run starts
===========================================  =======================================================================

In the same configuration ``num_rounds`` may be larger, for a run that goes on (`experiments.checkpoint`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from client_apps.errors import ConfigError

from .runs import UNREADABLE, find_runs, is_aside

logger = logging.getLogger(__name__)

# What does not change the results, or says where they lie. `device` is one wherever it stands.
_IGNORED = {"data_dir", "simulation", "tracking", "output_dir", "skip_finished", "resume", "checkpoint"}


@contextmanager
def claimed(cfg: Mapping[str, Any]) -> Iterator[str | None]:
    """Claim the run's folder, `cfg["output_dir"]`, for this process while the context lasts.

    Yields
    ------
    str or None
        Why there is nothing to run; None if the run is to start with `resume=auto`: its folder is free of other runs,
        or holds a checkpoint to go on from.

    Raises
    ------
    ConfigError
        If the folder holds a finished run of another configuration.
    """
    import fcntl  # POSIX only, and only needed here

    folder = Path(cfg["output_dir"]).resolve()
    if is_aside(folder.name):
        raise ConfigError(f"{folder} has the name of a run moved aside; choose another output_dir.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, as that may be renamed, and left there: what is locked must not be replaced.
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield "another process is at work on it"
            return
        yield settle(folder, cfg)


def settle(folder: Path, cfg: Mapping[str, Any], *, retry: bool = False) -> str | None:
    """Return why there is nothing to run in a run's folder, or None, a run cut short then being moved aside.

    One that can go on from a checkpoint stays where it is.

    Parameters
    ----------
    folder : Path
        Absolute.
    cfg : mapping
        The configuration that is to run there.
    retry : bool
        Whether a run that ended by RoundsFailed is to be tried again.

    Raises
    ------
    ConfigError
        If the folder holds a finished run of another configuration.
    """
    from .checkpoint import resumable  # it is built on this file

    if not (folder / "metrics.jsonl").exists():
        return None
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        there = comparable(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))
        finished = status["status"] == "finished" and status["rounds"] >= there["num_rounds"]
        diverged = str(status["error"]).startswith("RoundsFailed")
    except UNREADABLE:
        if not resumable(folder, cfg):
            _move_aside(folder, "was killed, or is damaged")
        return None
    here = comparable(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(dict(cfg))))))
    # A key that only one of them has counts as null, as it does in reports.
    differing = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if finished and differing:
        key = differing[0]
        raise ConfigError(
            f"{folder} holds a finished run with {key}={there.get(key)}, not {here.get(key)}; move it away, or choose "
            "another folder (hydra.sweep.dir in a sweep)."
        )
    if finished and find_runs([folder])[0]:
        return "it has finished"
    if diverged and not differing and not retry:
        return f"it failed before and would again ({status['error']})"
    if not finished and resumable(folder, cfg):
        return None
    reason = "its records are damaged" if finished else f"stopped after round {status['rounds']}"
    _move_aside(folder, status["error"] or reason)
    return None


def is_finished(folder: Path, num_rounds: int) -> bool:
    """Say whether a run's folder says that it has finished so many rounds."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        return bool(status["status"] == "finished" and status["rounds"] >= num_rounds)
    except UNREADABLE:
        return False


def comparable(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` of what makes a run what it is."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if prefix or key not in _IGNORED:
                flat |= comparable(value, f"{prefix}{key}.")
        elif key != "device" and (prefix or key not in _IGNORED):
            flat[prefix + key] = value
    return flat


def _move_aside(folder: Path, reason: str) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside{number}")).exists():
        number += 1
    folder.rename(aside)
    folder.mkdir()
    # Logs that are open already went along: closed, they go on in the new folder.
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and folder in Path(handler.baseFilename).resolve().parents:
            handler.close()
    logger.warning("The run in %s (%s) was moved to %s and begins anew.", folder, reason, aside.name)
