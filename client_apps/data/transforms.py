"""Pixels to network input: normalisation, and the random crop and flip of the CIFAR protocol."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalise:
    """Scale bytes to [0, 1], subtract the channel means and divide by the channel deviations.

    Parameters
    ----------
    mean, std : Sequence[float]
        Of each channel, for pixels in [0, 1].
    device : torch.device
        Where the images will be.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        deviation = torch.tensor(std, device=device).view(1, -1, 1, 1)
        self._scale = 1 / (255 * deviation)
        self._shift = -torch.tensor(mean, device=device).view(1, -1, 1, 1) / deviation

    def __call__(self, images: Tensor) -> Tensor:
        """Turn uint8 images of shape (b, c, h, w) into float32 ones."""
        return images.float().mul_(self._scale).add_(self._shift)


def random_crop_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Cut a window of the original size out of each zero-padded image, mirroring half of them.

    Parameters
    ----------
    images : Tensor, shape (b, c, h, w)
        Any dtype, on any device.
    generator : torch.Generator
        A CPU generator, so that a seed gives the same windows on every device. Every image draws its own
        offset and side.
    padding : int
        Pixels added on every side before cutting.

    Returns
    -------
    Tensor, shape (b, c, h, w)
        Same dtype and device.
    """
    count, channels, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows, columns = rows.to(images.device), columns.to(images.device)
    padded = F.pad(images, (padding,) * 4)
    sample = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
