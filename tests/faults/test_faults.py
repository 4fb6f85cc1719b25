"""docs/faults.md is true: every row of its table is produced here, and shows what the row quotes."""

from pathlib import Path

import pytest

from . import clients, engines, messages, server, storage  # noqa: F401
from .stage import FAULTS, Stage, shown

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
LEAST = 30


def table() -> dict[str, list[str]]:
    """The rows by their first cell."""
    rows = [line.strip().strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells if len(row) == 4 and row[0] != "fault" and set(row[0]) != {"-"}}


def test_every_row_is_produced_and_every_fault_has_its_row():
    assert set(table()) == set(FAULTS)
    assert len(FAULTS) >= LEAST


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    does, lost, reads = table()[name]
    assert does
    assert lost
    text = FAULTS[name](Stage(tmp_path))
    wanted = shown(reads)
    assert wanted, "the row quotes nothing"
    for pattern in wanted:
        assert pattern.search(text), f"{pattern.pattern!r} is not among what can be read:\n{text[-4000:]}"
