"""The proximal term: the gradient of the whole objective on every path of local training, and nothing without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_apps.data.transforms import Normalise
from client_apps.stacked_linear import StackedLinearNetwork
from client_apps.training import SGD, TrainResult, local_sgd, sgd_step, step_weight
from client_apps.vectorized import VectorizedTraining, Work

CLASSES, SIDE = 11, 5
SIZES = [7, 1, 10, 20, 13, 25, 7, 20]
Trained = list[tuple[list[Tensor], TrainResult]]


class Residual(nn.Module):
    """Linear layers, but no chain of them."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.inner, self.outer = nn.Flatten(), nn.Linear(25, 25), nn.Linear(25, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.flatten(images)
        return self.outer(x + torch.tanh(self.inner(x)))


def chain(*hidden: int) -> nn.Module:
    torch.manual_seed(0)
    widths = [SIDE * SIDE, *hidden]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], CLASSES))


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def work(sizes: list[int] = SIZES) -> list[Work]:
    g = torch.Generator().manual_seed(1)
    return [
        Work(
            torch.randint(256, (size, 1, SIDE, SIDE), generator=g, dtype=torch.uint8),
            torch.randint(CLASSES, (size,), generator=g),
            seed=100 + i,
        )
        for i, size in enumerate(sizes)
    ]


def elsewhere(model: nn.Module, seed: int = 3, distance: float = 0.2) -> list[Tensor]:
    """Another model of the same shape."""
    g = torch.Generator().manual_seed(seed)
    return [tensor + distance * torch.randn(tensor.shape, generator=g) for tensor in model.state_dict().values()]


def settings(**changes: Any) -> dict[str, Any]:
    return {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch_size": 10} | changes


normalise = Normalise((0.4,), (0.3,), torch.device("cpu"))

# Each path trains `clients` from `make()`, pulled to `center`.
Path = Callable[..., Trained]


def alone(make: Callable[[], nn.Module], clients: list[Work], center: list[Tensor] | None, **options: Any) -> Trained:
    trained = []
    for client in clients:
        model = make()
        result = local_sgd(
            model, client.images, client.labels, seed=client.seed, center=center,
            transform=lambda images, _: normalise(images), **options,
        )  # fmt: skip
        trained.append((list(model.state_dict().values()), result))
    return trained


def stacked(make: Callable[[], nn.Module], clients: list[Work], center: list[Tensor] | None, **options: Any) -> Trained:
    model = make()
    start = list(model.state_dict().values())
    if center is not None:
        clients = [client._replace(start=start) for client in clients]
    return VectorizedTraining(model).train(
        center or start, clients, lambda tensors: [t.clone() for t in tensors], augment=None, normalise=normalise,
        **options,
    )  # fmt: skip


def by_autograd(
    make: Callable[[], nn.Module], clients: list[Work], center: list[Tensor] | None,
    *, proximal_mu: float, epochs: int, batch_size: int, **options: Any,
) -> list[list[Tensor]]:  # fmt: skip
    """torch.optim.SGD on F(w) + (μ/2)‖w − c‖², differentiated as it stands."""
    trained = []
    for client in clients:
        model, generator = make(), torch.Generator().manual_seed(client.seed)
        pulled_to = center or [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), **options)
        for _ in range(epochs):
            for batch in torch.randperm(len(client.labels), generator=generator).split(batch_size):
                loss = F.cross_entropy(model(normalise(client.images[batch])), client.labels[batch])
                for p, c in zip(model.parameters(), pulled_to, strict=True):
                    loss = loss + proximal_mu / 2 * (p - c).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    return trained


PATHS = [
    pytest.param(alone, lambda: chain(17), id="one by one"),
    pytest.param(stacked, lambda: chain(17), id="stacked chain"),
    pytest.param(stacked, residual, id="torch.func"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    return sum(float((a - b).square().sum()) for a, b in zip(tensors, others, strict=True)) ** 0.5


def test_the_paths_are_the_three_there_are() -> None:
    assert StackedLinearNetwork.of(chain(17)) is not None
    assert StackedLinearNetwork.of(residual()) is None


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.0, 0.01), (0.9, 0.0), (0.9, 0.01)])
@pytest.mark.parametrize("apart", [False, True], ids=["FedProx", "pulled elsewhere"])
@pytest.mark.parametrize(("path", "make"), PATHS)
def test_a_step_follows_the_gradient_of_the_whole_objective(
    path: Path, make: Any, apart: bool, momentum: float, weight_decay: float
) -> None:
    center = elsewhere(make()) if apart else None
    options = settings(momentum=momentum, weight_decay=weight_decay, proximal_mu=0.7)
    expected = by_autograd(make, work(), center, **options)
    without = by_autograd(make, work(), center, **options | {"proximal_mu": 0.0})
    for (found, _), tensors in zip(path(make, work(), center, **options), expected, strict=True):
        for one, two in zip(found, tensors, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    # It is no small thing here: a missing term would not pass for rounding.
    assert max(map(distance, expected, without)) > 0.01


@pytest.mark.parametrize(("path", "make"), PATHS)
def test_without_a_factor_there_is_no_term(path: Path, make: Any) -> None:
    plain = path(make, work(), None, **settings())
    zero = path(make, work(), None, **settings(proximal_mu=0.0))
    far_off = path(make, work(), elsewhere(make(), distance=100.0), **settings(proximal_mu=0.0))
    for one, two, three in zip(plain, zero, far_off, strict=True):
        assert one[1] == two[1] == three[1]
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one[0], two[0], three[0], strict=True))


@pytest.mark.parametrize(("path", "make"), PATHS)
def test_the_stronger_the_pull_the_closer_the_model_stays(path: Path, make: Any) -> None:
    start = [p.detach() for p in make().parameters()]
    options = settings(lr=0.001, momentum=0.0, weight_decay=0.0, epochs=50)
    (free,), (tied,) = (
        [distance(t, start) for t, _ in path(make, work([20]), None, proximal_mu=mu, **options)] for mu in (0.0, 900.0)
    )
    # At rest μ(w − w_t) = −∇F, so with μ = 900 and gradients of size about 1 the distance is about 1/900.
    assert tied < 0.01 < free / 5


@pytest.mark.parametrize(("path", "make"), PATHS)
def test_the_loss_reported_is_that_of_the_data(path: Path, make: Any) -> None:
    options = settings(lr=1e-12)
    plain = path(make, work(), None, **options)
    pulled = path(make, work(), elsewhere(make(), distance=10.0), proximal_mu=5.0, **options)
    for (_, one), (_, two) in zip(plain, pulled, strict=True):
        assert two.train_loss == pytest.approx(one.train_loss, rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("hidden", [(33, 17), (48,), (), (1,)], ids=str)
def test_a_clients_bits_do_not_depend_on_its_group(hidden: tuple[int, ...], momentum: float) -> None:
    model = chain(*hidden)
    training, center = VectorizedTraining(model), list(model.state_dict().values())
    options = settings(momentum=momentum, proximal_mu=0.3, augment=None, normalise=normalise)
    # Every other client starts from a model of its own.
    clients = [
        client._replace(start=elsewhere(model, seed=i) if i % 2 else None) for i, client in enumerate(work(SIZES * 3))
    ]

    def train(group: list[Work]) -> Trained:
        return training.train(center, group, lambda tensors: [t.clone() for t in tensors], **options)

    together = train(clients)
    for size in (1, 2, 5):
        apart = [found for start in range(0, len(clients), size) for found in train(clients[start : start + size])]
        for (tensors, result), (others, other) in zip(apart, together, strict=True):
            assert result == other
            assert all(torch.equal(one, two) for one, two in zip(tensors, others, strict=True))


@pytest.mark.parametrize("make", [lambda: chain(17), residual], ids=["chain", "torch.func"])
def test_a_client_may_start_from_its_own_model(make: Any) -> None:
    model, (first, second) = make(), work([12, 9])
    own = elsewhere(model)
    before = [tensor.clone() for tensor in own]
    center = list(model.state_dict().values())

    def train(state: list[Tensor], clients: list[Work]) -> Trained:
        keep = lambda tensors: [t.clone() for t in tensors]  # noqa: E731
        return VectorizedTraining(model).train(state, clients, keep, augment=None, normalise=normalise, **settings())

    found = train(center, [first, second._replace(start=own)])
    expected = [*train(center, [first]), *train(own, [second])]
    for (tensors, _), (others, _) in zip(found, expected, strict=True):
        for one, two in zip(tensors, others, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(own, before, strict=True))


@pytest.mark.parametrize(
    ("steps", "momentum", "shrink", "expected"),
    [
        (4, 0.0, 0.0, 4.0),
        (3, 0.5, 0.0, 1 + 1.5 + 1.75),
        (3, 0.0, 0.5, 1 + 0.5 + 0.25),  # FedNova's [(1 − lr μ)^2, 1 − lr μ, 1]
        (3, 0.0, 1.5, 1 + 0.5 + 0.25),  # steps that overshoot: 1, −.5, .25
        # A gradient of 1: v = 1, x = 1; v = .5 − .5 = 0, x = 1; v = 0 − .5 = −.5, x = .5.
        (3, 0.5, 0.5, 1 + 1 + 0.5),
    ],
)
def test_step_weight_by_hand(steps: int, momentum: float, shrink: float, expected: float) -> None:
    assert step_weight(steps, SGD(0.25, momentum, 0.0, shrink / 0.25)) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.7, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.4, 3.0])
def test_step_weight_adds_up_what_each_gradient_leaves_behind(mu: float, momentum: float) -> None:
    steps, sgd, center = 12, SGD(0.2, momentum, 0.0, mu), torch.tensor([2.0], dtype=torch.float64)
    left = []
    for k in range(steps):
        w, velocity = [center.clone()], [torch.zeros_like(center)]
        for step in range(steps):
            gradient = torch.full_like(center, float(step == k))
            sgd_step(w, [gradient], velocity, sgd.pull([center]), sgd, first=not step)
        left.append(abs(float(center - w[0])) / sgd.lr)
    assert step_weight(steps, sgd) == pytest.approx(np.sum(left), rel=1e-12)


def test_every_path_reports_the_step_weight_of_the_proximal_steps() -> None:
    options = settings(momentum=0.0, proximal_mu=2.0, epochs=1)
    for path, make in ((alone, lambda: chain(17)), (stacked, lambda: chain(17)), (stacked, residual)):
        ((_, result),) = path(make, work([25]), None, **options)
        assert result.local_steps == 3
        assert result.step_weight == pytest.approx(1 + 0.8 + 0.64)  # 1 − .1 · 2 = .8
