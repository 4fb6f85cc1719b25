"""ReportAfterMultirun: the table and the curves at the end of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ReportAfterMultirun(Callback):
    """Writes report.md, report.csv and curves.png into the sweep's folder and prints the table."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Report on every run below the sweep's folder."""
        from .report import report  # matplotlib is slow to import, and single runs do not need it

        report([Path(config.hydra.sweep.dir)])
