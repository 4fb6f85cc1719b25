"""`python -m experiments.fleet`: the demo of a fleet on this machine; with `keys DIR`: certificates and keys of one."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.processes import Ended

from .demo import demonstrate
from .keys import make_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python -m experiments.fleet`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fleet", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the run (4)")
    parser.add_argument(
        "--overrides", default="", metavar="WORDS",
        help="as for experiments.run, e.g. 'dataset=femnist data_dir=DIR'",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for keys, logs and results")
    commands = parser.add_subparsers(dest="command")
    keys = commands.add_parser("keys", help="make a fleet's certificates and keys, and keep those that are there")
    keys.add_argument("folder", type=Path)
    keys.add_argument("--host", action="append", default=[], help="name or IP address of the SuperLink's machine")
    keys.add_argument("--nodes", type=int, default=1, help="number of SuperNodes (1)")
    keys.add_argument("--days", type=int, default=365, help="how long the certificates hold (365)")
    options = parser.parse_args(arguments)
    if options.command == "keys":
        try:
            written = make_keys(options.folder, hosts=options.host, nodes=options.nodes, days=options.days)
        except (ValueError, OverflowError, OSError) as error:
            sys.stderr.write(f"no keys made: {error}\n")
            return 1
        sys.stdout.write(f"{options.folder}: {', '.join(written) or 'nothing new'}\n")
        return 0
    try:
        overrides = shlex.split(options.overrides)
    except ValueError as error:
        sys.stderr.write(f"--overrides {options.overrides!r} cannot be split into words: {error}.\n")
        return 2
    folder = options.keep or Path(tempfile.mkdtemp(prefix="fleet-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        sys.stderr.write(f"--keep {folder} cannot be made a folder ({error.strerror or error}); name a new one.\n")
        return 2
    if not empty:
        sys.stderr.write(f"{folder} is not empty; name a new folder.\n")
        return 2
    try:
        return demonstrate(folder.resolve(), num_rounds=options.rounds, overrides=overrides)
    except Ended as ended:
        sys.stderr.write(f"ended by {ended}; what there is lies in {folder}\n")
        return 128 + ended.number
    finally:
        if options.keep is None:
            with contextlib.suppress(OSError):  # only where nothing was written
                folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
