"""What a strategy asks of its clients, counted: FedRef's cost what FedAvg's do, and FedProx's more.

Counted are PyTorch's operations and bytes of messages, and no time: the counts are exact, and the same on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flwr.common import FitIns, FitRes, ndarrays_to_parameters
from flwr.common.serde import recorddict_to_proto
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, fitres_to_recorddict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

import strategies
from client_apps.app import TaskClient
from client_apps.arrays import get_arrays
from client_apps.tasks import ClassificationTask
from strategies import UpdateStrategy
from tests.strategies.helpers import manager

from .configs import config

CLIENTS, ROUNDS = 2, 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a client app sets for its clients; those made by hand, as here, have whatever there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch carries out, and the elements they write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations += 1
        if not func.is_view:
            self.elements += sum(tensor.numel() for tensor in self._written(func, args, kwargs, result))
        return result

    @staticmethod
    def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Iterator[Tensor]:
        schema, given = func._schema.arguments, dict(enumerate(args))
        changed = [
            given.get(i, kwargs.get(argument.name))
            for i, argument in enumerate(schema)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # What is changed in place may be returned, too, or not, as by the foreach operations.
        for leaf in tree_iter(changed or result):
            if isinstance(leaf, Tensor):
                yield leaf


@dataclass(frozen=True)
class Cost:
    """What one client spends in one round."""

    steps: int
    operations: int
    elements: int
    flops: int
    bytes_received: int
    bytes_sent: int


def _product_added(_: torch.Size, one: torch.Size, other: torch.Size, **__: Any) -> int:
    return 2 * math.prod(one) * other[-1]


# Adds a batch of products, (k, n, m) and (k, m, p), in place; PyTorch's counter knows only the one that does not.
_IN_PLACE = {torch.ops.aten.baddbmm_: _product_added}


def measured(client: TaskClient, ins: FitIns) -> tuple[FitRes, Cost]:
    with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as flops, Operations() as counted:
        result = client.fit(ins)
    return result, Cost(
        steps=int(result.metrics["local_steps"]),
        operations=counted.operations,
        elements=counted.elements,
        flops=flops.get_total_flops(),
        bytes_received=recorddict_to_proto(fitins_to_recorddict(ins, keep_input=True)).ByteSize(),
        bytes_sent=recorddict_to_proto(fitres_to_recorddict(result, keep_input=True)).ByteSize(),
    )


def costs(
    task: ClassificationTask, make: Callable[..., UpdateStrategy], fine_tuned: bool = False
) -> dict[tuple[int, int], Cost]:
    """Run some rounds of a strategy's own instructions; what each client spends, by round and client."""
    parameters = ndarrays_to_parameters(get_arrays(task.new_model()))
    strategy = make(initial_parameters=parameters, fraction_fit=1.0, device="cpu")
    nodes, found = manager([str(cid) for cid in range(CLIENTS)]), {}
    clients = [TaskClient(task, cid) for cid in range(CLIENTS)]
    for number in range(1, ROUNDS + 1):
        results = []
        for proxy, ins in strategy.configure_fit(number, parameters, nodes):
            result, found[number, int(proxy.cid)] = measured(clients[int(proxy.cid)], ins)
            results.append((proxy, result))
        following, metrics = strategy.aggregate_fit(number, results, [])
        assert following is not None
        assert metrics["clients_accepted"] == CLIENTS
        assert bool(metrics.get("fine_tuned")) == (fine_tuned and number > 1)
        parameters = following
    return found


class Residual(nn.Module):
    """Linear layers, but no chain of them."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.inner, self.outer = nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.flatten(images)
        return self.outer(x + torch.tanh(self.inner(x)))


@pytest.fixture(params=["alone", "stack", "vmap"])
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ClassificationTask:
    """Clients that train one by one, in a stack of linear layers, or by torch.func, seen below vmap."""
    if request.param == "vmap":
        monkeypatch.setattr(ClassificationTask, "new_model", lambda _: Residual())
    of = ClassificationTask(config(client__vectorize=request.param != "alone", client__local_epochs=2))
    assert of.vectorized == (request.param != "alone")
    # What is made once and kept counts for nobody.
    TaskClient(of, 0).fit(FitIns(ndarrays_to_parameters(get_arrays(of.new_model())), {"server_round": 1}))
    return of


@pytest.fixture
def fedavg(task: ClassificationTask) -> dict[tuple[int, int], Cost]:
    return costs(task, strategies.FedAvg)


def test_the_count_is_that_of_the_arithmetic(task: ClassificationTask, fedavg: dict[tuple[int, int], Cost]) -> None:
    layers = [module for module in task.new_model().modules() if isinstance(module, nn.Linear)]
    parameters = sum(p.numel() for p in task.new_model().parameters())
    for (_, cid), cost in fedavg.items():
        size = task.train_size(cid)
        assert cost.steps == 2 * -(-size // 20)
        # A linear layer takes 2 · in · out operations a sample forward, as many for its weights' gradient, and again
        # as many for its input's, which the first layer has no use for.
        passes = [2, *[3] * (len(layers) - 1)]
        assert cost.flops == 2 * size * sum(
            n * 2 * layer.weight.numel() for n, layer in zip(passes, layers, strict=True)
        )
        assert cost.elements > cost.steps * 2 * parameters  # gradients, and the weights they move
        assert cost.bytes_received > 4 * parameters
        assert cost.bytes_sent > 4 * parameters


def test_fedref_costs_a_client_exactly_what_fedavg_does(
    task: ClassificationTask, fedavg: dict[tuple[int, int], Cost]
) -> None:
    assert costs(task, lambda **options: strategies.FedRef(window=1, **options), fine_tuned=True) == fedavg


def test_fedprox_costs_a_client_more_in_every_step(
    task: ClassificationTask, fedavg: dict[tuple[int, int], Cost]
) -> None:
    parameters = sum(p.numel() for p in task.new_model().parameters())
    fedprox = costs(task, strategies.FedProx)
    assert fedprox.keys() == fedavg.keys()
    for key, plain in fedavg.items():
        pulled = fedprox[key]
        assert pulled.steps == plain.steps
        assert pulled.operations > plain.operations
        assert pulled.elements >= plain.elements + plain.steps * parameters  # the pull changes every gradient
        assert pulled.bytes_received > plain.bytes_received  # μ
        assert pulled.bytes_sent == plain.bytes_sent
