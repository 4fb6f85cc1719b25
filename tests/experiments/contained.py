"""`python -m tests.experiments.contained COMMAND...`: runs it, tells what it leaves behind, and ends that."""

import contextlib
import sys
import time
from pathlib import Path

from experiments.processes import ProcessTree

LEFT = 99
SECONDS = 60


def main() -> int:
    with ProcessTree() as tree:
        status = tree.start(sys.argv[1:]).wait()
        limit = time.monotonic() + SECONDS
        while (left := tree.alive()) and time.monotonic() < limit:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                sys.stdout.write(f"left behind: {words}\n")
                sys.stdout.flush()
    return status or (LEFT if left else 0)


if __name__ == "__main__":
    sys.exit(main())
