"""docs/adding-a-strategy.md is true: its files, as they stand there, pass the checks and run from the command line."""

import re
import sys
from pathlib import Path

import pytest

import strategies
from strategies.testing import CHECKS

from .experiments.cli import command, rounds

PAGE = (Path(__file__).parents[1] / "docs" / "adding-a-strategy.md").read_text()
SMALL = ("num_clients=8", "clients_per_round=4", "tracking.progress=false", "output_dir=out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder outside the repository with the page's files: each block of code that a file's name stands before."""
    base = tmp_path_factory.mktemp("docs")
    files = re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for name, text in files:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    assert [name for name, _ in files] == ["fedexp.py", "configs/strategy/fedexp.yaml", "test_fedexp.py"]
    return base


def shown(start: str) -> list[str]:
    """The words of the first command on the page that starts so, after `python`."""
    (line, *_) = re.findall(rf"^python ({re.escape(start)}.*)$", PAGE, re.MULTILINE)
    return line.split()


def test_the_examples_tests_pass(folder):
    done = command(sys.executable, *shown("-m pytest"), "-q", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 0, done.stdout
    assert f"{len(CHECKS) + 1} passed" in done.stdout


def test_the_example_runs_from_the_command_line(folder):
    done = command(sys.executable, *shown("-m experiments.run"), *SMALL, cwd=folder)
    assert done.returncode == 0, done.stdout
    records = rounds(folder / "out")
    assert [r["round"] for r in records] == [0, 1, 2]
    for r in records[1:]:
        assert r["failed_round"] is False
        assert r["extrapolation"] >= 1


def test_the_example_is_no_strategy_of_the_suite():
    assert not hasattr(strategies, "FedExP")


def test_every_hook_the_page_names_exists():
    table = PAGE.split("| hook |")[1].split("Inside,")[0]
    named = set(re.findall(r"^\| `(?:\w+\.)?(\w+)|^\| `\w+`, `(\w+)", table, re.MULTILINE))
    hooks = {name for pair in named for name in pair if name}
    assert {"coefficients", "solve_layer", "solve", "conclude", "requires", "check_state", "evaluated"} <= hooks
    assert all(hasattr(strategies.SpanStrategy, name) for name in hooks)
    given = set(re.findall(r"`updates\.(\w+)\(", PAGE))
    assert {"gram", "combine", "measure", "blocks"} <= given
    assert all(hasattr(strategies.ClientUpdates, name) for name in given)
