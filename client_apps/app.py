"""The Flower ClientApp: one client of a task, in a simulation or on a SuperNode of its own."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any

import torch
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context, NDArrays, Scalar
from torch import nn

from client_apps import tasks
from client_apps.arrays import get_arrays, set_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import Task


def make_client_app(cfg: Mapping[str, Any]) -> ClientApp:
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
    cfg = copy.deepcopy(dict(cfg))
    tasks.build(cfg)
    return ClientApp(client_fn=partial(_client, cfg))


class TaskClient(NumPyClient):
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

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Tell the server which client this is."""
        return {"partition-id": self.cid}

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the received model on the client's training split.

        Parameters
        ----------
        parameters : list of ndarray
            The global model in state_dict order.
        config : dict
            Must hold `server_round`, an integer from 1.

        Returns
        -------
        tuple
            The trained arrays, the size of the training split, and `train_loss`, `local_steps`,
            `step_weight` (see `client_apps.training.TrainResult`) and `partition_id`.
        """
        server_round = config.get("server_round")
        if isinstance(server_round, bool) or not isinstance(server_round, int) or server_round < 1:
            raise ConfigError(
                f"The fit config must hold server_round, an integer from 1, not {server_round!r}; "
                "set it in the strategy's on_fit_config_fn."
            )
        model = _model(self.task)
        set_arrays(model, parameters)
        result = self.task.train(model, self.cid, server_round)
        metrics: dict[str, Scalar] = {
            "train_loss": result.train_loss,
            "local_steps": result.local_steps,
            "step_weight": result.step_weight,
            "partition_id": self.cid,
        }
        return get_arrays(model), result.num_examples, metrics

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the received model on the client's test split.

        Returns
        -------
        tuple
            The mean loss, the size of the test split, and `accuracy`, `correct`, `loss_sum` and
            `partition_id`. An empty split gives loss 0, accuracy 0 and 0 examples, so that it weighs
            nothing in an average weighted by examples.
        """
        model = _model(self.task)
        set_arrays(model, parameters)
        result = self.task.evaluate(model, [self.cid])
        count, correct, loss = int(result.num_examples[0]), int(result.correct[0]), float(result.loss_sum[0])
        metrics: dict[str, Scalar] = {
            "accuracy": correct / max(count, 1),
            "correct": correct,
            "loss_sum": loss,
            "partition_id": self.cid,
        }
        return loss / max(count, 1), count, metrics


def _client(cfg: Mapping[str, Any], context: Context) -> Client:
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
    return TaskClient(task, cid).to_client()


def _client_of_run(context: Context) -> Client:
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
