"""FedRef: the aggregate is fine-tuned on the server, by a MAP estimate that is pulled to past global models.

Yoon, Choi, De Neve, "FedRef: Communication-Efficient Bayesian Fine-Tuning using a Reference Model", arXiv 2506.23210.
Clients train as with FedAvg. With θ_r the model they received, θ_agg their mean and θ_ref the mean of the last p global
models, the newest heaviest, the next one is (θ_agg/η + λ_g θ_r + λ_ref θ_ref) / (1/η + λ_g + λ_ref); see
`strategies.solvers.fedref`. It costs a pass over p + 1 models, and nothing on the clients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from flwr.common import FitIns, Parameters
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from torch import Tensor, nn

from .base import UpdateStrategy
from .layers import Layer
from .options import is_count, is_real, require, require_choice
from .proxy import ProxyLikelihood
from .solvers import fedref
from .updates import ClientUpdates, LayerDirection
from .window import KIND, ModelWindow, check_window

GATES = ("always", "loss")
SOLVERS = ("closed", "gradient")
LIKELIHOODS = ("surrogate", "proxy")
_PROXY_LR = 0.01


class FedRef(UpdateStrategy):
    """FedAvg with Bayesian fine-tuning on the server.

    The window holds the models of finished rounds, not the untrained one, so the first p rounds are plain FedAvg.

    With the closed form, η and the λ say how far the next model lies from the aggregate: a = (1/η)/(1/η + λ_g + λ_ref)
    of the aggregated update is kept, and the model goes the share b = λ_ref/(1/η + λ_g + λ_ref) of the way from θ_r to
    θ_ref. `reference_ratio` in the metrics is what that means in a round: ‖b(θ_ref − θ_r)‖ / ‖a Σρ_i g_i‖.

    With `window=1` the reference is θ_r itself, so λ_ref and λ_g are one.

    The window is in `state_dict()` with everything else, and so in memory while a run is saved or resumed, also where
    it lies on disk otherwise.

    Parameters
    ----------
    window : int
        p ≥ 1 past global models (authors: 1, 3, 5, 7). Each costs the model's size in float32 (float64 where a layer
        is wider).
    lambda_global : float
        λ_g ≥ 0, the pull to the model that clients received.
    lambda_ref : float
        λ_ref ≥ 0, the pull to the reference, in the first rounds. With λ_g = λ_ref = 0 this is FedAvg, bit for bit.
    eta : float
        η ≥ 1e-300 of the likelihood's surrogate ‖θ − θ_agg‖²/(2η); only η λ_g and η λ_ref matter with the closed form.
    ref_every, ref_growth, ref_max : int, float, float
        λ_ref is multiplied by `ref_growth` ≥ 1 after every `ref_every` rounds; it never exceeds `ref_max` (None: no
        cap), which holds from the first round on.
    gate : {"always", "loss"}
        Fine-tune in every round, or only where the clients' mean `train_loss`, which is needed then, has risen by more
        than `gate_delta` over the last finished round; other rounds are FedAvg's.
    gate_delta : float
        δ ≥ 0.
    solver : {"closed", "gradient"}
        The minimiser itself, or `server_steps` gradient steps of length `server_lr` from the aggregate.
    server_steps : int
        Gradient steps a round.
    server_lr : float, optional
        With `solver="gradient"` the length of a gradient step; below 2/(1/η + λ_g + λ_ref) they converge to the closed
        form. By default half of that at the highest λ_ref, and .01 with proxy data. With the closed form as for every
        strategy: θ_r moves by this share of the way to the estimate, by default 1.
    server_lr_decay : float
        Factor on `server_lr` per round.
    likelihood : {"surrogate", "proxy"}
        The quadratic around the aggregate, or gradients of a loss on data that the server owns (with
        `solver="gradient"`; η is not used).
    proxy_model : torch.nn.Module
        For `likelihood="proxy"`: a model whose state_dict has the exchanged tensors in their order. It is overwritten,
        and used in the mode (train, eval) and on the device it is in; elsewhere than `device` each step moves a model.
    proxy_data : iterable
        Its batches, one a step, from the beginning in every round and again when they end; e.g. a DataLoader. One that
        shuffles is seeded by the round.
    proxy_loss : callable
        proxy_loss(model, batch) returns a differentiable scalar; moving the batch to the model's device is its own job.
    window_memory_mb : float
        Above this size, in 10^6 bytes, the window lies on disk, in the system's temporary folder.
    **common
        Keywords of `UpdateStrategy`.

    Raises
    ------
    ValueError
        If an option is out of range, or gradient steps would diverge.
    """

    remembers_rows = (KIND,)
    individual = False

    def __init__(
        self,
        *,
        window: int = 5,
        lambda_global: float = 0.0,
        lambda_ref: float = 0.1,
        eta: float = 1.0,
        ref_every: int = 10,
        ref_growth: float = 1.0,
        ref_max: float | None = None,
        gate: Literal["always", "loss"] = "always",
        gate_delta: float = 0.0,
        solver: Literal["closed", "gradient"] = "closed",
        server_steps: int = 10,
        server_lr: float | None = None,
        likelihood: Literal["surrogate", "proxy"] = "surrogate",
        proxy_model: nn.Module | None = None,
        proxy_data: Iterable[Any] | None = None,
        proxy_loss: Callable[[nn.Module, Any], Tensor] | None = None,
        window_memory_mb: float = 4000.0,
        **common: Any,
    ) -> None:
        super().__init__(server_lr=1.0 if server_lr is None else server_lr, **common)
        require("window", window, "an integer of at least 1", is_count(window))
        for name, value in (("lambda_global", lambda_global), ("lambda_ref", lambda_ref)):
            require(name, value, "a number of at least 0", value == math.inf or (is_real(value) and value >= 0))
        require("gate_delta", gate_delta, "a number of at least 0", is_real(gate_delta) and gate_delta >= 0)
        require("eta", eta, "a number of at least 1e-300", is_real(eta) and eta >= 1e-300)
        require("ref_every", ref_every, "an integer of at least 1", is_count(ref_every))
        require("ref_growth", ref_growth, "a number of at least 1", is_real(ref_growth) and ref_growth >= 1)
        require("ref_max", ref_max, "a number of at least 0", ref_max is None or (is_real(ref_max) and ref_max >= 0))
        require_choice("gate", gate, GATES)
        require_choice("solver", solver, SOLVERS)
        require("server_steps", server_steps, "an integer of at least 1", is_count(server_steps))
        require_choice("likelihood", likelihood, LIKELIHOODS)
        fine = is_real(window_memory_mb) and window_memory_mb >= 0
        require("window_memory_mb", window_memory_mb, "a number of at least 0", fine)
        self.lambda_global = float(lambda_global)
        self.lambda_ref = float(lambda_ref)
        self.eta = float(eta)
        self.ref_every = int(ref_every)
        self.ref_growth = float(ref_growth)
        self.ref_max = None if ref_max is None else float(ref_max)
        self.gate = gate
        self.gate_delta = float(gate_delta)
        self.solver = solver
        self.server_steps = int(server_steps)
        self.likelihood = likelihood
        self.window = int(window)
        self.window_memory_mb = float(window_memory_mb)
        self._window = ModelWindow(self, self.window, self.window_memory_mb)
        self.records["previous_loss"] = []  # of the last finished round, where all clients told theirs
        if gate == "loss":
            self.requires = ("train_loss",)
        self._proxy: ProxyLikelihood | None = None
        parts = (proxy_model, proxy_data, proxy_loss)
        if likelihood == "proxy":
            require(
                "solver", solver, "gradient with likelihood='proxy', which has no closed form", solver == "gradient"
            )
            self._proxy = ProxyLikelihood(*parts)
        elif any(part is not None for part in parts):
            raise ValueError("proxy_model, proxy_data and proxy_loss are only used with likelihood='proxy'; set it.")
        if solver == "gradient":
            self._set_server_lr(server_lr)

    def _set_server_lr(self, given: float | None) -> None:
        """Check the length of gradient steps, or choose it: Newton's step where λ_ref is highest."""
        if self._proxy is not None:
            self.server_lr = _PROXY_LR if given is None else self.server_lr
            return
        if self.ref_growth > 1 and self.ref_max is None:
            raise ValueError("ref_max=None must be a number with solver='gradient' and ref_growth above 1.")
        highest = self.lambda_in(1) if self.ref_growth == 1 else self._highest
        limit = fedref.largest_step(eta=self.eta, lambda_global=self.lambda_global, lambda_ref=highest)
        require("solver", self.solver, "closed with an infinite λ, which no gradient step can follow", limit > 0)
        if given is None:
            self.server_lr = limit / 2
            return
        wanted = f"below 2/(1/eta + lambda_global + λ_ref), {limit:.4g} where λ_ref={highest:.4g}, or steps diverge"
        require("server_lr", given, wanted, given < limit)

    @property
    def _highest(self) -> float:
        """The cap of λ_ref, or what numbers can hold."""
        return math.inf if self.ref_max is None else self.ref_max

    def lambda_in(self, number: int) -> float:
        """Return λ_ref of round `number`, from 1: min(ref_max, lambda_ref · ref_growth^⌊(number − 1)/ref_every⌋)."""
        try:
            grown = self.lambda_ref * self.ref_growth ** ((number - 1) // self.ref_every)
        except OverflowError:  # long after every cap is reached
            grown = sys.float_info.max if self.lambda_ref else 0.0
        return min(grown, self._highest)

    def step_size(self, number: int) -> float:
        """Return 1 with gradient steps, whose length `server_lr` is."""
        return 1.0 if self.solver == "gradient" else super().step_size(number)

    def solve(self, updates: ClientUpdates) -> Iterator[LayerDirection]:
        """Yield the MAP estimate less θ_r, or the mean update where the round is not fine-tuned."""
        layers = updates.layers.layers
        tuned, lambda_ref = self._fine_tunes(updates), self.lambda_in(self._round)
        report = {"lambda_ref": self._scalar(lambda_ref), "fine_tuned": self._scalar(tuned)}
        if not tuned:
            for layer in layers:
                yield updates.combine(layer, updates.weights).reporting(**report)
            return
        if self._proxy is not None:
            directions = self._by_proxy(self._proxy, updates, lambda_ref)
        elif self.solver == "gradient":
            directions = (self._by_steps(updates, layer, lambda_ref) for layer in layers)
        else:
            directions = self._closed(updates, lambda_ref)
        for direction in directions:
            yield direction.reporting(**report)

    def _closed(self, updates: ClientUpdates, lambda_ref: float) -> Iterator[LayerDirection]:
        """Yield the closed form of each layer, in coordinates around θ_r: one read of the updates makes it."""
        weights = fedref.map_weights(eta=self.eta, lambda_global=self.lambda_global, lambda_ref=lambda_ref)
        pull, step = self._scalar(0), self._scalar(0)
        layers = updates.layers.layers
        for layer in layers:
            offset = self._to_reference(layer)
            direction = updates.combine(layer, weights.aggregate * updates.weights, offset, weights.reference)
            pull += (weights.reference * torch.linalg.vector_norm(offset)).square()
            step += (weights.aggregate**2 * (updates.weights @ direction.mean_products)).clamp(min=0)
            if layer is layers[-1] and bool(step > 0):  # of the whole model, so told once
                direction = direction.reporting(reference_ratio=(pull / step).sqrt())
            yield direction

    def _by_steps(self, updates: ClientUpdates, layer: Layer, lambda_ref: float) -> LayerDirection:
        """Return the direction of a layer that gradient steps find, in the same coordinates."""
        mean = updates.combine(layer, updates.weights).vector
        found = fedref.descend(
            mean,
            torch.zeros_like(mean),
            self._to_reference(layer),
            eta=self.eta,
            lambda_global=self.lambda_global,
            lambda_ref=lambda_ref,
            steps=self.server_steps,
            lr=self._server_lr(),
        )
        return updates.measure(layer, found)

    def _by_proxy(self, proxy: ProxyLikelihood, updates: ClientUpdates, lambda_ref: float) -> Iterator[LayerDirection]:
        """Yield the direction of each layer by gradients of the server's own loss; all layers move together."""
        assert self._model is not None
        layers = updates.layers.layers
        previous = torch.cat([self._theta(layer) for layer in layers])
        reference = torch.cat([self._reference(layer) for layer in layers])
        mean = torch.cat([updates.combine(layer, updates.weights).vector for layer in layers])
        merged = {t: self.merge_buffer(updates, updates.tensors(t)) for t in updates.layers.indices("buffer")}
        merged |= {t: self.merge_counter(updates, updates.tensors(t)) for t in updates.layers.indices("counter")}
        with proxy.likelihood(self._model, merged, seed=self._round) as gradient:
            found = fedref.descend_on(
                gradient,
                previous + mean,
                previous,
                reference,
                lambda_global=self.lambda_global,
                lambda_ref=lambda_ref,
                steps=self.server_steps,
                lr=self._server_lr(),
            )
        sizes = [layer.size for layer in layers]
        for layer, direction in zip(layers, torch.split(found - previous, sizes), strict=True):
            yield updates.measure(layer, direction)

    def _fine_tunes(self, updates: ClientUpdates) -> bool:
        if not self._window.full:
            return False
        if self.gate == "always":
            return True
        loss, previous = self._mean_loss(updates), self.records["previous_loss"]
        return loss is not None and bool(previous) and loss - previous[0] > self.gate_delta

    def _mean_loss(self, updates: ClientUpdates) -> float | None:
        """Return Σ ρ_i F_i of the clients' `train_loss`, or None where one does not report it."""
        losses = [metrics.get("train_loss") for metrics in updates.metrics]
        if not all(map(is_real, losses)):
            return None
        return float(updates.weights @ updates.reported("train_loss"))

    def _reference(self, layer: Layer) -> Tensor:
        return fedref.reference(self._window.layer(layer)).to(self.device)

    def _to_reference(self, layer: Layer) -> Tensor:
        """Return θ_ref − θ_r of a layer."""
        return self._reference(layer).sub_(self._theta(layer))

    def _theta(self, layer: Layer) -> Tensor:
        assert self._model is not None
        return self._model.flat(layer, self.device)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float64, device=self.device)

    def _server_lr(self) -> float:
        return super().step_size(self._round)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """As of `UpdateStrategy`; a window or a proxy model that cannot serve this model is told before clients train.

        Raises
        ------
        ValueError
            Also if the window is too large for any machine, or the proxy model is not of the global model's shapes.
        """
        instructions = super().configure_fit(server_round, parameters, client_manager)
        assert self._model is not None
        self._window.check(self._model)
        if self._proxy is not None:
            self._proxy.check(self._model)
        return instructions

    def conclude(self, updates: ClientUpdates) -> None:
        """Take the new model into the window, and note the clients' loss."""
        assert self._model is not None
        self._window.push(self._model)
        loss = self._mean_loss(updates)
        self.records["previous_loss"] = [] if loss is None else [loss]

    def check_state(self, records: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        """Require a window of this length, and the last loss."""
        loss = records.get("previous_loss")
        fine = isinstance(loss, list | tuple) and len(loss) <= 1 and all(map(is_real, loss))
        require("the state's records", dict(records), "with previous_loss, a list of at most one number", fine)
        check_window(records, memory, self.window)
