"""The two-convolution network of the federated-learning literature."""

from __future__ import annotations

from torch import Tensor, nn


class CNN(nn.Module):
    """Two valid 5x5 convolutions of 64 channels, each with ReLU and 2x2 max-pooling, then 384-192-classes.

    As in CRAFT's experiments, dropout follows the two hidden linear layers: .2 after the first, .5 after
    the second.

    Parameters
    ----------
    channels, side, num_classes : int
        Images are (channels, side, side), side at least 16.
    """

    def __init__(self, *, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        pixels = ((side - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * pixels * pixels, 384),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(384, 192),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(192, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, channels, side, side) to logits (b, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
