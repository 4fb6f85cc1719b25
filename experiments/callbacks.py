"""ReportAfterMultirun: the tables, the curves and the pictures at the end of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ReportAfterMultirun(Callback):
    """Writes what `experiments.report.report` writes into the sweep's folder, and prints the tables.

    Parameters
    ----------
    against : str, optional
        The strategy to hold against the others.
    points : bool
        Also show the points of a tuning sweep, and choose the best: see `experiments.tuning`.
    """

    def __init__(self, against: str | None = None, points: bool = False) -> None:
        self.against = against
        self.points = points

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Report on every run below the sweep's folder."""
        # matplotlib is slow to import, and single runs do not need it
        from .report import report
        from .tuning import choose

        folder = Path(config.hydra.sweep.dir)
        report([folder], against=self.against)
        if self.points:
            choose(folder)
