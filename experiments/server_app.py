"""The ServerApp: a strategy from the configuration, evaluation, and what the run leaves behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich
import torch
from flwr.app import Context
from flwr.common import Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import Grid, ServerApp

from client_apps import attacks, stale
from client_apps.arrays import get_arrays, set_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import Task
from client_apps.tasks.base import Illustrated
from strategies import LayerMap, UpdateStrategy, partition_order

from .checkpoint import NothingToDo, RunCheckpoints, Start, find_start
from .config import build_strategy, check, from_run_config
from .engine import VirtualGrid
from .evaluation import Evaluator
from .stability import Stability
from .tracked_strategy import TrackedStrategy
from .tracking import RunTracker, one_line

logger = logging.getLogger(__name__)

_THREADS = 64
# A federation that has gained no node for this long is taken for complete.
_JOIN_SECONDS = 30.0


def make_strategy(cfg: Mapping[str, Any], task: Task, tracker: RunTracker) -> UpdateStrategy:
    """Make the configured strategy for the task's model, evaluated as `cfg["evaluation"]` says."""
    model = task.new_model()
    clients, cohort = cfg["num_clients"], cfg["clients_per_round"]
    least = cfg.get("min_available") or clients
    evaluator = Evaluator(task, clients, tracker.log_clients)
    if cfg["evaluation"]["mode"] == "server":
        evaluation: dict[str, Any] = {"evaluate_fn": evaluator.on_server, "fraction_evaluate": 0.0}
    else:
        evaluation = {
            "fraction_evaluate": 1.0,
            "on_evaluate_config_fn": evaluator.start_round,
            "evaluate_metrics_aggregation_fn": evaluator.from_clients,
        }
    counts = []
    if task.client.stale_update:
        counts.append(count_stale)
    if task.client.attack:
        counts.append(count_attacked)
    if counts:
        evaluation["fit_metrics_aggregation_fn"] = lambda results: {k: v for f in counts for k, v in f(results).items()}
    return build_strategy(
        cfg,
        layers=LayerMap.from_module(model),
        initial_parameters=ndarrays_to_parameters(get_arrays(model)),
        seed=cfg["seed"],
        # min_fit_clients alone sets the cohort; where fewer connected clients will do, it is a share of those.
        fraction_fit=cohort / clients if least < cohort else 0.0,
        min_fit_clients=min(cohort, least),
        min_evaluate_clients=0,
        min_available_clients=least,
        partition_order=partition_order,
        **evaluation,
    )


def count_stale(results: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
    """Flower's `fit_metrics_aggregation_fn`: `stale_updates`, how many of the answers accepted are stale models."""
    return {"stale_updates": sum(metrics.get(stale.METRIC) == 1 for _, metrics in results)}


def count_attacked(results: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
    """Flower's `fit_metrics_aggregation_fn`: `attacked_updates`, how many accepted are of contaminated clients.

    It is only counted: what a strategy accepts and what it does with it never depends on what clients say of this.
    """
    return {"attacked_updates": sum(metrics.get(attacks.METRIC) == 1 for _, metrics in results)}


def make_server_app(cfg: Mapping[str, Any], task: Task) -> ServerApp:
    """Make the ServerApp of a checked configuration.

    Raises
    ------
    ConfigError, NothingToDo
        If `cfg["resume"]` names nothing that it can go on from: see `find_start`.
    """
    app, start = ServerApp(), find_start(cfg, task)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(cfg, task, grid, context, start)

    return app


def serve(cfg: Mapping[str, Any], task: Task, grid: Grid, context: Context, start: Start) -> None:
    """Run all rounds that are left on a grid; the model that was evaluated last is saved even if the run fails."""
    checkpoints = RunCheckpoints(cfg, start, task, grid)
    _require_nodes(grid, cfg["num_clients"], cfg.get("min_available") or cfg["num_clients"])
    rounds, every, tracking = cfg["num_rounds"], cfg["evaluation"]["every"], cfg["tracking"]
    tracker = RunTracker(
        Path(cfg["output_dir"]),
        config=cfg,
        num_rounds=rounds,
        console=rich.get_console(),
        tensorboard=tracking["tensorboard"],
        progress=tracking["progress"],
        metric=task.metric,
        goes_on=start.checkpoint is not None,
    )
    with checkpoints, tracker:
        inner = make_strategy(cfg, task, tracker)
        stability = Stability(
            inner.layers,
            task.metric,
            udp_loss_delta=tracking["udp_loss_delta"],
            udp_norm_delta=tracking["udp_norm_delta"],
        )
        checkpoints.load(inner, stability)
        strategy = TrackedStrategy(
            inner,
            tracker,
            evaluate_in=lambda number: number % every == 0 or number == rounds,
            stability=stability,
            rounds_done=start.round,
            save=checkpoints.saver(inner, stability, tracker),
        )
        server = Server(client_manager=SimpleClientManager(), strategy=strategy)
        if isinstance(grid, VirtualGrid):
            grid.lends_views = True
        else:
            # A thread waits for each client in flight: Flower's default of a few leaves workers idle.
            server.set_max_workers(min(_THREADS, cfg["num_clients"]))
        config = ServerConfig(num_rounds=rounds - start.round, round_timeout=cfg.get("round_timeout"))
        components = ServerAppComponents(server=server, config=config)
        try:
            ServerApp(server_fn=lambda _: components)(grid, context)
        finally:
            if strategy.parameters is not None:
                names = task.new_model().state_dict()
                arrays = parameters_to_ndarrays(strategy.evaluated(strategy.parameters))
                tracker.save_model({n: torch.from_numpy(a) for n, a in zip(names, arrays, strict=True)})
        if cfg["evaluation"]["mode"] == "server" and tracking["examples"] and strategy.parameters is not None:
            _illustrate(task, strategy.evaluated(strategy.parameters), tracking["examples"], tracker)


def _illustrate(task: Task, parameters: Parameters, count: int, tracker: RunTracker) -> None:
    """Save examples of what the model does, if the task has any; without them the run is as good."""
    if not isinstance(task, Illustrated):
        return
    try:
        model = task.new_model()
        set_arrays(model, parameters_to_ndarrays(parameters))
        tracker.save_examples(task.examples(model, count))
    except Exception as error:  # whatever it is, it must not take the finished run with it
        logger.warning("the run is complete, but its examples cannot be made: %s", one_line(error), exc_info=error)


def _require_nodes(grid: Grid, wanted: int, least: int) -> None:
    """Wait while nodes are still joining, and refuse a federation of more than `wanted` or fewer than `least`."""
    most, since = -1, time.monotonic()
    while (connected := len(list(grid.get_node_ids()))) < wanted:
        if connected > most:
            most, since = connected, time.monotonic()
        if time.monotonic() - since > _JOIN_SECONDS:
            break
        time.sleep(0.2)
    if not least <= connected <= wanted:
        enough = f" and min_available={least}" if least < wanted else ""
        raise ConfigError(
            f"the federation has {connected} nodes but num_clients={wanted}{enough}; make them equal, with "
            f"num_clients={connected} in the overrides, or in a simulation with "
            f'--federation-config "num-supernodes={wanted}".'
        )


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry of the Flower app bundle: compose what the run config asks for, and run it."""
    cfg = from_run_config(context.run_config)
    task = check(cfg)
    try:
        start = find_start(cfg, task)
    except NothingToDo as found:
        rich.get_console().print(str(found), markup=False, highlight=False, soft_wrap=True)
        return
    serve(cfg, task, grid, context, start)
