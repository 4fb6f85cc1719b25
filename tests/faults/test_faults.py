"""docs/faults.md is true: every row of its table is produced, here or beside, and shows what the row quotes."""

from pathlib import Path

import pytest

from . import clients, engines, messages, server, storage  # noqa: F401
from .stage import FAULTS, Stage
from .table import says, table

# Ray leaves the files of the processes it starts to the garbage collector.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TESTS = Path(__file__).parents[1]
LEAST = 30
# Those that take processes which other tests start anyway: they ask `says` of their row themselves.
ELSEWHERE = {
    "a SuperNode is killed in a round, and started again": "experiments/test_fleet.py",
    "a SuperNode without a registered key asks for work": "experiments/test_fleet.py",
    "the run of `experiments.submit` fails": "experiments/test_submit.py",
    "`experiments.submit` is told to end": "experiments/test_submit.py",
    "the SuperLink is out of reach": "experiments/test_submit.py",
    "`kill -9` of a run, and the same command again": "experiments/test_checkpoint.py",
}


def test_every_row_is_produced_and_every_fault_has_its_row():
    assert not set(FAULTS) & set(ELSEWHERE)
    assert set(table()) == set(FAULTS) | set(ELSEWHERE)
    assert len(FAULTS) >= LEAST
    for name, path in ELSEWHERE.items():
        assert f'says("{name}", ' in (TESTS / path).read_text(), name


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    does, lost, _ = table()[name]
    assert does
    assert lost
    says(name, FAULTS[name](Stage(tmp_path)))
