"""Models: known parameter counts, shapes, registration order, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from client_apps.errors import ConfigError
from client_apps.models import build


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def resnet_parameters(blocks: int, channels: int = 3, classes: int = 10) -> int:
    """Count by hand: 3x3 convolutions without bias, two numbers per normalised channel, a linear layer."""
    convolutions = 9 * channels * 16
    norms = 2 * 16
    for inputs, width in ((16, 16), (16, 32), (32, 64)):
        convolutions += 9 * (inputs * width + (2 * blocks - 1) * width * width)
        norms += 2 * width * 2 * blocks
    return convolutions + norms + 64 * classes + classes


def test_resnet20_has_the_published_size() -> None:
    # He et al. 2016 give .27M; 269,722 and 20 layers with weights is the count of CRAFT's authors.
    model = build({"name": "resnet"}, channels=3, side=32, num_classes=10)
    assert parameters(model) == 269_722
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 20


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("depth", "blocks"), [(20, 3), (56, 9), (110, 18)])
def test_resnet_sizes_follow_the_formula(depth: int, blocks: int, norm: str) -> None:
    model = build({"name": "resnet", "depth": depth, "norm": norm}, channels=1, side=28, num_classes=62)
    assert parameters(model) == resnet_parameters(blocks, channels=1, classes=62)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth


def test_every_norm_is_registered_after_its_convolution() -> None:
    model = build({"name": "resnet"}, channels=3, side=32, num_classes=10)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.GroupNorm | nn.Linear)]
    assert [type(m).__name__ for m in layers] == ["Conv2d", "GroupNorm"] * 19 + ["Linear"]
    assert all(norm.num_groups == 1 for norm in layers[1:-1:2])
    assert all(norm.num_channels == conv.out_channels for conv, norm in zip(layers[:-1:2], layers[1::2], strict=True))


def test_batch_norm_brings_buffers_and_group_norm_none() -> None:
    group = build({"name": "resnet"}, channels=3, side=32, num_classes=10)
    batch = build({"name": "resnet", "norm": "batch"}, channels=3, side=32, num_classes=10)
    assert not list(group.buffers())
    assert len(list(batch.buffers())) == 3 * 19  # mean, variance, counter


def test_shortcut_subsamples_and_pads_channels_with_zeros() -> None:
    block = build({"name": "resnet"}, channels=3, side=32, num_classes=10).blocks[3]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # leaves the shortcut alone
    x = torch.rand(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 32, 4, 4)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), expected)


def test_cnn_and_mlp_sizes() -> None:
    # conv 5x5x3x64+64, 5x5x64x64+64; 5x5x64 = 1600 features; 384, 192, 10.
    cnn = build({"name": "cnn"}, channels=3, side=32, num_classes=10)
    assert parameters(cnn) == 4864 + 102_464 + 1600 * 384 + 384 + 384 * 192 + 192 + 192 * 10 + 10
    mlp = build({"name": "mlp"}, channels=1, side=28, num_classes=62)
    assert parameters(mlp) == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 62 + 62


@pytest.mark.parametrize("config", [{"name": "mlp"}, {"name": "cnn"}, {"name": "resnet"}], ids=str)
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (1, 16)])
def test_logits_have_one_column_per_class(config: dict, channels: int, side: int, device: str) -> None:
    model = build(config, channels=channels, side=side, num_classes=7).to(device)
    assert model(torch.zeros(2, channels, side, side, device=device)).shape == (2, 7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "vgg"}, "model.name must be one of mlp, cnn, resnet, not 'vgg'"),
        ({}, "model.name is missing"),
        ({"name": "mlp", "depth": 3}, "model.depth is not a known key; the known ones are: name, hidden"),
        ({"name": "mlp", "hidden": 200}, "model.hidden must be a list"),
        ({"name": "mlp", "hidden": [0]}, "model.hidden must be an integer of at least 1"),
        ({"name": "cnn", "dropout": 0.1}, "model.dropout is not a known key"),
        ({"name": "resnet", "depth": 18}, "model.depth must be one of 20, 56, 110, not 18"),
        ({"name": "resnet", "norm": "layer"}, "model.norm must be one of group, batch"),
    ],
    ids=str,
)
def test_unknown_models_and_keys_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config, channels=3, side=32, num_classes=10)


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_too_small_images_are_refused_with_an_alternative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs .*16x16 .* has 8x8; choose model.name=mlp"):
        build({"name": name}, channels=1, side=8, num_classes=10)
