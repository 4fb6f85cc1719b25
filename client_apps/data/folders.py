"""Looking into folders: what cannot be looked at is told in one sentence."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client_apps.errors import ConfigError


def is_dir(path: Path) -> bool:
    """Tell whether a path leads to a folder.

    Raises
    ------
    ConfigError
        That cannot be told: a folder above it is closed to this user, or its name is too long.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Tell whether a path leads to a file.

    Raises
    ------
    ConfigError
        As `is_dir`.
    """
    return stat.S_ISREG(_mode(path))


def listing(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders in a folder, links to folders among them, and of all else.

    Raises
    ------
    ConfigError
        The folder cannot be read.
    """
    with _reachable(folder), os.scandir(folder) as entries:
        folders = {entry.name: entry.is_dir() for entry in entries}
    names = sorted(folders)
    return [name for name in names if folders[name]], [name for name in names if not folders[name]]


def _mode(path: Path) -> int:
    """Return the kind and permissions of what lies there, 0 for nothing."""
    with _reachable(path):
        try:
            return path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


@contextmanager
def _reachable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason}); let this user read it, or correct the name.") from error
