"""The vote of a run in its report: the picture of pairs, and the comparison over benign clients."""

import json

import matplotlib.image
import numpy as np
import pytest

from experiments.pairs import last_vote
from experiments.report import report
from experiments.runs import find_runs, group_runs

from .test_report import config, craft, quiet, rows, write_run

TABLE = [[0, 0.1, 3], [0.1, 0, 2], [3, 2, 0]]
MARGINS = {"partition 0": 0.0, "partition 1": 0.0, "partition 2": -0.5}


def voted(folder, table=None, margins=None, **changes):
    votes = {
        "pair_distances": [None, None, None, json.dumps(TABLE if table is None else table)],
        "vote_margins": [None, None, None, json.dumps(MARGINS if margins is None else margins)],
    }
    write_run(folder, [0.1, 0.2, 0.3, 0.4], config(strategy=craft(), **changes), **votes)


def vote_of(folder):
    left_out = []
    return last_vote(group_runs(find_runs([folder])[0], None, []), left_out), left_out


def test_the_last_vote_is_read_with_its_members(tmp_path):
    voted(tmp_path / "a")
    vote, left_out = vote_of(tmp_path)
    np.testing.assert_array_equal(vote.distances, TABLE)
    assert vote.members.tolist() == [True, True, False]
    assert vote.labels == ["0", "1", "2"]
    assert not left_out


def test_a_report_shows_it(tmp_path):
    voted(tmp_path / "a")
    path = report([tmp_path], console=quiet())
    assert "](pairs.png)" in path.read_text()
    assert matplotlib.image.imread(tmp_path / "pairs.png").std() > 0.05


def test_a_report_without_a_vote_has_no_picture_of_one(tmp_path):
    write_run(tmp_path / "a", [0.1, 0.2, 0.3, 0.4], config())
    assert "pairs.png" not in report([tmp_path], console=quiet()).read_text()
    assert not (tmp_path / "pairs.png").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"table": [[0, 1], [1, 0]]},
        {"table": [["a"] * 3] * 3},
        {"table": [[float("nan")] * 3] * 3},
        {"margins": [0, 1, 2]},
        {"margins": {"a": "b", "c": 1, "d": 2}},
        {"table": {}},
    ],
)
def test_a_vote_that_cannot_be_read_is_named_and_the_report_goes_on(tmp_path, changes):
    voted(tmp_path / "a", **changes)
    vote, left_out = vote_of(tmp_path)
    assert vote is None
    assert len(left_out) == 1
    assert str(tmp_path / "a") in left_out[0]
    assert "the vote of" in report([tmp_path], console=quiet()).read_text()


def test_strategies_are_compared_and_sorted_by_benign_clients_where_all_have_them(tmp_path):
    for seed in (0, 1):
        benign = [None, None, None, 0.6 + seed / 100]
        write_run(tmp_path / f"a{seed}", [0.1, 0.2, 0.3, 0.4], config(seed, strategy=craft()), benign_accuracy=benign)
        benign = [None, None, None, 0.5]
        write_run(tmp_path / f"b{seed}", [0.1, 0.2, 0.3, 0.5], config(seed), benign_accuracy=benign)
    report([tmp_path], against="CRAFT", console=quiet())
    table = rows(tmp_path)
    assert list(table) == ["CRAFT", "FedAvg"]
    assert float(table["FedAvg"]["gain"]) == pytest.approx(0.605 / 0.5 - 1)
