"""A 3-D U-Net for overlapping classes: MONAI's, with residual units (Kerfoot et al. 2019, Springer STACOM 2018)."""

from __future__ import annotations

from collections.abc import Sequence

from monai.networks.nets import UNet
from torch import nn

from client_apps.config import at_least_zero, choice, integer
from client_apps.errors import ConfigError

# One group, as in `ResNet`: it fits any number of channels, also that of the classes.
_NORMS = {"instance": "instance", "group": ("group", {"num_groups": 1})}


def unet3d(
    *,
    inputs: int,
    classes: int,
    patch: Sequence[int],
    channels: Sequence[int] = (8, 16, 32, 64),
    num_res_units: int = 2,
    norm: str = "instance",
    dropout: float = 0.0,
) -> nn.Module:
    """Make a network from volumes (b, inputs, h, w, d) to logits (b, classes, h, w, d), neither norm with a state.

    Parameters
    ----------
    inputs, classes : int
        Channels of the volumes and of the logits.
    patch : Sequence[int]
        Sizes (h, w, d) that it has to take.
    channels : Sequence[int]
        Widths from the top level, already at half the resolution, to the bottom one; between two levels the
        resolution is halved, but the bottom two share theirs, so the total stride is 2^(levels - 1).
    num_res_units : int
        Convolutions in each residual unit of the encoder; 0 is plain convolutions.
    norm : {"instance", "group"}
        InstanceNorm without affine parameters, or GroupNorm with one group.
    dropout : float
        Probability, in [0, 1).

    Raises
    ------
    ConfigError
        An option is out of range, or the patch does not fit the total stride.
    """
    if not isinstance(channels, list | tuple) or len(channels) < 2:
        raise ConfigError(f"model.channels must be a list of at least two widths, not {channels!r}.")
    for width in channels:
        integer("each of model.channels", width, 1)
    integer("model.num_res_units", num_res_units, 0)
    choice("model.norm", norm, _NORMS)
    at_least_zero("model.dropout", dropout, below=1)
    stride = 2 ** (len(channels) - 1)
    if any(size % stride for size in patch):
        raise ConfigError(
            f"dataset.patch={list(patch)} must be divisible by {stride}, the total stride of a U-Net of "
            f"{len(channels)} levels; choose multiples of {stride}, or fewer model.channels."
        )
    if all(size == stride for size in patch):
        raise ConfigError(
            f"dataset.patch={list(patch)} leaves one voxel at the bottom of a U-Net of {len(channels)} levels, too few "
            f"to normalise; choose larger multiples of {stride}, or fewer model.channels."
        )
    network: nn.Module = UNet(
        spatial_dims=3,
        in_channels=inputs,
        out_channels=classes,
        channels=tuple(channels),
        strides=(2,) * (len(channels) - 1),
        num_res_units=num_res_units,
        norm=_NORMS[norm],
        dropout=dropout,
    )
    return network
