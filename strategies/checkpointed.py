"""Checkpointed: a strategy that saves what a run needs to go on after its server was killed, and resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from .checkpoint import (
    Checkpoint,
    CheckpointFolder,
    as_json,
    check_counts,
    find,
    first_difference,
    list_checkpoints,
    options_of,
    require_in_line,
    require_same_model,
)
from .options import is_real, require

AUTO = "auto"


class Checkpointed(Strategy):
    """A strategy that saves checkpoints, and otherwise is the one it wraps.

    In a ServerApp of one's own, started again by the same command after whatever ended it::

        strategy = Checkpointed(CRAFT(initial_parameters=...), "checkpoints", num_rounds=200, resume="auto")
        config = ServerConfig(num_rounds=200 - strategy.rounds_done)

    The run that goes on gives the model that an uninterrupted one would have given, bit for bit, as long as its clients
    are the same and keep nothing between rounds: what they remember lies with them. It works behind `MessageStrategy`,
    too, as `MessageStrategy(Checkpointed(...))`.

    A checkpoint is taken when a round has been aggregated, into a folder of its own (`strategies.checkpoint`) that
    appears whole or not at all. The `keep` newest stay, and the best of those saved in what the server or, where that
    does not evaluate, the clients measure, the last round's included; others go once a newer one is safely there.

    Parameters
    ----------
    strategy : flwr.server.strategy.Strategy
        With `state_dict` and `load_state_dict`, as all of this suite have.
    folder : str or Path
        Where checkpoints go; one run's alone.
    every : int
        A round whose number it divides is saved.
    keep : int
        How many of the newest are kept.
    num_rounds : int, optional
        The number of all rounds, those before a resume included; the last one is saved, too.
    metric : str, optional
        What the best is the best in, a name among the metrics of evaluation: less is better where the name holds
        "loss", "error" or "hd95", else more. None: the loss.
    config : mapping, optional
        What else has to be the same when the run goes on: anything that JSON holds.
    resume : str or Path, optional
        A folder of checkpoints, whose newest usable one is taken, or one checkpoint: go on from there. "auto": from
        the newest in `folder`, or, if that holds none, from the start. None: from the start; `folder` must hold none.
        What is later in `folder` than the checkpoint is renamed, to `round-NNNNNN.aside1`. From another folder,
        checkpoints up to this one are copied.

    Attributes
    ----------
    strategy : flwr.server.strategy.Strategy
    resumed : flwr.common.Parameters or None
        The model to go on from; None where the run starts anew.
    rounds_done : int
        The last round aggregated, counted over all resumes.

    Raises
    ------
    ValueError
        If an option is out of range, `resume` names no checkpoint that can be used, or it is one of another model, of
        another strategy, or of one with other options (`strategies.checkpoint.options_of`) or another `config`; the
        sentence names the first difference.
    FileExistsError
        If `folder` holds checkpoints that are not to be resumed from.
    OSError
        If `folder` cannot be written; during the run, if a checkpoint cannot be.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: str | Path,
        *,
        every: int = 10,
        keep: int = 2,
        num_rounds: int | None = None,
        metric: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume: str | Path | None = None,
    ) -> None:
        super().__init__()
        check_counts(every, keep, num_rounds)
        named = metric is None or (isinstance(metric, str) and bool(metric))
        require("metric", metric, "the name of a metric of evaluation, or None for the loss", named)
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(strategy, name, None)):
                raise ValueError(
                    f"{type(strategy).__name__} has no {name}, so a run cannot go on with what it remembers; use a "
                    "strategy of this suite."
                )
        self.strategy = strategy
        self.resumed: Parameters | None = None
        self.rounds_done = 0
        self.observes_clients = True  # MessageStrategy, which knows more of what clients report, tells it instead
        self._every = every
        self._num_rounds = num_rounds
        self._metric = metric or "loss"
        self._config = as_json(config or {})
        self._offset: int | None = 0  # added to the caller's round number; None: find out at the next call
        self._parameters: Parameters | None = None
        self._noted = -1  # the last round whose evaluation has been seen
        self._folder = self._begin(Path(folder), keep, resume)

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not constructed yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy!r})"

    # ---- resuming -------------------------------------------------------------------------------------------------

    def _begin(self, folder: Path, keep: int, resume: str | Path | None) -> CheckpointFolder:
        own = CheckpointFolder(folder, keep=keep, metric=self._metric)
        there = list_checkpoints(folder)
        if resume is None or (resume == AUTO and not there):
            _require_empty(folder, there, f"resume={AUTO!r} goes on from the newest")
            return own
        checkpoint = find(folder) if resume == AUTO else find(Path(resume))
        self._check(checkpoint)
        if checkpoint.path.resolve().parent == folder.resolve():
            require_in_line(checkpoint)
            self._load(checkpoint)
            own.set_aside_after(checkpoint.round)
        else:
            _require_empty(folder, there, f"resume={str(folder)!r} goes on from those")
            self._load(checkpoint)
            own.adopt(checkpoint)
        return own

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError if a checkpoint is not one of this run's."""
        where, name = checkpoint.path, type(self.strategy).__name__
        if checkpoint.strategy != name:
            raise ValueError(f"{where} was saved by {checkpoint.strategy}, this is {name}; resume with that.")
        layers, initial = getattr(self.strategy, "layers", None), getattr(self.strategy, "initial_parameters", None)
        require_same_model(checkpoint, layers, initial)
        for what, saved, given in (
            ("", checkpoint.content["options"] or {}, options_of(self.strategy)),
            ("config ", checkpoint.content["config"] or {}, self._config),
        ):
            found = first_difference(saved, given)
            if found is not None:
                key, old, new = found
                raise ValueError(
                    f"{where} was saved with {what}{key}={old!r}, this is {what}{key}={new!r}; resume with the same."
                )
        if self._num_rounds is not None and checkpoint.round > self._num_rounds:
            raise ValueError(
                f"{where} is that of round {checkpoint.round}, beyond num_rounds={self._num_rounds}; raise it."
            )

    def _load(self, checkpoint: Checkpoint) -> None:
        strategy: Any = self.strategy
        self.resumed = self._parameters = checkpoint.parameters()
        if hasattr(strategy, "layers") and strategy.layers is None:
            strategy.layers = checkpoint.layers  # what it remembers goes by the names of these
        if hasattr(strategy, "initial_parameters"):
            strategy.initial_parameters = self.resumed
        try:
            strategy.load_state_dict(checkpoint.state())
        except ValueError as error:
            raise ValueError(f"{checkpoint.path} does not fit this strategy: {error}") from error
        self.rounds_done = checkpoint.round
        self._offset = None

    # ---- the rounds -----------------------------------------------------------------------------------------------

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the model to go on from; without one delegate."""
        return self.resumed if self.resumed is not None else self.strategy.initialize_parameters(client_manager)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Delegate, and note the global model.

        Raises
        ------
        ValueError
            If the round has been run before, or its model is not the one that was resumed from or aggregated last.
        """
        number = self._number(server_round)
        if number <= self.rounds_done:
            raise ValueError(
                f"round {number} has been run, {self.rounds_done} is the last one: a Checkpointed serves one run; make "
                f"a new one for another, with resume={AUTO!r} to go on, or in another folder."
            )
        if self._parameters is not None and not _same(parameters, self._parameters):
            whence = "resumed from" if self.resumed is not None and self.resumed is self._parameters else "saved"
            raise ValueError(
                f"round {number} begins with another model than the one {whence}: start it from `resumed` (behind "
                "MessageStrategy: from `starting_arrays(initial_arrays)`), and change nothing between rounds, as "
                "Flower's differential privacy wrappers on the server do, under which checkpoints cannot be resumed."
            )
        self._parameters = parameters
        return self.strategy.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Delegate, and save the round if it is due.

        Raises
        ------
        OSError
            If the checkpoint cannot be written, in one sentence; older ones are as they were.
        """
        number = self._number(server_round)
        parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        if parameters is not None:
            self._parameters = parameters
        self.rounds_done = number
        if self._parameters is not None and (number % self._every == 0 or number == self._num_rounds):
            self._folder.save(number, self._parameters, self.strategy, config=self._config)
        return parameters, metrics

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Delegate, and note what the model scored."""
        result = self.strategy.evaluate(server_round, parameters)
        if result is not None:
            self.observe(server_round, {"loss": result[0], **result[1]})
        return result

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Delegate."""
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Delegate, and note what the model scored."""
        loss, metrics = self.strategy.aggregate_evaluate(server_round, results, failures)
        if self.observes_clients:
            self.observe(server_round, {**({} if loss is None else {"loss": loss}), **metrics})
        return loss, metrics

    def observe(self, server_round: int, metrics: Mapping[str, Scalar]) -> None:
        """Note what the model of a round scored; of several reports the first that has the metric counts."""
        number = self.rounds_done if self._offset is None else server_round + self._offset
        value = metrics.get(self._metric)
        if is_real(value) and number != self._noted:
            self._noted = number
            self._folder.note(number, float(value))

    def _number(self, server_round: int) -> int:
        """Round number counted over resumed runs; Flower starts at 1 each time, and other callers go on counting."""
        if self._offset is None:
            self._offset = self.rounds_done + 1 - server_round
        return server_round + self._offset


def _same(one: Parameters, other: Parameters) -> bool:
    return one is other or (
        len(one.tensors) == len(other.tensors)
        and all(a is b or bytes(a) == bytes(b) for a, b in zip(one.tensors, other.tensors, strict=True))
    )


def _require_empty(folder: Path, there: list[tuple[int, Path]], remedy: str) -> None:
    if there:
        raise FileExistsError(
            f"{folder} holds checkpoints of an earlier run, up to round {there[0][0]}: {remedy}; or choose another "
            "folder."
        )
