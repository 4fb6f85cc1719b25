"""The Flower ClientApp: one client of a task, in a simulation or on a SuperNode of its own."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import (
    Code,
    Context,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    Scalar,
    Status,
)
from torch import Tensor, nn

from client_apps import tasks
from client_apps.arrays import set_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import Task
from client_apps.training import TrainResult
from client_apps.wire import decode, encode


def make_client_app(cfg: Mapping[str, Any]) -> TaskClientApp:
    """Make the ClientApp of a composed configuration.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        Plain values (strings, numbers, lists, dicts); a copy is kept, and it travels with the app to
        other processes.

    Raises
    ------
    ConfigError
        A key is unknown, missing or out of range. No data is read here.
    """
    return TaskClientApp(cfg)


class TaskClientApp(ClientApp):
    """A ClientApp that can also train many clients at once.

    Parameters
    ----------
    cfg : Mapping[str, Any]
        See `make_client_app`.
    mods : list of Mod or None
        Flower's modifiers. They act on one message, so with any of them clients run one by one.
    """

    def __init__(self, cfg: Mapping[str, Any], mods: list[Mod] | None = None) -> None:
        self._cfg = copy.deepcopy(dict(cfg))
        tasks.build(self._cfg)
        super().__init__(client_fn=partial(_client, self._cfg), mods=mods)
        self._together = not mods

    def fit_many(self, ins: FitIns, contexts: Sequence[Context]) -> list[FitRes] | None:
        """Train many clients that received the same, at once, as each alone (how exactly: `client_apps.vectorized`).

        Parameters
        ----------
        ins : FitIns
            What each of them received.
        contexts : sequence of Context
            One for each client.

        Returns
        -------
        list of FitRes, or None
            None if they cannot be trained at once, and have to run one by one.

        Raises
        ------
        Exception
            What any of the clients raises; run one by one, only that one will.
        """
        clients = [_client(self._cfg, context) for context in contexts] if self._together else []
        if not clients or not clients[0].task.vectorized or any(c.task is not clients[0].task for c in clients):
            return None
        return _fit_many(clients, ins)


class TaskClient(Client):
    """One client of a task.

    Parameters
    ----------
    task : Task
        Shared by all clients of the process.
    cid : int
        Which client this is, from 0.
    """

    def __init__(self, task: Task, cid: int) -> None:
        self.task = task
        self.cid = cid

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Tell the server which client this is."""
        return GetPropertiesRes(_OK, {"partition-id": self.cid})

    def fit(self, ins: FitIns) -> FitRes:
        """Train the received model on the client's training split.

        Parameters
        ----------
        ins : FitIns
            The global model in state_dict order, and a config that holds `server_round`, an integer from 1.

        Returns
        -------
        FitRes
            The trained arrays, the size of the training split, and `train_loss`, `local_steps`,
            `step_weight` (see `client_apps.training.TrainResult`) and `partition_id`.
        """
        if self.task.vectorized:
            return _fit_many([self], ins)[0]
        server_round = _server_round(ins)
        model = _received(self.task, ins.parameters)
        result = self.task.train(model, self.cid, server_round)
        return _fit_res(self.cid, _encode(list(model.state_dict().values())), result)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate the received model on the client's test split.

        Returns
        -------
        EvaluateRes
            The mean loss, the size of the test split, and `accuracy`, `correct`, `loss_sum` and
            `partition_id`. An empty split gives loss 0, accuracy 0 and 0 examples, so that it weighs
            nothing in an average weighted by examples.
        """
        result = self.task.evaluate(_received(self.task, ins.parameters), [self.cid])
        count, correct, loss = int(result.num_examples[0]), int(result.correct[0]), float(result.loss_sum[0])
        metrics: dict[str, Scalar] = {
            "accuracy": correct / max(count, 1),
            "correct": correct,
            "loss_sum": loss,
            "partition_id": self.cid,
        }
        return EvaluateRes(_OK, loss / max(count, 1), count, metrics)


_OK = Status(Code.OK, "Success")


def _fit_many(clients: Sequence[TaskClient], ins: FitIns) -> list[FitRes]:
    """Train clients of one task that vectorises, all from the same model."""
    server_round = _server_round(ins)
    task = clients[0].task
    state = list(_received(task, ins.parameters).state_dict().values())
    results = task.train_many(state, [client.cid for client in clients], server_round, _encode)
    return [_fit_res(client.cid, *result) for client, result in zip(clients, results, strict=True)]


def _server_round(ins: FitIns) -> int:
    server_round = ins.config.get("server_round")
    if isinstance(server_round, bool) or not isinstance(server_round, int) or server_round < 1:
        raise ConfigError(
            f"The fit config must hold server_round, an integer from 1, not {server_round!r}; "
            "set it in the strategy's on_fit_config_fn."
        )
    return server_round


def _received(task: Task, parameters: Parameters) -> nn.Module:
    model = _model(task)
    set_arrays(model, [decode(data) for data in parameters.tensors])
    return model


def _encode(tensors: Sequence[Tensor]) -> list[bytes]:
    return [encode(tensor.detach().cpu().contiguous().numpy()) for tensor in tensors]


def _fit_res(cid: int, tensors: list[bytes], result: TrainResult) -> FitRes:
    metrics: dict[str, Scalar] = {
        "train_loss": result.train_loss,
        "local_steps": result.local_steps,
        "step_weight": result.step_weight,
        "partition_id": cid,
    }
    return FitRes(_OK, Parameters(tensors, "numpy.ndarray"), result.num_examples, metrics)


def _client(cfg: Mapping[str, Any], context: Context) -> TaskClient:
    _single_thread()
    node = context.node_config
    if data_dir := node.get("data-dir"):  # a real client's data lies where its own machine keeps it
        cfg = {**cfg, "data_dir": data_dir}
    task = tasks.build(cfg)
    cid = node.get("partition-id")
    if isinstance(cid, bool) or not isinstance(cid, int):
        raise ConfigError(
            f"This node has no integer partition-id (it is {cid!r}); start its SuperNode with "
            f"--node-config 'partition-id=0 num-partitions={task.num_clients}'."
        )
    if not 0 <= cid < task.num_clients:
        raise ConfigError(
            f"This node's partition-id={cid} is outside 0..{task.num_clients - 1}, as num_clients is "
            f"{task.num_clients}; raise num_clients or start fewer nodes."
        )
    return TaskClient(task, cid)


def _client_of_run(context: Context) -> TaskClient:
    return _client(_compose(json.dumps(dict(context.run_config), sort_keys=True)), context)


@lru_cache(maxsize=1)
def _compose(run_config: str) -> Mapping[str, Any]:
    """Call the loader named in the run config; only it knows how configurations are composed."""
    values = json.loads(run_config)
    target = values.get("config-loader")
    if not isinstance(target, str) or ":" not in target:
        raise ConfigError(
            f"The run config's config-loader must read 'module:function', not {target!r}; "
            "set it under [tool.flwr.app.config] in pyproject.toml."
        )
    module, _, function = target.partition(":")
    try:
        loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The run config's config-loader {target} cannot be imported ({error}); "
            "correct it under [tool.flwr.app.config] in pyproject.toml."
        ) from error
    composed: Mapping[str, Any] = loader(values)
    return composed


@cache
def _single_thread() -> None:
    """Use one thread from now on: sums then have one order, whatever the number of cores and workers."""
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _model(task: Task) -> nn.Module:
    """Return the one model of this process; every use overwrites all its tensors first."""
    return task.new_model()


app = ClientApp(client_fn=_client_of_run)
