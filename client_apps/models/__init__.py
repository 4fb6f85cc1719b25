"""The models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from client_apps.config import choice, only_known_keys
from client_apps.errors import ConfigError
from client_apps.models.cnn import CNN
from client_apps.models.mlp import MLP
from client_apps.models.resnet import ResNet

__all__ = ["CNN", "MLP", "ResNet", "build", "build_volumetric"]

# name: constructor, the keys it takes from the configuration, smallest image side
MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...], int]] = {
    "mlp": (MLP, ("hidden",), 1),
    "cnn": (CNN, (), 16),  # two valid 5x5 convolutions, each halved by pooling, leave 1 pixel of 16
    "resnet": (ResNet, ("depth", "norm"), 16),  # halved twice: below 16 hardly a feature map is left
}

# Models of volumes, made by `build_volumetric`, and the keys they take.
VOLUMETRIC: dict[str, tuple[str, ...]] = {"unet3d": ("channels", "num_res_units", "norm", "dropout")}


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
    if name in list(VOLUMETRIC):
        raise ConfigError(f"model.name={name} segments volumes, dataset=fets2022; choose one of {', '.join(MODELS)}.")
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


def build_volumetric(config: Mapping[str, Any], *, inputs: int, classes: int, patch: Sequence[int]) -> nn.Module:
    """Make a model from volumes (b, inputs, *patch) to logits (b, classes, *patch), as `build` does a classifier.

    Raises
    ------
    ConfigError
        The model or a key is unknown, a value is out of range, or the patch does not fit the model.
    """
    from client_apps.models.unet3d import unet3d  # needs MONAI, and 4 seconds

    if not isinstance(config, Mapping) or "name" not in config:
        raise ConfigError(f"model.name is missing; set it to one of {', '.join(VOLUMETRIC)}.")
    name = config["name"]
    if name in list(MODELS):
        raise ConfigError(f"model.name={name} classifies images; dataset=fets2022 needs {' or '.join(VOLUMETRIC)}.")
    choice("model.name", name, VOLUMETRIC)
    only_known_keys(config, ["name", *VOLUMETRIC[name]], "model")
    options = {key: config[key] for key in VOLUMETRIC[name] if key in config}
    return unet3d(inputs=inputs, classes=classes, patch=patch, **options)
