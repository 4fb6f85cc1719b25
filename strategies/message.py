"""MessageStrategy: any strategy of this suite behind Flower's message API.

Flower has two interfaces for what a server does. The strategies of this suite are written for
`flwr.server.strategy.Strategy`, whose methods get `FitRes` and return `Parameters`; ServerApps of Flower's newer
documentation run a `flwr.serverapp.strategy.Strategy`, whose methods get and make messages
(https://flower.ai/docs/framework/ref-api/flwr.serverapp.strategy.html). The same seed gives the same
model through both.
"""

from __future__ import annotations

import io
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import flwr.server.strategy
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import EvaluateIns, FitIns, Parameters, Scalar
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

from .base import RoundsFailed, UpdateStrategy
from .layers import LayerMap
from .nodes import Asked, GridClientManager
from .options import is_integer, is_real, require
from .records import NUMPY, NamedModel, config_record, metric_record
from .replies import RESERVED, Reply, UnusableReply, read_evaluation, read_fit, weighted_means
from .updates import one_line

logger = logging.getLogger(__name__)
# Where Flower's own strategies write how a run goes.
_flower = logging.getLogger("flwr")

# Rounds whose reports are kept.
_REPORTS = 1000
# Metrics of clients that are averaged in a round; a client may send any number of them.
_AVERAGED = 200
# What the log of a round has said already.
_LOGGED = ("rejection_reasons", "failure_reasons", "failed_reason")

Instruction = tuple[ClientProxy, FitIns] | tuple[ClientProxy, EvaluateIns]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Metrics = list[tuple[int, dict[str, Scalar]]]
"""The number of examples and the metrics of each client, as Flower's aggregation functions get them."""


class NoResult(RuntimeError):
    """A client that was asked gave no result, or none that can be read; the message says which client, and why."""


class MessageStrategy(Strategy):
    """A strategy for Flower's message API that does what another does.

    A ServerApp, for ClientApps as Flower's quickstarts have them::

        from flwr.app import ArrayRecord, Context
        from flwr.serverapp import Grid, ServerApp
        from strategies import CRAFT, LayerMap, MessageStrategy

        app = ServerApp()


        @app.main()
        def main(grid: Grid, context: Context) -> None:
            model = Net()
            strategy = MessageStrategy(CRAFT(layers=LayerMap.from_module(model), min_available_clients=10))
            result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=50)
            model.load_state_dict(result.arrays.to_torch_state_dict())

    What clients get. A train or evaluate message holds the model under `arrays` and the config under `config`: the
    `train_config` or `evaluate_config` of `start`, Flower's `server-round`, and what the strategy asks of clients, both
    as the strategy writes it and as Flower's message API does (`proximal_mu` and `proximal-mu`). Where both say
    something, the strategy's wins. A strategy that has weights of a client's own (CLAIR) sends it those.

    What they reply. One `ArrayRecord` with the model's tensors, in any order, and `MetricRecord`s with numbers, among
    them `num-examples`. Clients may report other metrics than their neighbours. What a strategy `requires` is found in
    either spelling. Tensors are checked as `ClientUpdates` does, by name; a reply that cannot be read, an error, and
    no reply within the timeout count as failures, with the reason in the log and in `reports`. Replies that answer no
    message of the round, such as late or repeated ones, are ignored and logged.

    Without `layers`, the strategy's tensors take their names from the record and each is a layer of its own, as ever.
    A strategy's memory is kept by those names: resume such a run through the interface that saved it.

    Parameters
    ----------
    strategy : flwr.server.strategy.Strategy
        One of this suite, or any other of Flower's older interface. It is used, not copied.
    weighted_by_key : str
        Under which name clients report how many examples they have.
    arrayrecord_key, configrecord_key : str
        The names of the records in messages.

    Attributes
    ----------
    strategy : flwr.server.strategy.Strategy
    reports : dict of int to dict
        All that a round's aggregation reported, by the round's number, texts too (`rejection_reasons`,
        `failure_reasons`, `failed_reason`, ...), which a `MetricRecord` cannot hold. The last 1000 rounds are kept.
    result : flwr.serverapp.strategy.Result or None
        What `start` has returned, or, where it raised or is still running, has gathered so far.

    Raises
    ------
    ValueError
        If one of them is something else.
    """

    def __init__(
        self,
        strategy: flwr.server.strategy.Strategy,
        *,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        wanted = "a flwr.server.strategy.Strategy, such as strategies.CRAFT()"
        require("strategy", strategy, wanted, isinstance(strategy, flwr.server.strategy.Strategy))
        keys = {"weighted_by_key": weighted_by_key, "arrayrecord_key": arrayrecord_key}
        for name, key in {**keys, "configrecord_key": configrecord_key}.items():
            require(name, key, "a name", isinstance(key, str) and bool(key))
        other = f"another name than arrayrecord_key={arrayrecord_key!r}"
        require("configrecord_key", configrecord_key, other, configrecord_key != arrayrecord_key)
        self.strategy = strategy
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        for each in _nested(strategy):
            if "observes_clients" in vars(each):  # it is told here, where all that clients report is known
                each.observes_clients = False  # type: ignore[attr-defined]
        self.reports: dict[int, dict[str, Scalar]] = {}
        self.result: Result | None = None
        self._manager: GridClientManager | None = None
        self._model: NamedModel | None = None  # θ_t, from configure_train on
        self._named: LayerMap | None = None  # the layers given to a strategy that had none
        self._asked: dict[str, Asked] = {}  # by message type
        self._ttl: float | None = None
        self._running = False  # in `start`
        self._measured: dict[str, Scalar] = {}  # by the clients in the current round of `start`

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy!r})"

    # ---- training -------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Take `arrays` as θ_t, and make a message for each client that is to train on it.

        Raises
        ------
        NotEnoughClients
            If the nodes required are not connected and none has joined for the strategy's `wait_timeout`.
        ValueError
            If `arrays` is empty, cannot be read, is not finite or has other tensors than the strategy's `layers`.
        """
        model = self._model = self._read(arrays)
        instructions = self.strategy.configure_fit(server_round, model.parameters, self._clients(grid))
        return self._messages(server_round, MessageType.TRAIN, arrays, model, config, instructions)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move the global model by the clients' updates.

        Parameters
        ----------
        server_round : int
        replies : iterable of Message
            In any order.

        Returns
        -------
        (ArrayRecord, MetricRecord or None)
            θ_{t+1}, with the names, shapes and dtypes of θ_t; it is θ_t where the round failed (`failed_round` is 1).
            The metrics are the strategy's numbers, and, under the clients' own names, the mean of every other number
            that the accepted clients report, weighted by their examples, each over those who report it. None where
            nobody was asked to train.

        Raises
        ------
        RoundsFailed
            After too many failed rounds in a row.
        ValueError
            Without `configure_train` before.
        """
        model, asked = self._model, self._asked.pop(MessageType.TRAIN, None)
        if model is None or asked is None:
            raise ValueError("there is no round to aggregate: call configure_train before aggregate_train.")
        if not asked:
            _flower.info("aggregate_train: no client was asked to train")
            return model.record(), None
        read_one = partial(
            read_fit, names=model.names, arrayrecord_key=self.arrayrecord_key, weighted_by_key=self.weighted_by_key
        )
        read, failures = self._sort(asked, replies, read_one)
        _flower.info("aggregate_train: received %d results and %d failures", len(read), len(failures))
        results = [(client, reply.result) for client, reply in read]
        with _overhearing(self.strategy, "fit_metrics_aggregation_fn") as heard:
            try:
                parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
            except RoundsFailed as error:
                self._report(server_round, error.metrics)
                raise
        if parameters is None:
            metrics = {"failed_round": True, **metrics}
        elif parameters is not model.parameters:
            model = self._model = model.with_tensors(parameters)
        accepted = _accepted(heard, results if parameters is not None else [])
        metrics = {**self._means(accepted, read), **metrics}
        self._report(server_round, metrics)
        return model.record(), metric_record(metrics)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make a message for each client that is to evaluate `arrays`.

        Raises
        ------
        NotEnoughClients, ValueError
            As `configure_train`.
        """
        model = self._read(arrays)
        instructions = self.strategy.configure_evaluate(server_round, model.parameters, self._clients(grid))
        return self._messages(server_round, MessageType.EVALUATE, arrays, model, config, instructions)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what clients report of an evaluation.

        A reply needs `num-examples`, and, where most others have one, a loss (`loss`, `eval_loss`, `val-loss`, ...).

        Returns
        -------
        MetricRecord or None
            `loss`, the strategy's other numbers, and the mean of every other number that clients report, weighted by
            their examples. None where nobody was asked, or no reply can be used.
        """
        asked = self._asked.pop(MessageType.EVALUATE, None)
        if not asked:
            return None
        read, failures = self._sort(asked, replies, partial(read_evaluation, weighted_by_key=self.weighted_by_key))
        # The majority decides: one client alone must not make a loss the rule, and everybody else's reply unusable.
        with_loss = 2 * sum(reply.has_loss for _, reply in read) > len(read)
        if with_loss:
            for client, _ in [pair for pair in read if not pair[1].has_loss]:
                failures.append(NoResult(f"client {client.cid}: it reports no loss"))
            read = [pair for pair in read if pair[1].has_loss]
        else:
            read = [(client, reply.without_loss()) for client, reply in read]
        _flower.info("aggregate_evaluate: received %d results and %d failures", len(read), len(failures))
        results = [(client, reply.result) for client, reply in read]
        with _overhearing(self.strategy, "evaluate_metrics_aggregation_fn") as heard:
            loss, metrics = self.strategy.aggregate_evaluate(server_round, results, failures)
        found: dict[str, Scalar] = {**self._means(_accepted(heard, results), read), **metrics}
        if loss is not None and with_loss:
            found["loss"] = loss
        if self._running:
            self._measured = found  # what the server measures comes first
        else:
            self._observe(server_round, found)
        return metric_record(found) if found else None

    # ---- a run ----------------------------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log what the strategy is and its options."""
        strategy = _innermost(self.strategy)
        options = {
            name: value
            for name, value in vars(strategy).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str)
        }
        sampling = {name: v for name, v in options.items() if name.startswith(("fraction_", "min_"))}
        _flower.info("\t├──> %s:", type(strategy).__name__)
        _flower.info("\t│\t└── %s", _listed({n: v for n, v in options.items() if n not in sampling}))
        _flower.info("\t├──> Sampling:")
        _flower.info("\t│\t└── %s", _listed(sampling))
        _flower.info("\t└──> Keys in records:")
        _flower.info("\t\t├── Weighted by: '%s'", self.weighted_by_key)
        _flower.info("\t\t├── ArrayRecord key: '%s'", self.arrayrecord_key)
        _flower.info("\t\t└── ConfigRecord key: '%s'", self.configrecord_key)

    def starting_arrays(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return what a run starts from: the model of the run that it goes on with, or `initial_arrays` without one.

        `start` does this by itself. Where something else starts the run, such as Flower's differential privacy
        wrappers, pass it what this returns.

        Raises
        ------
        ValueError
            If `initial_arrays` is empty or cannot be used, or is another model than that of the earlier run.
        """
        model = self._read(initial_arrays)
        resumed: Parameters | None = getattr(self.strategy, "resumed", None)
        return (model if resumed is None else self._resumed(model, resumed)).record()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run federated learning.

        A strategy that continues an earlier run (it has `resumed`) starts from that run's model, and rounds are
        counted on from those done. `evaluate_fn` gets, and the result holds, the model that the strategy wants
        evaluated and deployed (`UpdateStrategy.evaluated`; for most, the global model).

        Parameters
        ----------
        grid : Grid
        initial_arrays : ArrayRecord
            The initial global model, e.g. `ArrayRecord(model.state_dict())`.
        num_rounds : int
            How many to run now.
        timeout : float
            Seconds that clients may take to answer in a round. Messages live as long: a client that comes back later
            does not begin to answer them.
        train_config, evaluate_config : ConfigRecord, optional
            What clients are told.
        evaluate_fn : callable, optional
            Evaluates the model on the server, before the first round and after each: it gets the round's number and
            the model, and returns a `MetricRecord` or None. Without it, the strategy's own `evaluate_fn` is used, if
            it has one.

        Returns
        -------
        flwr.serverapp.strategy.Result
            With metrics by the round's number. It is kept in `result` too, where a round that raises leaves it.

        Raises
        ------
        RoundsFailed
            After too many failed rounds in a row.
        NotEnoughClients
            If nodes are missing.
        ValueError
            If `initial_arrays` is empty or cannot be used.
        """
        began = time.monotonic()
        require("num_rounds", num_rounds, "an integer of at least 0", is_integer(num_rounds) and num_rounds >= 0)
        positive = timeout is None or (is_real(timeout) and timeout > 0)
        require("timeout", timeout, "a number of seconds above 0, or None", positive)
        model = self._read(initial_arrays)
        # Only once: what is started again goes on from the arrays that are given.
        resumed: Parameters | None = getattr(self.strategy, "resumed", None) if self.result is None else None
        done = 0 if resumed is None else int(self.strategy.rounds_done)  # type: ignore[attr-defined]
        arrays = (model if resumed is None else self._resumed(model, resumed)).record()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        _flower.info("Starting %s strategy:", type(self).__name__)
        log_strategy_start_info(num_rounds, arrays, train_config, evaluate_config)
        self.summary()
        if resumed is not None:
            _flower.info("Resuming after round %d", done)
        result = self.result = Result(arrays=self._shown(arrays))
        self._ttl, self._running = timeout, True
        try:
            self._evaluate_centrally(done, arrays, evaluate_fn, result)
            for number in range(done + 1, done + num_rounds + 1):
                _flower.info("")
                _flower.info("[ROUND %d/%d]", number, done + num_rounds)
                messages = self.configure_train(number, arrays, train_config, grid)
                replies = grid.send_and_receive(messages, timeout=timeout)
                found, metrics = self.aggregate_train(number, replies)
                del messages, replies  # or a round's updates would stay while the next one's come in
                if found is not None:
                    arrays = found
                    result.arrays = self._shown(arrays)
                if metrics is not None:
                    _flower.info("\t└──> Aggregated MetricRecord: %s", metrics)
                    result.train_metrics_clientapp[number] = metrics
                messages = self.configure_evaluate(number, arrays, evaluate_config, grid)
                replies = grid.send_and_receive(messages, timeout=timeout)
                evaluated = self.aggregate_evaluate(number, replies)
                del messages, replies
                if evaluated is not None:
                    _flower.info("\t└──> Aggregated MetricRecord: %s", evaluated)
                    result.evaluate_metrics_clientapp[number] = evaluated
                self._evaluate_centrally(number, arrays, evaluate_fn, result)
                if evaluated is not None:
                    self._observe(number, self._measured)
        finally:
            self._ttl, self._running = None, False
        _flower.info("")
        _flower.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        _flower.info("Final results:")
        for line in io.StringIO(str(result)):
            _flower.info("\t%s", line.rstrip("\n"))
        return result

    def _evaluate_centrally(
        self, number: int, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None, result: Result
    ) -> None:
        if evaluate_fn is not None:
            metrics = evaluate_fn(number, self._shown(arrays))
            if metrics is not None:
                self._observe(number, {key: value for key, value in metrics.items() if not isinstance(value, list)})
        else:
            found = self.strategy.evaluate(number, self._read(arrays).parameters)
            metrics = None if found is None else metric_record({"loss": found[0], **found[1]})
        if metrics is not None:
            _flower.info("Global evaluation, round %d: %s", number, metrics)
            result.evaluate_metrics_serverapp[number] = metrics

    def _observe(self, number: int, metrics: Mapping[str, Scalar]) -> None:
        """Tell a strategy that wants to know (`Checkpointed`) what a round's model has scored."""
        observe = getattr(self.strategy, "observe", None)
        if observe is not None:
            observe(number, metrics)

    def _shown(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to evaluate and to deploy."""
        evaluated = getattr(self.strategy, "evaluated", None)
        if evaluated is None:
            return arrays
        model = self._read(arrays)
        shown = evaluated(model.parameters)
        return arrays if shown is model.parameters else model.with_tensors(shown).record()

    # ---- the global model -----------------------------------------------------------------------------------------

    def _read(self, arrays: ArrayRecord) -> NamedModel:
        """Take a record as the global model, and see to it that it is what the strategy's layers describe."""
        require("arrays", arrays, "an ArrayRecord", isinstance(arrays, ArrayRecord))
        if not arrays:
            raise ValueError(
                "the ArrayRecord of the global model is empty; pass the initial model, e.g. "
                "ArrayRecord(model.state_dict())."
            )
        names, tensors = tuple(arrays), [array.data for array in arrays.values()]
        if (last := self._model) is not None and last.is_made_of(names, tensors):
            return last
        for name, array in arrays.items():
            if array.stype != NUMPY:
                raise ValueError(
                    f"tensor {name!r} of the global model is serialized as {array.stype!r}; make it of NumPy arrays or "
                    "PyTorch tensors."
                )
        model = NamedModel(names, Parameters(tensors, NUMPY))
        self._name_layers(model)
        return model

    def _name_layers(self, model: NamedModel) -> None:
        arrays = model.arrays()
        strategy = _innermost(self.strategy)
        if not isinstance(strategy, UpdateStrategy):
            return
        if strategy.layers is None or strategy.layers is self._named:
            strategy.layers = self._named = LayerMap.from_arrays(arrays, model.names)
            return
        pairs = zip_longest(model.names, strategy.layers.names)
        for i, (theirs, ours) in enumerate(pairs, start=1):
            if theirs != ours:
                there, here = ("nothing" if name is None else repr(name) for name in (theirs, ours))
                raise ValueError(
                    f"key {i} of the global model's ArrayRecord is {there}, and the strategy's layers have {here} "
                    "there; build both from the same model."
                )

    def _resumed(self, initial: NamedModel, parameters: Parameters) -> NamedModel:
        model = initial.with_tensors(parameters)
        for name, old, new in zip(model.names, initial.arrays(), model.arrays(), strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"the model to resume from has {new.dtype}{new.shape} for tensor {name!r}, and initial_arrays has "
                    f"{old.dtype}{old.shape}; resume with the model that was saved."
                )
        return model

    # ---- messages -------------------------------------------------------------------------------------------------

    def _clients(self, grid: Grid) -> GridClientManager:
        if self._manager is None or self._manager.grid is not grid:
            self._manager = GridClientManager(grid)
        return self._manager

    def _messages(
        self,
        server_round: int,
        kind: str,
        arrays: ArrayRecord,
        model: NamedModel,
        config: ConfigRecord,
        instructions: Sequence[Instruction],
    ) -> list[Message]:
        # By identity: what clients share is shared on its way, too.
        records = {id(model.parameters): arrays}
        configs: dict[int, ConfigRecord] = {}
        messages = []
        asked = self._asked[kind] = Asked(server_round)
        for client, ins in instructions:
            record = records.get(id(ins.parameters))
            if record is None:
                record = records[id(ins.parameters)] = model.with_tensors(ins.parameters).record()
            told = configs.get(id(ins.config))
            if told is None:
                told = configs[id(ins.config)] = config_record(server_round, config, ins.config)
            content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: told})
            message = Message(content, int(client.cid), kind, ttl=self._ttl, group_id=str(server_round))
            messages.append(message)
            asked.clients.append((message.metadata, client))
        if messages:
            _flower.info("configure_%s: sampled %d nodes", kind, len(messages))
        return messages

    def _sort(
        self, asked: Asked, replies: Iterable[Message], read: Callable[[RecordDict], Reply]
    ) -> tuple[list[tuple[ClientProxy, Reply]], list[Any]]:
        """Return what the clients asked have replied, and why some have not, in the order in which they were asked."""
        found: dict[int, Reply | NoResult] = {}
        find = asked.finder()
        for message in replies:
            i = find(message)
            if i is None or i in found:
                what = "it answers no message of this round" if i is None else "there was one to the same message"
                logger.warning(
                    "round %d: ignored a reply of node %d: %s", asked.number, message.metadata.src_node_id, what
                )
                continue
            cid = asked.clients[i][1].cid
            if message.has_error():
                reason = message.error.reason or f"error {message.error.code} without a reason"
                found[i] = NoResult(f"client {cid}: {reason}")
                continue
            try:
                content = message.content if message.has_content() else RecordDict()
                if not isinstance(content, RecordDict):  # Flower does not look
                    raise UnusableReply(f"its content is a {type(content).__name__}, not a RecordDict")
                found[i] = read(content)
            except UnusableReply as error:
                found[i] = NoResult(f"client {cid}: {error}")
        results, failures = [], []
        for i, (_, client) in enumerate(asked.clients):
            reply = found.pop(i, None) or NoResult(f"client {client.cid}: no reply within the timeout")
            if isinstance(reply, Reply):
                results.append((client, reply))
            else:
                failures.append(reply)
        return results, failures

    def _means(self, accepted: Metrics, read: Sequence[tuple[ClientProxy, Reply]]) -> dict[str, Scalar]:
        """Return the means of what clients report, of the numbers that most of them do."""
        names = Counter(key for _, reply in read for key in reply.numbers if key not in RESERVED)
        if len(names) > _AVERAGED:
            logger.warning(
                "clients report %d metrics; the %d that most of them report are averaged", len(names), _AVERAGED
            )
        keys = [key for key, _ in names.most_common(_AVERAGED)]
        return {**weighted_means(accepted, keys, largest=getattr(_innermost(self.strategy), "max_weight_share", None))}

    def _report(self, server_round: int, metrics: Mapping[str, Scalar]) -> None:
        for key, value in metrics.items():
            if isinstance(value, str) and key not in _LOGGED:
                logger.info("round %d: %s: %s", server_round, key, one_line(value))
        self.reports.pop(server_round, None)
        self.reports[server_round] = dict(metrics)
        while len(self.reports) > _REPORTS:
            del self.reports[next(iter(self.reports))]


def _innermost(strategy: flwr.server.strategy.Strategy) -> flwr.server.strategy.Strategy:
    """Return what strategies that wrap others, in their attribute `strategy`, have wrapped."""
    return list(_nested(strategy))[-1]


def _nested(strategy: flwr.server.strategy.Strategy) -> Iterator[flwr.server.strategy.Strategy]:
    """Yield a strategy, the one it wraps, and so on."""
    yield strategy
    while isinstance(inner := vars(strategy).get("strategy"), flwr.server.strategy.Strategy):
        strategy = inner
        yield strategy


@contextmanager
def _overhearing(strategy: flwr.server.strategy.Strategy, name: str) -> Iterator[list[Metrics] | None]:
    """While the block runs, note what a strategy passes to its aggregation function: the metrics it has accepted.

    None where it has no such function.
    """
    owner: Any = _innermost(strategy)
    if name not in vars(owner):
        yield None
        return
    given: Callable[[Metrics], dict[str, Scalar]] | None = getattr(owner, name)
    heard: list[Metrics] = []

    def instead(metrics: Metrics) -> dict[str, Scalar]:
        heard.append(metrics)
        return (given(metrics) or {}) if given is not None else {}

    setattr(owner, name, instead)
    try:
        yield heard
    finally:
        setattr(owner, name, given)


def _accepted(heard: list[Metrics] | None, results: Sequence[tuple[ClientProxy, Any]]) -> Metrics:
    if heard is None:
        return [(res.num_examples, res.metrics) for _, res in results]
    return [pair for metrics in heard for pair in metrics]


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "(none)"
