"""The table in docs/faults.md, and whether a text says what a row of it quotes."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def table() -> dict[str, list[str]]:
    """The rows by their first cell."""
    rows = [line.strip().strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells if len(row) == 4 and row[0] != "fault" and set(row[0]) != {"-"}}


def says(name: str, text: str) -> None:
    """Assert that a text says what the row of a fault quotes; an ellipsis stands for anything on the line."""
    quoted = re.findall(r"`([^`]+)`", table()[name][-1])
    assert quoted, "the row quotes nothing"
    for quote in quoted:
        pattern = ".*?".join(re.escape(part) for part in quote.split("…"))
        assert re.search(pattern, text), f"{quote!r} is not among what can be read:\n{text[-4000:]}"
