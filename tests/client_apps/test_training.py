"""The local loop against steps computed by hand, and its independence of everything but its seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from client_apps.training import TrainResult, isolated_rng, local_sgd

COUNT = 10


def plain(images: Tensor, generator: torch.Generator) -> Tensor:
    return images.float() / 255


def samples(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 1, 2, 2), generator=generator, dtype=torch.uint8)
    return images, torch.randint(3, (count,), generator=generator)


def linear(*layers: nn.Module) -> nn.Sequential:
    with isolated_rng(1, torch.device("cpu")):
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 3))


def run(model: nn.Module, count: int = COUNT, **changes: float) -> TrainResult:
    options = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch_size": COUNT, "seed": 5}
    return local_sgd(model, *samples(count), transform=plain, **(options | changes))


def softmax_gradient(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, float]:
    """Gradient of the mean cross-entropy of a linear classifier, in closed form: (p - y) x."""
    images, labels = samples()
    x = images.flatten(1).double() / 255
    p = torch.softmax(x @ weight.T + bias, dim=1)
    loss = -p[torch.arange(COUNT), labels].log().mean().item()
    error = (p - nn.functional.one_hot(labels, 3)) / COUNT
    return error.T @ x, error.sum(0), loss


def test_full_batch_steps_follow_the_formula() -> None:
    model = linear()
    weight, bias = model[1].weight.detach().double(), model[1].bias.detach().double()
    velocity, losses = [torch.zeros_like(weight), torch.zeros_like(bias)], []
    for _ in range(3):
        *gradient, loss = softmax_gradient(weight, bias)
        losses.append(loss)
        # v <- m v + g + decay w;  w <- w - lr v
        velocity = [0.9 * v + g + 0.01 * w for v, g, w in zip(velocity, gradient, (weight, bias), strict=True)]
        weight, bias = weight - 0.1 * velocity[0], bias - 0.1 * velocity[1]
    result = run(model, epochs=3, momentum=0.9, weight_decay=0.01)
    torch.testing.assert_close(model[1].weight.double(), weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(model[1].bias.double(), bias, rtol=0, atol=1e-6)
    assert result.train_loss == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert (result.num_examples, result.local_steps) == (COUNT, 3)


def test_step_weight_counts_how_often_each_gradient_is_used() -> None:
    assert run(linear(), batch_size=4, epochs=2).step_weight == 6
    # Three steps with momentum .5: c = 1, 1.5, 1.75.
    assert run(linear(), epochs=3, momentum=0.5).step_weight == 1 + 1.5 + 1.75


def test_train_loss_weighs_samples_and_not_batches() -> None:
    # A step this small moves nothing, so the mean over batches of 4, 4 and 2 is that of all samples at once.
    expected = run(linear(), lr=1e-12).train_loss
    result = run(linear(), lr=1e-12, batch_size=4)
    assert result.local_steps == 3
    assert result.train_loss == pytest.approx(expected, abs=1e-6)


def test_the_learning_rate_scales_a_step() -> None:
    before = linear()[1].weight.detach()
    full, half = linear(), linear()
    run(full, lr=0.1)
    run(half, lr=0.05)
    torch.testing.assert_close(2 * (half[1].weight - before), full[1].weight - before, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("layer", "count", "batch_size", "steps"),
    [
        (nn.Identity, 9, 4, 3),  # 4, 4, 1
        (lambda: nn.BatchNorm1d(4), 9, 4, 2),  # the single sample is skipped
        (lambda: nn.BatchNorm1d(4), 10, 4, 3),  # 4, 4, 2
        (lambda: nn.BatchNorm1d(4), 4, 4, 1),
    ],
)
def test_a_last_batch_of_one_is_skipped_under_batch_norm(
    layer: type[nn.Module], count: int, batch_size: int, steps: int
) -> None:
    result = run(linear(layer()), count=count, batch_size=batch_size)
    assert (result.local_steps, result.num_examples) == (steps, count)


def test_a_seed_alone_decides_and_the_global_generator_stays() -> None:
    def train(seed: int) -> Tensor:
        model = linear(nn.Dropout(0.5))
        run(model, batch_size=3, epochs=2, seed=seed)
        return model[2].weight.detach()

    torch.manual_seed(1)
    first = train(5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = train(5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, train(6))


def test_divergence_reaches_the_weights_and_the_loss() -> None:
    model = linear()
    with torch.no_grad():
        model[1].weight.fill_(math.inf)
    result = run(model, batch_size=2, epochs=3)
    assert not math.isfinite(result.train_loss)
    assert model[1].bias.isnan().any()
