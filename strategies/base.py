"""UpdateStrategy: the round every method shares: sample, vet, solve, apply, remember.

A method says only which direction the global model moves in (`solve_layer`, or `solve` for the whole
model at once) and what it wants to remember of it. Everything a federated round can do to a server is dealt
with here, once.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import flwr.server.strategy
import numpy as np
import torch
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    MetricsAggregationFn,
    Parameters,
    Scalar,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from torch import Tensor

from .diagnosis import Diagnosis
from .layers import Layer, LayerMap
from .model import GlobalModel, Successor, check_memory, require_layers, warn_of_growth
from .options import is_count, is_integer, is_real, require, resolve_device
from .sampling import ClientSampler, PartitionOrder
from .shares import capped_shares
from .updates import (
    Array,
    ClientUpdates,
    LayerDirection,
    Requirement,
    UnusableTensor,
    check_report,
    one_line,
    shown,
    status_text,
)

logger = logging.getLogger(__name__)

# Reasons listed in the metrics of one round; all of them are in the log.
_REASONS = 20

# A solution of a quadratic program further than this from optimal is worth a warning.
_KKT = 1e-5

_FIT, _EVALUATE = 0, 1  # streams of the sampling generator

# Losses that clients report and their names in the round's metrics; evaluation has a personal_loss of its own.
_LOSSES = {"train_loss": "train_loss", "initial_loss": "initial_loss", "personal_loss": "personal_train_loss"}

# What a metric that a method requires has to be.
_REQUIREMENTS: dict[str, Requirement] = {
    "initial_loss": (lambda value: 0 <= value <= 1e100, "the mean loss before training, a number from 0 to 1e100,"),
    "step_weight": (lambda value: 1e-6 <= value <= 1e9, "the weight of the local steps, a number from 1e-6 to 1e9,"),
    "local_steps": (lambda value: value > 0, "the number of local steps, above 0,"),
    "train_loss": (lambda _: True, "the mean loss of local training, a number,"),
}
_ANY_NUMBER: Requirement = (lambda _: True, "a number")


class RoundsFailed(RuntimeError):
    """Too many rounds in a row left the global model unchanged; `metrics` are those of the last one."""

    def __init__(self, message: str, metrics: Mapping[str, Scalar]) -> None:
        super().__init__(message)
        self.metrics = dict(metrics)


class UpdateStrategy(flwr.server.strategy.FedAvg):
    """Base of all methods: θ_{t+1} = θ_t + server_lr · direction on trainable tensors.

    Floating-point buffers are averaged with the clients' data shares, integer counters take the maximum;
    dtypes and shapes, 0-d ones too, stay as they are.

    Parameters
    ----------
    server_lr : float
        Step along the direction, > 0.
    server_lr_decay : float
        The step of round t is server_lr · server_lr_decay^(t−1); in (0, 1].
    layers : LayerMap, optional
        Which tensors form a layer. None: each floating-point tensor is a layer of its own.
    device : str or torch.device
        Where solves run: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", ...
    seed : int
        Seeds client sampling, ≥ 0. The clients of round t depend on (seed, t) and the clients present only.
    min_completed : int or float, optional
        Usable results below which a round fails and the global model stays: a count (int), or a share of
        the clients sampled (float). Default: half of them.
    max_failed_rounds : int
        This many failed rounds in a row raise `RoundsFailed`.
    partition_order : callable, optional
        Maps clients not seen before to their partition ids, e.g. `strategies.partition_order`. Simulated
        clients have random ids, and only by partition does a seed reproduce a run. None: sort by client id.
    wait_timeout : float
        Seconds without a new client after which waiting for `min_available_clients` ends in
        `NotEnoughClients`.
    max_weight_share : float, optional
        In (0, 1]: no client counts more than this share of a round, whatever number of examples or loss it reports, in
        the weights of the method, buffers, losses. The others keep their proportions; with fewer than 1 / share
        clients all count the same. Weights that a method finds from the updates themselves are not bounded by it.
        `clients_capped` in the metrics.
    clip_to_median : float, optional
        ≥ 1: an update longer than this many times the round's median update is scaled down to that. So is what a client
        made of all floating-point buffers together, and a counter rises at most by this multiple, rounded up, of the
        median rise. The median of an even number is the lower of the two in the middle. One more read of the updates;
        `clients_clipped` in the metrics, names in the log.
    **fedavg
        Keywords of `flwr.server.strategy.FedAvg`: fraction_fit, min_fit_clients, min_available_clients,
        initial_parameters, evaluate_fn, on_fit_config_fn, ... `inplace` has no effect.

    Raises
    ------
    ValueError
        If an option is out of range; one sentence that names it.
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    """The kinds of vectors, (d_q,), a method keeps in `memory`, one of each kind a layer."""

    remembers_rows: ClassVar[tuple[str, ...]] = ()
    """The kinds of matrices, (h, d_q), it keeps there."""

    requires: tuple[str, ...] = ()
    """The metrics without which a client's result is rejected: initial_loss, step_weight, local_steps, train_loss.

    Any other key may be named too, and has to be a finite number. Clients are asked for `initial_loss` in the fit
    config where it is among them.
    """

    individual: bool = True
    """Whether the method needs each client's own update; False: no more than their weighted mean.

    Secure aggregation hands over that mean only, and a method that needs more refuses to run on it. With
    `max_weight_share` or `clip_to_median` all need more.
    """

    def __init__(
        self,
        *,
        server_lr: float = 1.0,
        server_lr_decay: float = 1.0,
        layers: LayerMap | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        min_completed: int | float | None = None,
        max_failed_rounds: int = 5,
        partition_order: PartitionOrder | None = None,
        wait_timeout: float = 60.0,
        max_weight_share: float | None = None,
        clip_to_median: float | None = None,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        require("server_lr", server_lr, "a finite number above 0", is_real(server_lr) and server_lr > 0)
        require("server_lr_decay", server_lr_decay, "in (0, 1]", is_real(server_lr_decay) and 0 < server_lr_decay <= 1)
        require("seed", seed, "an integer of at least 0", is_integer(seed) and seed >= 0)
        require("max_failed_rounds", max_failed_rounds, "an integer of at least 1", is_count(max_failed_rounds))
        require("wait_timeout", wait_timeout, "a number of seconds", is_real(wait_timeout) and wait_timeout >= 0)
        require("layers", layers, "a LayerMap, e.g. LayerMap.from_module(model)", isinstance(layers, LayerMap | None))
        fine = max_weight_share is None or (is_real(max_weight_share) and 0 < max_weight_share <= 1)
        require("max_weight_share", max_weight_share, "a share in (0, 1], or None", fine)
        fine = clip_to_median is None or (is_real(clip_to_median) and clip_to_median >= 1)
        require("clip_to_median", clip_to_median, "a number of at least 1, or None", fine)
        if min_completed is not None:
            share = not is_integer(min_completed) and is_real(min_completed) and 0 <= min_completed <= 1
            wanted = "a count of at least 1, or a share of the sampled clients as a float in [0, 1]"
            require("min_completed", min_completed, wanted, share or is_count(min_completed))
        require("accept_failures", self.accept_failures, "true or false", isinstance(self.accept_failures, bool))
        for name in ("fraction_fit", "fraction_evaluate"):
            require(name, getattr(self, name), "a share in [0, 1]", is_real(v := getattr(self, name)) and 0 <= v <= 1)
        self.server_lr = server_lr
        self.server_lr_decay = server_lr_decay
        self.layers = layers
        self.device = resolve_device(device)
        self.min_completed = min_completed
        self.max_failed_rounds = max_failed_rounds
        self.max_weight_share = None if max_weight_share is None else float(max_weight_share)
        self.clip_to_median = None if clip_to_median is None else float(clip_to_median)
        if max_weight_share is not None or clip_to_median is not None:
            self.individual = True
        self.sampler = ClientSampler(int(seed), partition_order, wait_timeout)

        self.memory: dict[str, Tensor] = {}
        """What the method remembers between rounds: vectors (d_q,), or matrices (h, d_q), by "<kind>/<layer name>"."""
        self.records: dict[str, Any] = {}
        """What else it remembers: anything that JSON can hold."""
        self._round = 0  # the last round aggregated, counted over resumed runs too
        self._offset: int | None = 0  # added to Flower's round number; None: find out at the next call
        self._failed_rounds = 0
        self._reasons: list[str] = []  # why clients of the last round are not used
        self._sampled: int | None = None
        self._model: GlobalModel | None = None  # θ_t
        self._start_norm: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(server_lr={self.server_lr})"

    # ---- what a method provides -------------------------------------------------------------------------

    def solve_layer(self, updates: ClientUpdates, layer: Layer) -> LayerDirection:
        """Return the direction in which one layer moves.

        Raises
        ------
        ArithmeticError
            If there is no usable direction: the round fails with its message, and the model stays.
        """
        raise NotImplementedError(f"{type(self).__name__} must override solve_layer or solve.")

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Yield the direction of each layer, in the order of `updates.layers.layers`.

        A method that looks at the whole model before it moves any layer overrides this.
        """
        for layer in updates.layers.layers:
            yield self.solve_layer(updates, layer)

    def step_size(self, number: int) -> float:
        """Return how far to go along round `number`'s directions: server_lr · server_lr_decay^(number−1)."""
        return self.server_lr * self.server_lr_decay ** (number - 1)

    def identities(self, updates: ClientUpdates) -> list[str]:
        """Return under which names to remember this round's clients, in canonical order.

        The partition where it is known, since simulated nodes have other ids in a resumed run; else the client's id.
        """
        return [self.sampler.identity(cid) for cid in updates.clients]

    def shares(self, updates: ClientUpdates) -> Tensor:
        """Return what each client counts in buffers, (m,), float64: ρ; who has 0 is left out, of counters too."""
        return updates.weights

    def merge_buffer(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Return a floating-point buffer's next value from the clients', in canonical order: the mean by `shares`."""
        mean = np.zeros(tensors[0].shape, np.float64)
        for share, tensor in zip(self.shares(updates).tolist(), tensors, strict=True):
            if share:
                mean += share * tensor
        return mean

    def merge_counter(self, updates: ClientUpdates, tensors: Sequence[Array]) -> Array:
        """Return an integer counter's next value from the clients', in canonical order: the largest."""
        counted = [tensor for share, tensor in zip(self.shares(updates).tolist(), tensors, strict=True) if share]
        return np.asarray(np.maximum.reduce(counted))

    def conclude(self, updates: ClientUpdates) -> None:
        """Do what a method does once a round has moved the model: change `memory` and `records`."""

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Raise ValueError, in one sentence, if a saved state's `records` and `memory` are not this method's."""
        require("the state's records", records, "empty for this strategy", not records)

    def check_memory(self, memory: object) -> dict[str, Tensor]:
        """Return a saved state's `memory` on `device`; raise ValueError, in one sentence, if it is another method's."""
        return check_memory(memory, self.remembers, self.remembers_rows, self.device)

    def check_layers(self, layers: LayerMap, memory: dict[str, Tensor]) -> None:
        """Raise ValueError, in one sentence, if what is remembered does not fit a model with these layers."""
        require_layers(layers, memory, self.remembers_rows)

    def fit_config(self) -> dict[str, Scalar]:
        """Return what clients are told besides the round's number."""
        return {"initial_loss": True} if "initial_loss" in self.requires else {}

    def more_metrics(self) -> dict[str, Scalar]:
        """Return what else the metrics of a round that has moved the model say; after `conclude`."""
        return {}

    def sent_to(self, cid: str, parameters: Parameters) -> Parameters:
        """Return what a client receives for this model, to train on and to evaluate: the model itself.

        A method that has weights of each client's own returns those; what a client sends back is compared with the
        global model all the same.
        """
        return parameters

    def evaluated(self, parameters: Parameters) -> Parameters:
        """Return the model to evaluate and to deploy: the global model itself, except where a method says otherwise."""
        return parameters

    # ---- sampling -----------------------------------------------------------------------------------------

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the initial global model, and keep it: it is θ_t until the first round is configured."""
        return self.initial_parameters

    def num_fit_clients(self, num_available_clients: int) -> tuple[int, int]:
        """Return how many clients to train on, and how many must be connected first."""
        size = max(_share(self.fraction_fit, num_available_clients), self.min_fit_clients)
        return size, max(self.min_available_clients, self.min_fit_clients)

    def num_evaluation_clients(self, num_available_clients: int) -> tuple[int, int]:
        """Return how many clients to evaluate on, and how many must be connected first."""
        size = max(_share(self.fraction_evaluate, num_available_clients), self.min_evaluate_clients)
        return size, self.min_available_clients

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Take `parameters` as θ_t and choose the clients that train on it.

        The config sent is `on_fit_config_fn`'s with two additions that win over it: `server_round`, the round's
        number counted over resumed runs, and what the method's `fit_config` asks of clients.

        Raises
        ------
        NotEnoughClients
            If the clients required are not connected and none has joined for `wait_timeout` seconds.
        ValueError
            If `parameters` cannot be read, are not finite or do not fit `layers`.
        """
        number = self._number(server_round)
        self._set_model(parameters)
        clients = self.sampler.draw(client_manager, self.num_fit_clients, stream=_FIT, number=number)
        self._sampled = len(clients)
        config: dict[str, Scalar] = {}
        if self.on_fit_config_fn is not None:
            config.update(self.on_fit_config_fn(number) or {})
        config.update(self.fit_config(), server_round=number)
        common = FitIns(parameters, config)
        theirs = [self.sent_to(client.cid, parameters) for client in clients]
        return [
            (client, common if its is parameters else FitIns(its, config))
            for client, its in zip(clients, theirs, strict=True)
        ]

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Call `evaluate_fn`, if there is one, with the round's number counted over resumed runs."""
        return super().evaluate(self._number_of_finished(server_round), self.evaluated(parameters))

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Choose the clients that evaluate the global model; none if `fraction_evaluate` is 0."""
        if self.fraction_evaluate == 0.0:
            return []
        number = self._number_of_finished(server_round)
        clients = self.sampler.draw(client_manager, self.num_evaluation_clients, stream=_EVALUATE, number=number)
        if len(clients) < self.min_evaluate_clients:
            logger.warning("round %d: %d clients are too few to evaluate on", number, len(clients))
            return []
        config: dict[str, Scalar] = {"server_round": number}
        if self.on_evaluate_config_fn is not None:
            config.update(self.on_evaluate_config_fn(number) or {})
        shown = self.evaluated(parameters)
        common = EvaluateIns(shown, config)
        theirs = [self.sent_to(client.cid, shown) for client in clients]
        return [
            (client, common if its is shown else EvaluateIns(its, config))
            for client, its in zip(clients, theirs, strict=True)
        ]

    # ---- aggregation --------------------------------------------------------------------------------------

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Move the global model by the clients' updates.

        Parameters
        ----------
        server_round : int
        results : list of (ClientProxy, FitRes)
            In any order; what cannot be used is rejected, logged and counted.
        failures : list
            Clients that sent no result.

        Returns
        -------
        (Parameters, dict)
            θ_{t+1}, or θ_t where the round failed (`failed_round` in the metrics, with `failed_reason`).

        Raises
        ------
        RoundsFailed
            After `max_failed_rounds` failed rounds in a row.
        ValueError
            If there is no global model yet: neither `configure_fit` was called nor `initial_parameters` given. If
            all results share one model, as secure aggregation leaves them, and the method needs `individual` ones.
        """
        began = time.perf_counter()
        number = self._number(server_round)
        self._round = number
        model = self._require_model()
        sampled = self._sampled if self._sampled is not None else len(results) + len(failures)
        self._sampled = None
        if self.individual and _share_one_model(results):
            options = [x for x in ("max_weight_share", "clip_to_median") if getattr(self, x) is not None]
            method = " with ".join([type(self).__name__, *([" and ".join(options)] if options else [])])
            raise ValueError(
                f"all {len(results)} results share one model, as under secure aggregation, and {method} needs each "
                "client's own update; run it without secure aggregation, or choose what needs the mean only, such as "
                "plain FedAvg."
            )
        updates = ClientUpdates(
            results,
            model.arrays,
            model.layers,
            device=self.device,
            order=self.sampler.order,
            requires={key: _REQUIREMENTS.get(key, _ANY_NUMBER) for key in self.requires},
            max_weight_share=self.max_weight_share,
            clip_to_median=self.clip_to_median,
        )
        metrics: dict[str, Scalar] = {
            "clients_sampled": sampled,
            "clients_accepted": len(updates),
            "clients_rejected": len(updates.rejected),
            "clients_failed": len(failures),
            "failed_round": False,
        }
        self._report_losses(number, updates, failures, metrics)
        self._report_limits(number, updates, metrics)

        needed = self._needed(sampled)
        if failures and not self.accept_failures:
            return self._fail(metrics, began, f"{len(failures)} clients failed and accept_failures is off")
        if len(updates) < needed:
            return self._fail(
                metrics, began, f"{len(updates)} usable results of {sampled} clients sampled, {needed} needed"
            )
        try:
            successor, memory = self._step(number, model, updates, metrics)
        except FloatingPointError as error:
            advice = f"lower server_lr (now {self.server_lr:g}) or the clients' learning rate"
            return self._fail(metrics, began, f"{error}: the run diverges; {advice}")
        except ArithmeticError as error:
            return self._fail(metrics, began, str(error))
        pairs = list(zip(updates.num_examples, updates.metrics, strict=True))
        metrics.update(_users_metrics("fit_metrics_aggregation_fn", self.fit_metrics_aggregation_fn, number, pairs))
        self.memory.update(memory)
        self._failed_rounds = 0
        self._model = successor
        self.conclude(updates)
        metrics.update(self.more_metrics())
        metrics["aggregate_seconds"] = time.perf_counter() - began
        return successor.parameters, metrics

    def _step(
        self, number: int, model: GlobalModel, updates: ClientUpdates, metrics: dict[str, Scalar]
    ) -> tuple[GlobalModel, dict[str, Tensor]]:
        """Return θ_{t+1} and what to remember; raise FloatingPointError if it is not finite."""
        step = self.step_size(number)
        successor = Successor(model)
        memory: dict[str, Tensor] = {}
        diagnosis = Diagnosis(updates.weights)
        for layer, direction in zip(model.layers.layers, self.solve(updates), strict=True):
            diagnosis.add(direction)
            memory.update({f"{kind}/{layer.name}": tensor for kind, tensor in direction.memory.items()})
            successor.move(layer, step * direction.vector)
        moved = successor.finish(updates, self.merge_buffer, self.merge_counter)
        if self._start_norm is None:
            self._start_norm = model.norm
        warn_of_growth(moved.norm, self._start_norm, self.server_lr)
        metrics.update(diagnosis.metrics(), parameter_norm=moved.norm)
        if float(metrics.get("kkt", 0.0)) > _KKT:
            logger.warning(
                "round %d: a quadratic program was solved to a KKT residual of %.1g only", number, metrics["kkt"]
            )
        return moved, memory

    def _needed(self, sampled: int) -> int:
        if is_integer(self.min_completed):
            return int(self.min_completed)
        share = 0.5 if self.min_completed is None else float(self.min_completed)
        return max(1, math.ceil(share * sampled - 1e-9))

    def _fail(
        self, metrics: dict[str, Scalar], began: float, reason: str
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Leave θ_t as it is, say why, and raise if this has happened too often in a row."""
        self._failed_rounds += 1
        logger.warning("round %d failed: %s; the global model stays", self._round, reason)
        metrics.update(failed_round=True, failed_reason=reason, aggregate_seconds=time.perf_counter() - began)
        if self._failed_rounds >= self.max_failed_rounds:
            why = "; ".join([reason, *self._reasons[:3]])
            raise RoundsFailed(f"{self._failed_rounds} rounds in a row failed, the last one: {why}.", metrics)
        return self._model.parameters if self._model else None, metrics

    def _report_losses(
        self,
        number: int,
        updates: ClientUpdates,
        failures: Sequence[tuple[ClientProxy, FitRes] | BaseException],
        metrics: dict[str, Scalar],
    ) -> None:
        """Log every client that is not used, and put the reasons and the clients' losses into the metrics."""
        failed = [_reason(failure) for failure in failures]
        for rejection in updates.rejected:
            logger.warning("round %d: rejected %s", number, rejection)
        for reason in failed:
            logger.warning("round %d: failed %s", number, reason)
        if updates.rejected:
            metrics["rejection_reasons"] = json.dumps([str(r) for r in updates.rejected[:_REASONS]])
        if failed:
            metrics["failure_reasons"] = json.dumps(failed[:_REASONS])
        self._reasons = [*(str(r) for r in updates.rejected), *failed]
        for key, name in _LOSSES.items():
            losses = [(n, float(m[key])) for n, m in zip(updates.num_examples, updates.metrics, strict=True)
                      if is_real(m.get(key))]  # fmt: skip
            if losses:
                metrics[name] = self._mean(*zip(*losses, strict=True))

    def _mean(self, sizes: Sequence[int], values: Sequence[float]) -> float:
        """Return the clients' mean by what each counts."""
        shares, _ = capped_shares(sizes, self.max_weight_share)
        mean = sum(share * value for share, value in zip(shares, values, strict=True))
        return max(min(mean, max(values)), min(values))  # rounding may leave it, and all numbers, behind

    def _report_limits(self, number: int, updates: ClientUpdates, metrics: dict[str, Scalar]) -> None:
        """Log whose share or update was cut, where that was asked for, and count them."""
        if self.max_weight_share is not None:
            metrics["clients_capped"] = len(updates.capped)
            for cid in updates.capped:
                logger.info("round %d: %s", number, one_line(f"client {cid} counts less than its number of examples"))
        if self.clip_to_median is not None:
            metrics["clients_clipped"] = len(updates.clipped)
            for cid, note in updates.clipped.items():
                logger.info("round %d: %s", number, one_line(f"clipped client {cid}: {note}"))

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Average the clients' losses by their number of examples, in canonical order.

        Results without examples, with a status other than OK or a loss that is not finite, and further results
        of one client are left out and logged. `max_weight_share` holds here, too; `evaluate_metrics_aggregation_fn`
        gets the numbers of examples as the clients said them.
        """
        number = self._number_of_finished(server_round)
        for failure in failures:
            logger.warning("round %d: evaluation failed %s", number, _reason(failure))
        usable: dict[str, tuple[int, float, dict[str, Scalar]]] = {}
        for client, res in sorted(results, key=lambda pair: self.sampler.order(pair[0].cid)):
            if is_integer(res.num_examples) and res.num_examples == 0:  # it has nothing to test on
                continue
            try:
                check_report(res)
                if not is_real(res.loss):
                    raise UnusableTensor(f"its loss is {shown(res.loss)}")
                if client.cid in usable:
                    raise UnusableTensor("it sent more than one; the first is used")
            except UnusableTensor as error:
                reason = one_line(f"evaluation of client {client.cid} is not used: {error}")
                logger.warning("round %d: %s", number, reason)
                continue
            usable[client.cid] = int(res.num_examples), float(res.loss), dict(res.metrics or {})
        if not usable or (failures and not self.accept_failures):
            return None, {}
        sizes, losses, reported = zip(*usable.values(), strict=True)
        pairs = list(zip(sizes, reported, strict=True))
        evaluated = self.evaluate_metrics_aggregation_fn
        return self._mean(sizes, losses), _users_metrics("evaluate_metrics_aggregation_fn", evaluated, number, pairs)

    # ---- the global model and the round number -----------------------------------------------------------

    def _number(self, server_round: int) -> int:
        """Round number counted over resumed runs; Flower starts at 1 each time."""
        if self._offset is None:
            # After load_state_dict a caller may go on counting, or start at 1 as Flower does.
            self._offset = self._round + 1 - server_round
        return server_round + self._offset

    def _number_of_finished(self, server_round: int) -> int:
        """Number of a round that is over, or, before the first after `load_state_dict`, of the one resumed from."""
        return self._round if self._offset is None else server_round + self._offset

    def _set_model(self, parameters: Parameters) -> GlobalModel:
        if self._model is None or parameters is not self._model.parameters:
            model = GlobalModel(parameters, self.layers)
            self.check_layers(model.layers, self.memory)
            self._model = model
        return self._model

    def _require_model(self) -> GlobalModel:
        if self._model is not None:
            return self._model
        if self.initial_parameters is None:
            raise ValueError(
                "there is no global model to update: pass initial_parameters, or call configure_fit before "
                "aggregate_fit."
            )
        return self._set_model(self.initial_parameters)

    # ---- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the global model.

        Returns
        -------
        dict
            `strategy` (str), `round` (int), `failed_rounds` (int), `start_norm` (float or None), `records` (a
            dict) and `memory`, a dict of CPU tensors. Everything but `memory` is JSON; `memory` goes into a
            safetensors file as it is.
        """
        return {
            "strategy": type(self).__name__,
            "round": self._round,
            "failed_rounds": self._failed_rounds,
            "start_norm": self._start_norm,
            "records": copy.deepcopy(self.records),
            "memory": {name: tensor.detach().cpu().clone() for name, tensor in self.memory.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the next round continues its count.

        Raises
        ------
        ValueError
            If the state is another strategy's, lacks an entry, or does not fit the model.
        """
        missing = {"strategy", "round", "failed_rounds", "start_norm", "records", "memory"} - set(state)
        if missing:
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned.")
        if state["strategy"] != type(self).__name__:
            raise ValueError(
                f"the state belongs to {state['strategy']}, this is {type(self).__name__}; "
                "resume with the strategy that was saved."
            )
        number, failed, start_norm = state["round"], state["failed_rounds"], state["start_norm"]
        require("the state's round", number, "an integer of at least 0", is_integer(number) and number >= 0)
        require("the state's failed_rounds", failed, "an integer of at least 0", is_integer(failed) and failed >= 0)
        require("the state's start_norm", start_norm, "a number or None", start_norm is None or is_real(start_norm))
        records = state["records"]
        require("the state's records", records, "a dict", isinstance(records, Mapping))
        memory = self.check_memory(state["memory"])
        self.check_state(records, memory)
        if self._model is None and self.initial_parameters is not None:
            self._set_model(self.initial_parameters)
        if self._model is not None:  # otherwise the first model that comes is checked
            self.check_layers(self._model.layers, memory)
        self.memory, self.records = memory, copy.deepcopy(dict(records))
        self._round, self._failed_rounds, self._start_norm = int(number), int(failed), start_norm
        self._offset = None


def _share(fraction: float, available: int) -> int:
    """⌊fraction · available⌋, robust to fractions such as 7/30 that are not exact in binary."""
    return math.floor(fraction * available + 1e-9)


def _share_one_model(results: Sequence[tuple[ClientProxy, FitRes]]) -> bool:
    """Say whether several clients' results are one object, which no client's replies can be."""
    clients = {proxy.cid for proxy, _ in results}
    models = {id(res.parameters) for _, res in results}
    return len(clients) > 1 and len(models) == 1 and isinstance(results[0][1].parameters, Parameters)


def _reason(failure: tuple[ClientProxy, Any] | BaseException) -> str:
    if isinstance(failure, BaseException):
        text = f"{type(failure).__name__}: {failure}"
    else:
        client, res = failure
        text = f"client {client.cid}: {status_text(res)}"
    return one_line(text)


def _users_metrics(
    name: str, aggregate: MetricsAggregationFn | None, number: int, pairs: list[tuple[int, dict[str, Scalar]]]
) -> dict[str, Scalar]:
    """Return what a user's function makes of the clients' metrics; a client that sends odd ones must not end the run.

    Nothing, and logged, where it raises.
    """
    if aggregate is None:
        return {}
    try:
        return dict(aggregate(pairs) or {})
    except Exception as error:  # noqa: BLE001  it meets whatever clients send
        words = one_line(f"{type(error).__name__}: {error}")
        logger.warning("round %d: %s failed, and its metrics are missing: %s", number, name, words)
        return {}
