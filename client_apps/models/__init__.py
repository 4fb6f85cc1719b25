"""The models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from client_apps.config import choice, only_known_keys
from client_apps.errors import ConfigError
from client_apps.models.cnn import CNN
from client_apps.models.mlp import MLP
from client_apps.models.resnet import ResNet

__all__ = ["CNN", "MLP", "ResNet", "build"]

# name: constructor, the keys it takes from the configuration, smallest image side
MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...], int]] = {
    "mlp": (MLP, ("hidden",), 1),
    "cnn": (CNN, (), 16),  # two valid 5x5 convolutions, each halved by pooling, leave 1 pixel of 16
    "resnet": (ResNet, ("depth", "norm"), 16),  # halved twice: below 16 hardly a feature map is left
}


def build(config: Mapping[str, Any], *, channels: int, side: int, num_classes: int) -> nn.Module:
    """Make a classifier for images of shape (channels, side, side), initialised from the global generator.

    Parameters
    ----------
    config : Mapping[str, Any]
        The section `model`: `name` and that model's own keys.
    channels, side, num_classes : int
        Taken from the data set.

    Raises
    ------
    ConfigError
        The model or a key is unknown, a value is out of range, or the images are too small.
    """
    if not isinstance(config, Mapping) or "name" not in config:
        raise ConfigError(f"model.name is missing; set it to one of {', '.join(MODELS)}.")
    name = config["name"]
    choice("model.name", name, MODELS)
    constructor, keys, smallest = MODELS[name]
    only_known_keys(config, ["name", *keys], "model")
    if side < smallest:
        fitting = ", ".join(other for other, (_, _, low) in MODELS.items() if side >= low)
        raise ConfigError(
            f"model.name={name} needs images of at least {smallest}x{smallest} pixels and the data set has "
            f"{side}x{side}; choose model.name={fitting}."
        )
    options = {key: config[key] for key in keys if key in config}
    return constructor(channels=channels, side=side, num_classes=num_classes, **options)
