"""Headline: the one metric that a run is judged by, read from its records, and how reports speak of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Headline:
    """A metric in [0, 1], higher is better, that is measured per client.

    Attributes
    ----------
    name : str
        In a run's records; `Task.metric`.
    title : str
        In titles of columns and panels.
    meaning : str
        What its values in per cent are, at the start of a caption.
    client : str
        What a client is called.
    """

    name: str
    title: str
    meaning: str
    client: str

    @property
    def personal(self) -> str:
        """Name of the same metric of the clients' personal models."""
        return f"personal_{self.name}"

    @property
    def benign(self) -> str:
        """Name of the same metric over clients that are not contaminated."""
        return f"benign_{self.name}"

    @property
    def benign_personal(self) -> str:
        """Name of the same metric of those clients' personal models."""
        return f"benign_{self.personal}"

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all that a report shows of a run's last evaluation."""
        spread = (self.name, f"{self.name}_std", "worst10", "best10")
        personal = (self.personal, f"{self.personal}_std", "personal_worst10", "personal_best10")
        benign = (self.benign, "benign_worst10", self.benign_personal)
        return (*spread, *benign, *ESTIMATION, "macro_f1", *personal, *STABILITY, *CLASSES)


STABILITY = (
    "forgetting", "updatable", "zeta", "share_fell", "total_variation", "udp_loss", "udp_norm", "straightness",
)  # fmt: skip
"""What `experiments.stability.Stability` says of a run as a whole."""

ESTIMATION = ("estimation_error", "benign_estimation_error")
"""What regression reports where the truth is known, a mean over clients."""

CLASSES = ("dice_wt", "dice_tc", "dice_et", "hd95_wt", "hd95_tc", "hd95_et", "hd95")
"""What segmentation reports per class, over all subjects; HD95 in mm."""

HEADLINES = (
    Headline("accuracy", "accuracy", "Test accuracy in %", "client"),
    Headline("dice", "Dice", "Mean Dice of WT, TC, ET in %", "institution"),
    Headline("r2", "R²", "R² in %", "client"),
)
"""Every metric that a report can be about, the first one first where a run has several."""


def headline_of(rounds: Iterable[Mapping[str, Any]]) -> Headline | None:
    """Return the headline that a run's records report, or None."""
    reported = {name for row in rounds for name, value in row.items() if value is not None}
    return next((headline for headline in HEADLINES if headline.name in reported), None)
