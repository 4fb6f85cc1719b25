"""The Flower ClientApp: one client of a task, in a simulation or on a SuperNode of its own.

It answers servers of both of Flower's APIs (`client_apps.messages`).
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import (
    ArrayRecord,
    Code,
    Context,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    RecordDict,
    Scalar,
    Status,
)
from torch import Tensor, nn

from client_apps import attacks, kept, messages, personal, stale, tasks
from client_apps.arrays import set_arrays
from client_apps.config import at_least_zero, boolean
from client_apps.errors import ConfigError
from client_apps.tasks import Evaluation, Task
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
        Flower's modifiers. They act on one message, so with any of them clients run one by one. They see messages in
        the form in which the server sends them.
    """

    def __init__(self, cfg: Mapping[str, Any], mods: list[Mod] | None = None) -> None:
        self._cfg = copy.deepcopy(dict(cfg))
        tasks.build(self._cfg)
        client_fn = partial(_client, self._cfg)
        super().__init__(client_fn=client_fn, mods=[*(mods or []), _either_api(client_fn)])
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
    state : RecordDict, optional
        What Flower keeps for the client from round to round: its personal model, where the task trains one
        (`client_apps.personal`), and the global model received last, where answers can be stale
        (`client_apps.stale`). By default a state that lives as long as this object.
    """

    def __init__(self, task: Task, cid: int, state: RecordDict | None = None) -> None:
        self.task = task
        self.cid = cid
        self.state = RecordDict() if state is None else state

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Tell the server which client this is."""
        return GetPropertiesRes(_OK, {"partition-id": self.cid})

    def fit(self, ins: FitIns) -> FitRes:
        """Train the received model on the client's training split, and the personal model where there is one.

        Parameters
        ----------
        ins : FitIns
            The global model in state_dict order, and a config that holds

            - `server_round`, an integer from 1;
            - optionally `proximal_mu`, a number of at least 0: FedProx's μ, of the term (μ/2)‖w − w_t‖² that pulls
              to the received model;
            - optionally `initial_loss`, true or false: whether to report the loss before training.

        Returns
        -------
        FitRes
            The trained arrays, the size of the training split, and `train_loss`, `local_steps`,
            `step_weight` (see `client_apps.training.TrainResult`) and `partition_id`. Where asked for
            `initial_loss`, the received model's mean cross-entropy on the whole training split, without augmentation
            or dropout. With Ditto `personal_loss`, the personal training's own `train_loss`. Where
            `client.stale_update` is above 0 also `stale`: 1 where the arrays are the global model received the
            last time instead of the trained one, else 0. All else is then as if they were the trained ones. Where
            `client.attack` is set also `attacked`: 1 from a contaminated client, else 0; its arrays are those of
            `client_apps.attacks`, unless they are stale, and all else is as it was in its training.

        Raises
        ------
        ConfigError
            The config holds something else, or what is kept in `state` is no model of this task.
        """
        if self.task.vectorized:
            return _fit_many([self], ins)[0]
        asked = _asked(ins)
        model = _received(self.task, ins.parameters)
        metrics = _initial_losses(self.task, model, [self], asked)[0]
        received = [tensor.clone() for tensor in model.state_dict().values()] if self.task.personal else []
        mine, last, now = self._personal(model), self._last(model, asked.server_round), _record(self.task, model, ins)
        result = self.task.train(model, self.cid, asked.server_round, asked.proximal_mu)
        trained = _encode(list(model.state_dict().values()))
        if self.task.personal:
            _overwrite(model, received if mine is None else mine)
            of_mine = self.task.train_personal(model, received, self.cid, asked.server_round)
            self._keep(kept.record(model.state_dict(), list(model.state_dict().values())), of_mine, metrics)
        return self._answer(self._sent(trained, ins, metrics), result, metrics, last, now)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate the received model on the client's test split.

        Returns
        -------
        EvaluateRes
            The mean loss, the size of the test split, and the task's metric (`accuracy`), what it is made of
            (`Task.sums`: numbers, and arrays as JSON), `loss_sum` and `partition_id`. An empty split gives loss 0,
            accuracy 0 and 0 examples, so that it weighs nothing in an average weighted by examples. With Ditto the
            same of the personal model, as `personal_accuracy`, `personal_loss_sum` and so on; a client that has
            trained none yet would begin with the received one, and reports that.

        Raises
        ------
        ConfigError
            What is kept in `state` is no personal model of this task.
        """
        model = _received(self.task, ins.parameters)
        result = self.task.evaluate(model, [self.cid])
        count, loss = int(result.num_examples[0]), float(result.loss_sum[0])
        metrics = _reported(self.task, result) | {"partition_id": self.cid}
        if self.task.personal:
            if (mine := self._personal(model)) is not None:
                _overwrite(model, mine)
                result = self.task.evaluate(model, [self.cid])
            metrics |= {f"personal_{key}": value for key, value in _reported(self.task, result).items()}
        return EvaluateRes(_OK, loss / max(count, 1), count, metrics)

    def _personal(self, model: nn.Module) -> list[Tensor] | None:
        return personal.load(self.state, model.state_dict(), self.cid) if self.task.personal else None

    def _keep(self, record: ArrayRecord, result: TrainResult, metrics: dict[str, Scalar]) -> None:
        self.state[personal.KEY] = record
        metrics["personal_loss"] = result.train_loss

    def _last(self, model: nn.Module, server_round: int) -> list[bytes] | None:
        """Return the global model received the last time, where it is the one to answer with."""
        if not stale.drawn(self.task.client.stale_update, self.task.seed, self.cid, server_round):
            return None
        found = stale.load(self.state, model.state_dict(), self.cid)
        return None if found is None else _encode(found)

    def _sent(self, trained: list[bytes], ins: FitIns, metrics: dict[str, Scalar]) -> list[bytes]:
        """Return what the client sends for what it has trained: the same, unless it is contaminated."""
        task = self.task
        if task.client.attack is None:
            return trained
        contaminated = self.cid in task.client.attacking(task.num_clients)
        metrics[attacks.METRIC] = int(contaminated)
        if not contaminated:
            return trained
        received, mine = ([decode(data) for data in tensors] for tensors in (ins.parameters.tensors, trained))
        sent = attacks.contaminate(
            task.client, received, mine, seed=task.seed, cid=self.cid, server_round=_server_round(ins)
        )
        return [encode(array) for array in sent]

    def _answer(
        self,
        trained: list[bytes],
        result: TrainResult,
        metrics: dict[str, Scalar],
        last: list[bytes] | None,
        now: ArrayRecord | None,
    ) -> FitRes:
        """Answer with the model of the last time, if there is one to answer with, and keep that of now, if there is."""
        if now is not None:
            self.state[stale.KEY] = ArrayRecord(dict(now))  # one for each of those who received it
            metrics[stale.METRIC] = int(last is not None)
        return _fit_res(self.cid, trained if last is None else last, result, metrics)


_OK = Status(Code.OK, "Success")


def _fit_many(clients: Sequence[TaskClient], ins: FitIns) -> list[FitRes]:
    """Train clients of one task that vectorises, all from the same model."""
    asked = _asked(ins)
    task = clients[0].task
    model = _received(task, ins.parameters)
    metrics = _initial_losses(task, model, clients, asked)
    state, cids = list(model.state_dict().values()), [client.cid for client in clients]
    mine = [client._personal(model) for client in clients]
    last, now = [client._last(model, asked.server_round) for client in clients], _record(task, model, ins)
    results = task.train_many(state, cids, asked.server_round, _encode, asked.proximal_mu)
    if task.personal:
        take = partial(kept.record, list(model.state_dict()))
        of_mine = task.train_personal_many(state, mine, cids, asked.server_round, take)
        for client, (record, result), its in zip(clients, of_mine, metrics, strict=True):
            client._keep(record, result, its)
    return [
        client._answer(client._sent(trained, ins, its), result, its, before, now)
        for client, (trained, result), its, before in zip(clients, results, metrics, last, strict=True)
    ]


class _Asked(NamedTuple):
    """What a fit config asks for."""

    server_round: int
    proximal_mu: float
    initial_loss: bool


def _asked(ins: FitIns) -> _Asked:
    proximal_mu, initial_loss = ins.config.get("proximal_mu", 0.0), ins.config.get("initial_loss", False)
    at_least_zero("The fit config's proximal_mu", proximal_mu, below=1e9)
    boolean("The fit config's initial_loss", initial_loss)
    return _Asked(_server_round(ins), float(proximal_mu), bool(initial_loss))


def _initial_losses(
    task: Task, model: nn.Module, clients: Sequence[TaskClient], asked: _Asked
) -> list[dict[str, Scalar]]:
    """Return for each client the metric `initial_loss`, or nothing where it is not asked for."""
    if not asked.initial_loss:
        return [{} for _ in clients]
    # One by one: in a pass over all of them, a client's bits could depend on the others.
    found = [task.evaluate(model, [client.cid], "train") for client in clients]
    return [{"initial_loss": float(each.loss_sum[0] / each.num_examples[0])} for each in found]


def _reported(task: Task, result: Evaluation) -> dict[str, Scalar]:
    """Return what one client reports of an evaluation; the server reads it in `experiments.evaluation`."""
    metrics: dict[str, Scalar] = {
        task.metric: float(np.nan_to_num(task.scores(result)[0])),
        "loss_sum": float(result.loss_sum[0]),
    }
    for key in task.sums:
        value = result.sums[key][0]
        metrics[key] = json.dumps(value.tolist()) if value.ndim else value.item()
    return metrics


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


def _record(task: Task, model: nn.Module, ins: FitIns) -> ArrayRecord | None:
    """Return what to keep of the model just received; nothing where no answer can be stale."""
    if not task.client.stale_update:
        return None
    state = model.state_dict()
    return kept.record(state, list(state.values()), ins.parameters.tensors)


def _overwrite(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    for target, source in zip(model.state_dict().values(), tensors, strict=True):
        target.copy_(source)


def _encode(tensors: Sequence[Tensor]) -> list[bytes]:
    return [encode(tensor.detach().cpu().contiguous().numpy()) for tensor in tensors]


def _fit_res(cid: int, tensors: list[bytes], result: TrainResult, more: Mapping[str, Scalar]) -> FitRes:
    metrics: dict[str, Scalar] = {
        "train_loss": result.train_loss,
        "local_steps": result.local_steps,
        "step_weight": result.step_weight,
        "partition_id": cid,
        **more,
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
    return TaskClient(task, cid, context.state)


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


def _single_thread() -> None:
    """Use one thread from now on: sums then have one order, whatever the number of cores and workers."""
    if torch.get_num_threads() != 1:  # somebody else in this process may have changed it since the last client
        torch.set_num_threads(1)


def _names(client: Client) -> list[str]:
    assert isinstance(client, TaskClient)
    return list(_model(client.task).state_dict())


def _either_api(client_fn: Callable[[Context], TaskClient]) -> Mod:
    return partial(messages.answer, client_fn, _names)


@lru_cache(maxsize=1)
def _model(task: Task) -> nn.Module:
    """Return the one model of this process; every use overwrites all its tensors first."""
    return task.new_model()


app = ClientApp(client_fn=_client_of_run, mods=[_either_api(_client_of_run)])
