"""Training in stacks: equal to one by one, to steps computed in float64, and for each client whatever its group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from client_apps import models, vectorized
from client_apps.data.transforms import Normalise, random_crop_flip
from client_apps.errors import ConfigError
from client_apps.stacked_linear import StackedLinearNetwork
from client_apps.tasks import ClassificationTask
from client_apps.training import TrainResult, local_sgd
from client_apps.vectorized import VectorizedTraining, Work, obstacle

from .configs import config

SIZES = [7, 1, 10, 20, 3, 13, 10, 25, 7, 40, 1, 20]  # fewer than a batch of 10, exact multiples, and neither
Trained = list[tuple[list[Tensor], TrainResult]]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(hidden: list[int], side: int = 5, **other: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build({"name": "mlp", "hidden": hidden} | other, channels=1, side=side, num_classes=11)


def work(side: int = 5, sizes: list[int] = SIZES, device: str = "cpu") -> list[Work]:
    g = torch.Generator().manual_seed(1)
    return [
        Work(
            torch.randint(256, (size, 1, side, side), generator=g, dtype=torch.uint8).to(device),
            torch.randint(11, (size,), generator=g).to(device),
            seed=100 + i,
        )
        for i, size in enumerate(sizes)
    ]


def options(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    usual = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "epochs": 3, "batch_size": 10, "augment": None}
    return {"normalise": Normalise((0.4,), (0.3,), torch.device(device))} | usual | changes


def stacked(model: nn.Module, clients: list[Work], **settings: Any) -> Trained:
    state = list(model.state_dict().values())
    return VectorizedTraining(model).train(state, clients, lambda tensors: [t.clone() for t in tensors], **settings)


def one_by_one(make: Any, clients: list[Work], *, augment: Any, normalise: Any, **settings: Any) -> Trained:
    def transform(images: Tensor, generator: torch.Generator) -> Tensor:
        return normalise(images if augment is None else augment(images, generator))

    trained = []
    for client in clients:
        model = make()
        result = local_sgd(model, client.images, client.labels, transform=transform, seed=client.seed, **settings)
        trained.append((list(model.state_dict().values()), result))
    return trained


def assert_close(found: Trained, expected: Trained) -> None:
    for (tensors, result), (others, other) in zip(found, expected, strict=True):
        for one, two in zip(tensors, others, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        assert result.train_loss == pytest.approx(other.train_loss, rel=1e-4)
        assert (result.num_examples, result.local_steps) == (other.num_examples, other.local_steps)
        assert result.step_weight == other.step_weight


def assert_identical(found: Trained, expected: Trained) -> None:
    for (tensors, result), (others, other) in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(tensors, others, strict=True))
        assert result == other


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.0},
        {"momentum": 0.0, "weight_decay": 0.0, "epochs": 1},
        {"weight_decay": 0.0},
        {"augment": random_crop_flip},
        {"batch_size": 1, "lr": 0.01},  # 120 steps: longer ones would multiply the rounding of the first
        {"batch_size": 100},
    ],
    ids=lambda settings: "augment" if "augment" in settings else str(settings),
)
def test_a_stack_trains_as_clients_do_one_by_one(changes: dict[str, Any], device: str) -> None:
    settings = options(device, **changes)
    clients = work(device=device)
    found = stacked(network([33, 17]).to(device), clients, **settings)
    assert_close(found, one_by_one(lambda: network([33, 17]).to(device), clients, **settings))


def test_other_models_train_in_a_stack_too(device: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return models.build({"name": "resnet"}, channels=1, side=16, num_classes=11).to(device)

    clients = work(side=16, sizes=[3, 5, 4], device=device)
    settings = options(device, batch_size=2, epochs=1, lr=0.01)
    assert_close(stacked(make(), clients, **settings), one_by_one(make, clients, **settings))


def test_both_ways_to_a_gradient_agree() -> None:
    class Residual(nn.Module):
        """Linear layers, but no chain of them."""

        def __init__(self) -> None:
            super().__init__()
            self.flatten, self.inner, self.outer = nn.Flatten(), nn.Linear(25, 25), nn.Linear(25, 11)

        def forward(self, images: Tensor) -> Tensor:
            x = self.flatten(images)
            return self.outer(x + torch.tanh(self.inner(x)))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Residual()

    assert StackedLinearNetwork.of(make()) is None
    assert_close(stacked(make(), work(), **options()), one_by_one(make, work(), **options()))


def test_steps_follow_the_formula_in_float64() -> None:
    model = network([6])
    (client,) = work(sizes=[25])
    ((found, result),) = stacked(model, [client], **options())
    w1, b1, w2, b2 = parameters = [tensor.double().numpy().copy() for tensor in model.state_dict().values()]
    velocity = [np.zeros_like(p) for p in parameters]
    x = (client.images.flatten(1).double().numpy() / 255 - 0.4) / 0.3
    labels, generator, losses = client.labels.numpy(), torch.Generator().manual_seed(client.seed), 0.0
    for _ in range(3):
        order = torch.randperm(25, generator=generator).numpy()
        for batch in (order[:10], order[10:20], order[20:]):
            z = x[batch] @ w1.T + b1
            h = np.maximum(z, 0)
            logits = h @ w2.T + b2
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            losses -= np.log(p[np.arange(len(batch)), labels[batch]]).sum()
            error = (p - np.eye(11)[labels[batch]]) / len(batch)
            hidden = error @ w2 * (z > 0)
            gradients = [hidden.T @ x[batch], hidden.sum(0), error.T @ h, error.sum(0)]
            for w, v, g in zip(parameters, velocity, gradients, strict=True):
                v[...] = 0.9 * v + g + 0.01 * w  # v <- m v + g + decay w
                w -= 0.1 * v
    for tensor, expected in zip(found, parameters, strict=True):
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert result.train_loss == pytest.approx(losses / 75, rel=1e-5)
    assert result.local_steps == 9


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("augment", [None, random_crop_flip], ids=["plain", "augmented"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("hidden", "side"), [([200, 200], 28), ([33, 17], 5), ([], 7), ([1], 3), ([63, 65, 5], 9)])
def test_a_clients_bits_do_not_depend_on_its_group(hidden: list[int], side: int, momentum: float, augment: Any) -> None:
    # Odd widths put a client's slice anywhere in memory unless the stacks see to it.
    model, settings = network(hidden, side), options(momentum=momentum, augment=augment, epochs=2)
    clients = work(side, [*SIZES, *SIZES, *SIZES, 9, 11, 20, 20])
    together = stacked(model, clients, **settings)
    assert len(clients) == 40
    order = np.random.default_rng(0).permutation(len(clients)).tolist()
    for size in (1, 2, 7, 40):
        alone: dict[int, Any] = {}
        for start in range(0, len(order), size):
            part = order[start : start + size]
            alone |= dict(zip(part, stacked(model, [clients[i] for i in part], **settings), strict=True))
        assert_identical([alone[i] for i in range(len(clients))], together)


@pytest.mark.usefixtures("one_thread")
def test_groups_too_large_for_the_memory_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network([33])
    expected = stacked(model, work(), **options())
    monkeypatch.setattr(vectorized, "STACK_BYTES", 5 * sum(t.nbytes for t in model.state_dict().values()))
    assert VectorizedTraining(model).capacity == 5
    assert_identical(stacked(model, work(), **options()), expected)
    monkeypatch.setattr(vectorized, "STACK_BYTES", 1)
    assert VectorizedTraining(model).capacity == 1
    assert_identical(stacked(model, work(), **options()), expected)


def test_what_is_not_trained_is_copied_through_and_the_global_model_stays() -> None:
    def make() -> nn.Module:
        model = network([6])
        model.register_buffer("counter", torch.tensor(7))
        model.layers[1].weight.requires_grad_(False)
        return model

    model = make()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    found = stacked(model, work(sizes=[4]), **options())
    assert_close(found, one_by_one(make, work(sizes=[4]), **options()))
    (tensors, _), names = found[0], list(model.state_dict())
    assert (tensors[names.index("counter")].dtype, tensors[names.index("counter")].item()) == (torch.int64, 7)
    assert torch.equal(tensors[names.index("layers.1.weight")], before[names.index("layers.1.weight")])
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), before, strict=True))


@pytest.mark.parametrize("lr", [0.1, 1e30])
def test_a_loss_that_is_not_finite_stays_with_its_client(lr: float) -> None:
    def make() -> nn.Module:
        model = network([6])
        with torch.no_grad():
            model.layers[3].weight[0, 0] = 1e38
        return model

    clients = work(sizes=[10, 10, 4])
    clients[1] = clients[1]._replace(images=torch.zeros_like(clients[1].images))
    for (tensors, result), (others, other) in zip(
        stacked(make(), clients, **options(lr=lr)), one_by_one(make, clients, **options(lr=lr)), strict=True
    ):
        assert np.isfinite(result.train_loss) == np.isfinite(other.train_loss)
        for one, two in zip(tensors, others, strict=True):
            assert torch.equal(one.isfinite(), two.isfinite())


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    model = network([6])
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = stacked(model, work(), **options(augment=random_crop_flip))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert_close(stacked(model, work(), **options(augment=random_crop_flip)), first)


def test_chains_of_linear_layers_are_recognised() -> None:
    assert StackedLinearNetwork.of(network([4, 4])) is not None
    assert StackedLinearNetwork.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.Tanh())) is not None
    for other in (
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 3), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(1)),
    ):
        assert StackedLinearNetwork.of(other) is None


def test_layers_without_bias_train_in_a_stack() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(25, 7, bias=False), nn.GELU(), nn.Linear(7, 11))

    assert_close(stacked(make(), work(), **options()), one_by_one(make, work(), **options()))


def test_obstacles_are_named() -> None:
    shared = nn.Linear(4, 4)
    assert obstacle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) == "BatchNorm"
    assert obstacle(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))) == "dropout or other randomness"
    assert obstacle(nn.Sequential(shared, shared)) == "tensors shared between layers"
    assert obstacle(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.GroupNorm(1, 4))) is None


RESNET = {"dataset__name": "femnist", "model": {"name": "resnet"}}
CNN = {"dataset__name": "femnist", "model": {"name": "cnn"}}
BATCH_NORM = {"dataset__name": "femnist", "model": {"name": "resnet", "norm": "batch"}}


@pytest.mark.parametrize(
    ("changes", "vectorize", "expected"),
    [
        ({}, "auto", True),
        ({}, True, True),
        ({}, False, False),
        (RESNET, "auto", False),
        (RESNET, True, True),
        (CNN, "auto", False),
        (BATCH_NORM, "auto", False),
        (BATCH_NORM, False, False),
    ],
)
def test_what_is_vectorized(changes: dict[str, Any], vectorize: Any, expected: bool) -> None:
    assert ClassificationTask(config(client__vectorize=vectorize, **changes)).vectorized is expected


@pytest.mark.parametrize(("changes", "what"), [(CNN, "dropout or other randomness"), (BATCH_NORM, "BatchNorm")])
def test_what_cannot_be_vectorized_is_refused_when_required(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"client.vectorize=true cannot train a model with {what}; use"):
        ClassificationTask(config(client__vectorize=True, **changes))


@pytest.mark.parametrize("written", ["yes please", "1", "0", "null", "Auto", "[true]"])
def test_other_values_of_vectorize_are_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"^client.vectorize must be auto, true or false, not [^.]*\.$"):
        ClassificationTask(config(client__vectorize=yaml.safe_load(written)))


@pytest.mark.parametrize(("written", "expected"), [("auto", True), ("true", True), ("false", False)])
def test_vectorize_reads_as_yaml_writes_it(written: str, expected: bool) -> None:
    assert ClassificationTask(config(client__vectorize=yaml.safe_load(written))).vectorized is expected


def test_the_configuration_names_the_default() -> None:
    text = Path(__file__).parents[2].joinpath("conf", "client", "sgd.yaml").read_text("utf-8")
    assert yaml.safe_load(text)["vectorize"] == "auto"


@pytest.mark.usefixtures("one_thread")
def test_a_task_trains_one_client_as_it_does_many() -> None:
    task = ClassificationTask(config(num_clients=60, client__momentum=0.9, client__lr_decay=0.5))
    state = list(task.new_model().state_dict().values())
    many = task.train_many(state, [5, 2, 59], 3, lambda tensors: [t.clone() for t in tensors])
    for cid, (tensors, result) in zip([5, 2, 59], many, strict=True):
        model = task.new_model()
        assert task.train(model, cid, 3) == result
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), tensors, strict=True))


def test_a_task_trains_alike_with_and_without_stacks(device: str) -> None:
    results = {}
    for vectorize in (True, False):
        task = ClassificationTask(
            config(client__vectorize=vectorize, client__device=device, dataset__augment="crop_flip")
        )
        model = task.new_model()
        results[vectorize] = [(list(model.state_dict().values()), task.train(model, 4, 2))]
    assert_close(results[True], results[False])


def test_cross_entropy_is_what_is_minimised() -> None:
    model = network([6])
    (client,) = work(sizes=[10])
    ((_, result),) = stacked(model, [client], **options(epochs=1))
    logits = model(options()["normalise"](client.images))
    assert result.train_loss == pytest.approx(F.cross_entropy(logits, client.labels).item(), rel=1e-5)
