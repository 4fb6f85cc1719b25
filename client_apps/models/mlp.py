"""Multilayer perceptron on flattened images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from client_apps.config import integer
from client_apps.errors import ConfigError


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Parameters
    ----------
    channels, side, num_classes : int
        Images are (channels, side, side).
    hidden : Sequence[int]
        Widths of the hidden layers; CRAFT's experiments use 200-200.
    """

    def __init__(self, *, channels: int, side: int, num_classes: int, hidden: Sequence[int] = (200, 200)) -> None:
        super().__init__()
        if not isinstance(hidden, list | tuple):
            raise ConfigError(f"model.hidden must be a list of widths, not {hidden!r}.")
        for width in hidden:
            integer("model.hidden", width, 1)
        widths = [channels * side * side, *hidden, num_classes]
        linear = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        rectified = [module for layer in linear[:-1] for module in (layer, nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *rectified, linear[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, channels, side, side) to logits (b, num_classes)."""
        logits: Tensor = self.layers(images)
        return logits
