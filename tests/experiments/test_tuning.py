"""Tuning by a headline metric other than accuracy."""

import yaml
from rich.console import Console

from experiments.tuning import choose

from .test_report import named, segmentation, write_run


def test_points_of_segmentation_are_chosen_by_dice(tmp_path):
    for point, dice in ((0, 0.5), (1, 0.75)):
        settings = segmentation(100, strategy=named("craft", server_lr=1.0 + point), benchmark_name="fets")
        write_run(tmp_path / f"craft/point{point}_seed100", [None] * 4, settings, dice=[0.0, 0.9, 0.9, dice])
    choose(tmp_path, Console(quiet=True))
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {
        "fets": {"craft": {"point": 1, "dice": 0.75, "settings": {"strategy.server_lr": 2.0}}}
    }
    text = (tmp_path / "points.md").read_text()
    assert "| craft | 50.0 | **75.0** | strategy.server_lr=2.0 |" in text
    assert "Mean Dice of WT, TC, ET in % at the last evaluation, per point" in text
