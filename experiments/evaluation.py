"""Evaluator: the global model on every client's test split, on the server in one pass or by the clients themselves.

Both ways count per client and go through the same summary, so they give the same numbers. Only clients can evaluate
their personal models (Ditto), which never leave them.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.common import NDArrays, Scalar
from numpy.typing import NDArray

from client_apps.arrays import set_arrays
from client_apps.tasks import Evaluation, Task
from strategies.options import is_count, is_integer, is_real

from .metrics import fairness

logger = logging.getLogger(__name__)

# No sum of a score over samples is larger, and those of all clients still fit into 64 bits.
_MOST = 1e12
# Of this size or beyond, sums of losses would not be finite.
_HUGE = 1e100

ClientSink = Callable[[int, Any, Any, Any, Any, Mapping[str, Any]], None]
"""Receives (round, client ids, numbers of examples, scores, mean losses, the task's details)."""

Reports = Sequence[tuple[int, Mapping[str, Scalar]]]


class _UnusableError(Exception):
    """Why what a client reports does not count."""


class Evaluator:
    """Evaluates the global model on the clients' test splits.

    Parameters
    ----------
    task : Task
        Holds the data, makes the model, and knows how to score it.
    num_clients : int
    sink : callable
        Receives each evaluation's results per client.
    """

    def __init__(self, task: Task, num_clients: int, sink: ClientSink) -> None:
        self._task = task
        self._clients = range(num_clients)
        self._sink = sink
        self._model = task.new_model()
        self._round = 0

    def on_server(
        self, server_round: int, arrays: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, dict[str, Scalar]]:
        """Flower's `evaluate_fn`: all clients' test splits in one batched pass."""
        set_arrays(self._model, arrays)
        found = self._task.evaluate(self._model, self._clients)
        return self._summarise(server_round, np.asarray(self._clients), found)

    def start_round(self, server_round: int) -> dict[str, Scalar]:
        """Flower's `on_evaluate_config_fn`: note the round that clients are about to evaluate."""
        self._round = server_round
        return {}

    def from_clients(self, results: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
        """Flower's `evaluate_metrics_aggregation_fn`: what the clients counted, summarised.

        Parameters
        ----------
        results : list of (int, dict)
            Each client's number of test examples, and its metrics `partition_id`, `loss_sum` and the task's sums; with
            personal models the same with `personal_` before their names.

        Returns
        -------
        dict
            Of the global model, with the task's metric for `accuracy`: `accuracy`, `accuracy_std`, `worst10`, `best10`,
            `accuracy_weighted`, `clients_evaluated`, and the task's summary, such as `macro_f1`. Where clients report
            them, of their personal models `personal_accuracy`, `personal_accuracy_std`, `personal_worst10`,
            `personal_best10`, every client counting once, and `personal_loss`, the mean over all examples. Where the
            task has contaminated clients, over all others alone `benign_accuracy`, `benign_worst10`, the summary as
            `benign_macro_f1`, and of personal models `benign_personal_accuracy` and `benign_personal_worst10`. Clients
            without test data are left out; so are, and logged, those whose report lacks something, has the wrong type
            or shape, is not finite, or makes a score outside [0, 1]. Empty, and logged, if none is left.
        """
        tested = self._usable([(n, metrics) for n, metrics in results if n != 0])
        if not tested:
            logger.warning("round %d: no client reports an evaluation that can be used", self._round)
            return {}
        ids = np.array([metrics["partition_id"] for _, metrics in tested])
        _, summary = self._summarise(self._round, ids, _gathered(self._task, tested))
        return summary | self._personal(tested)

    def _summarise(self, server_round: int, ids: NDArray[Any], found: Evaluation) -> tuple[float, dict[str, Scalar]]:
        task = self._task
        tested = found.num_examples > 0  # a client with a single sample has nothing to test on
        ids, found = ids[tested], _those(found, tested)
        examples, loss_sum, scores = found.num_examples, found.loss_sum, task.scores(found)
        self._sink(server_round, ids, examples, scores, loss_sum / examples, task.details(found))
        spread = fairness(scores)
        return float(loss_sum.sum() / examples.sum()), {
            task.metric: spread.mean,
            f"{task.metric}_std": spread.std,
            "worst10": spread.worst10,
            "best10": spread.best10,
            f"{task.metric}_weighted": float(scores @ examples / examples.sum()),
            "clients_evaluated": len(ids),
            **task.summary(found),
            **self._benign(ids, found),
        }

    def _benign(self, ids: NDArray[Any], found: Evaluation, prefix: str = "") -> dict[str, Scalar]:
        """Summarise the clients that are not contaminated; empty where none is, or no other is evaluated."""
        task = self._task
        benign = ~np.isin(ids, list(task.attackers))
        if not task.attackers or not benign.any():
            return {}
        theirs = _those(found, benign)
        spread = fairness(task.scores(theirs))
        metrics: dict[str, Scalar] = {
            f"benign_{prefix}{task.metric}": spread.mean,
            f"benign_{prefix}worst10": spread.worst10,
        }
        if not prefix:
            metrics |= {f"benign_{name}": value for name, value in task.summary(theirs).items()}
        return metrics

    def _personal(self, results: Reports) -> dict[str, Scalar]:
        """Summarise the clients' personal models; empty where nobody reports one that can be used."""
        reports = self._usable([(n, metrics) for n, metrics in results if "personal_loss_sum" in metrics], "personal_")
        if not reports:
            return {}
        found, name = _gathered(self._task, reports, "personal_"), f"personal_{self._task.metric}"
        ids = np.array([metrics["partition_id"] for _, metrics in reports])
        spread = fairness(self._task.scores(found))
        return {
            name: spread.mean,
            f"{name}_std": spread.std,
            "personal_worst10": spread.worst10,
            "personal_best10": spread.best10,
            "personal_loss": float(found.loss_sum.sum() / found.num_examples.sum()),
            **self._benign(ids, found, "personal_"),
        }

    def _usable(self, results: Reports, prefix: str = "") -> Reports:
        """Return the reports that count, and log the others with the reason."""
        usable = []
        for number, metrics in results:
            cid = metrics.get("partition_id")
            try:
                if not is_integer(cid) or cid not in self._clients:
                    raise _UnusableError(f"partition_id is not an integer from 0 to {self._clients[-1]}")
                self._check(number, metrics, prefix)
            except _UnusableError as error:
                words = (self._round, prefix.replace("_", " "), reprlib.repr(cid), error)
                logger.warning("round %d: the %sevaluation of client %s is not used: %s", *words)
            else:
                usable.append((number, metrics))
        return usable

    def _check(self, number: int, metrics: Mapping[str, Scalar], prefix: str) -> None:
        """Raise _UnusableError unless a client's report has all that its score is made of, and a possible score."""
        task, loss_sum = self._task, metrics.get(prefix + "loss_sum")
        if not is_count(number) or number > _MOST:
            raise _UnusableError(f"its number of examples is {reprlib.repr(number)}")
        if not is_real(loss_sum) or abs(loss_sum) > _HUGE:
            raise _UnusableError(f"{prefix}loss_sum={reprlib.repr(loss_sum)} is not a finite number")
        sums = {}
        for key, shape in task.sums.items():
            if prefix + key in metrics:  # a client of before may lack what only the summary needs
                sums[key] = _array(prefix + key, metrics[prefix + key])[None]
                if sums[key].shape[1:] != shape:
                    raise _UnusableError(f"{prefix}{key} has the shape {sums[key].shape[1:]}, not {shape}")
        try:
            (score,) = task.scores(Evaluation(np.array([number]), np.array([float(loss_sum)]), sums))
        except KeyError as error:
            raise _UnusableError(f"it lacks {prefix}{error.args[0]}") from error
        if not 0 <= score <= 1:
            raise _UnusableError(f"its {prefix}{task.metric} would be {score:g}")


def _array(key: str, value: Scalar) -> NDArray[Any]:
    """Return a number, or an array in JSON; raise _UnusableError if it is none, negative, or not finite."""
    try:
        array = np.array(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"{key}={reprlib.repr(value)} is not an array in JSON") from error
    if array.dtype.kind not in "iuf" or not ((array >= 0) & (array <= _MOST)).all():
        raise _UnusableError(f"{key}={reprlib.repr(value)} is not made of numbers from 0 to {_MOST:g}")
    return array


def _gathered(task: Task, results: Reports, prefix: str = "") -> Evaluation:
    """Put together what clients report of their evaluations, see `client_apps.app`; all are usable."""
    reported = [key for key in task.sums if all(prefix + key in metrics for _, metrics in results)]
    return Evaluation(
        num_examples=np.array([n for n, _ in results]),
        loss_sum=np.array([metrics[prefix + "loss_sum"] for _, metrics in results], np.float64),
        sums={key: np.stack([_array(key, metrics[prefix + key]) for _, metrics in results]) for key in reported},
    )


def _those(found: Evaluation, which: NDArray[np.bool_]) -> Evaluation:
    sums = {key: values[which] for key, values in found.sums.items()}
    return Evaluation(found.num_examples[which], found.loss_sum[which], sums)
