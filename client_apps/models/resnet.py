"""CIFAR residual networks (He et al. 2016, section 4.2), without running statistics by default."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from client_apps.config import choice

BLOCKS = {20: 3, 56: 9, 110: 18}  # depth = 6 blocks + 2


class ResNet(nn.Module):
    """6n+2 layers in three stages of 16, 32 and 64 channels with parameter-free shortcuts (option A).

    Every norm is registered right after the convolution it belongs to, so that code which groups tensors
    by layer finds the pair side by side.

    Parameters
    ----------
    channels, side, num_classes : int
        Images are (channels, side, side), side at least 16; the network itself does not depend on side.
    depth : {20, 56, 110}
        Number of layers with weights besides norms.
    norm : {"group", "batch"}
        GroupNorm with one group, which has no state to average (CRAFT's experiments), or BatchNorm.
    """

    def __init__(self, *, channels: int, side: int, num_classes: int, depth: int = 20, norm: str = "group") -> None:
        super().__init__()
        choice("model.depth", depth, BLOCKS)
        choice("model.norm", norm, ("group", "batch"))
        self.conv = _conv3x3(channels, 16)
        self.norm = _norm(norm, 16)
        blocks = []
        inputs = 16
        for width in (16, 32, 64):
            for _ in range(BLOCKS[depth]):
                blocks.append(_Block(inputs, width, norm))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, channels, side, side) to logits (b, num_classes)."""
        features = self.blocks(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.linear(features.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut; where the width doubles, the first one halves the size."""

    def __init__(self, inputs: int, width: int, norm: str) -> None:
        super().__init__()
        self.stride = 1 if inputs == width else 2
        self.padding = (width - inputs) // 2
        self.conv1 = _conv3x3(inputs, width, self.stride)
        self.norm1 = _norm(norm, width)
        self.conv2 = _conv3x3(width, width)
        self.norm2 = _norm(norm, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        # Option A: take every second pixel and fill the new channels, half on either side, with zeros.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + shortcut)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels) if kind == "group" else nn.BatchNorm2d(channels)
