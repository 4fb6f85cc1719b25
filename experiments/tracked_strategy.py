"""TrackedStrategy: any Flower strategy, with every round reported to a run's tracker."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from .stability import Stability
from .tracking import RunTracker, one_line

logger = logging.getLogger(__name__)

# What a round's record is put together from; of a name that several report, the first keeps it.
_STAGES = ("error", "evaluate", "federated", "stability", "fit")


class TrackedStrategy(Strategy):
    """A strategy that reports each round to a tracker, exactly once, and otherwise is the one it wraps.

    A round's record holds what ``aggregate_fit``, ``evaluate`` and ``aggregate_evaluate`` report. Where they
    share a name, the server's evaluation keeps it and the others become ``federated_<name>``,
    ``stability_<name>`` and ``fit_<name>``. An exception of the strategy is recorded as ``error``, next to what the
    round has reported so far, and raised again.

    Parameters
    ----------
    strategy : flwr.server.strategy.Strategy
        The strategy to run.
    tracker : RunTracker
        Where the rounds go.
    evaluate_in : callable
        Says of a round's number whether the global model is evaluated in it; by default in every one.
    stability : Stability, optional
        Adds its measures to every record; where it fails, that is logged and the record goes without them.
    rounds_done : int
        Rounds of before, in a run that goes on: they are added to the numbers that Flower counts from 1, and the
        model it starts from, which was recorded then, is not evaluated again.
    save : callable, optional
        Called when a round without an error is complete and recorded, with its number, the global model and its record.

    Attributes
    ----------
    parameters : flwr.common.Parameters or None
        The current global model: what ``aggregate_fit`` last returned, before that the initial parameters.
    """

    def __init__(
        self,
        strategy: Strategy,
        tracker: RunTracker,
        evaluate_in: Callable[[int], bool] = lambda _: True,
        stability: Stability | None = None,
        rounds_done: int = 0,
        save: Callable[[int, Parameters, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.strategy = strategy
        self.tracker = tracker
        self.evaluate_in = evaluate_in
        self.stability = stability
        self.rounds_done = rounds_done
        self.save = save
        self.parameters: Parameters | None = None
        self._round: int | None = None
        self._stages: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not constructed yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Delegate, and keep the initial parameters."""
        self.parameters = self.strategy.initialize_parameters(client_manager)
        return self.parameters

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Delegate, and begin the round's record."""
        server_round += self.rounds_done
        self.parameters = parameters  # also where a client supplied the initial ones
        if self.stability is not None:
            with _unharmed("the start of the global model's way cannot be noted"):
                self.stability.start(parameters)
        with self._recording_errors(server_round):
            return self.strategy.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Delegate, and record the metrics."""
        server_round += self.rounds_done
        with self._recording_errors(server_round):
            parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        results.clear()  # Flower's server would hold on to a round's updates until it has those of the next
        self._stages["fit"] = dict(metrics)
        if parameters is not None:
            self.parameters = parameters
        return parameters, metrics

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Delegate, and record loss and metrics; round 0 is complete with it."""
        if server_round == 0 and self.rounds_done:
            self.parameters = parameters
            return None
        server_round += self.rounds_done
        with self._recording_errors(server_round):
            result = self.strategy.evaluate(server_round, parameters) if self.evaluate_in(server_round) else None
        if result is not None:
            self._stages["evaluate"] = {"loss": result[0], **result[1]}
        if server_round == 0:
            self.parameters = parameters
            self._finish()
        return result

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Delegate; without clients to evaluate on, the round is complete."""
        server_round += self.rounds_done
        with self._recording_errors(server_round):
            instructions = (
                self.strategy.configure_evaluate(server_round, parameters, client_manager)
                if self.evaluate_in(server_round)
                else []
            )
        if not instructions:
            self._finish()
        return instructions

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Delegate, record loss and metrics, and complete the round."""
        server_round += self.rounds_done
        with self._recording_errors(server_round):
            loss, metrics = self.strategy.aggregate_evaluate(server_round, results, failures)
        self._stages["federated"] = {"loss": loss, **metrics}
        self._finish()
        return loss, metrics

    def _of(self, stage: str) -> Mapping[str, Any]:
        return self._stages.get(stage, {})

    @contextmanager
    def _recording_errors(self, server_round: int) -> Iterator[None]:
        if server_round != self._round:
            self._finish()  # a server that never evaluates leaves its last round open
            self._round = server_round
        try:
            yield
        except Exception as error:
            self._stages["error"] = {"error": one_line(error), **getattr(error, "metrics", {})}
            self._finish()
            raise

    def _finish(self) -> None:
        """Log the open round, if there is one."""
        if self._round or self._stages:  # not for an initial model that nothing evaluates
            if self.stability is not None:
                reported = {name: value for stage in reversed(_STAGES) for name, value in self._of(stage).items()}
                with _unharmed(f"round {self._round}: forgetting and stability cannot be measured"):
                    measured = self.stability.measure(self.parameters, {**reported, "round": self._round})
                    self._stages["stability"] = measured
            record: dict[str, Any] = {"round": self._round}
            for stage in _STAGES:
                for name, value in self._of(stage).items():
                    record[f"{stage}_{name}" if name in record else name] = value
            self.tracker.log_round(record)
            if self.save is not None and self._round and self.parameters is not None and "error" not in self._stages:
                self.save(self._round, self.parameters, record)
        self._round, self._stages = None, {}


@contextmanager
def _unharmed(what: str) -> Iterator[None]:
    """Log whatever goes wrong in taking a measure, and no more: the round and its own errors come first."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", what, one_line(error), exc_info=error)
