"""Evaluator: the global model on every client's test split, on the server in one pass or by the clients themselves.

Both ways count per client and go through the same summary, so they give the same numbers. Only clients can evaluate
their personal models (Ditto), which never leave them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.common import NDArrays, Scalar
from numpy.typing import NDArray

from client_apps.arrays import set_arrays
from client_apps.tasks import Evaluation, Task

from .metrics import fairness

ClientSink = Callable[[int, Any, Any, Any, Any], None]
"""Receives (round, client ids, numbers of examples, scores, mean losses)."""

Reports = Sequence[tuple[int, Mapping[str, Scalar]]]


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
            `personal_best10`, every client counting once, and `personal_loss`, the mean over all examples. Clients
            without test data are left out.
        """
        ids = np.array([metrics["partition_id"] for _, metrics in results])
        _, metrics = self._summarise(self._round, ids, _gathered(self._task, results))
        return metrics | self._personal(results)

    def _summarise(self, server_round: int, ids: NDArray[Any], found: Evaluation) -> tuple[float, dict[str, Scalar]]:
        task = self._task
        tested = found.num_examples > 0  # a client with a single sample has nothing to test on
        ids, found = ids[tested], _those(found, tested)
        examples, loss_sum, scores = found.num_examples, found.loss_sum, task.scores(found)
        self._sink(server_round, ids, examples, scores, loss_sum / examples)
        spread = fairness(scores)
        return float(loss_sum.sum() / examples.sum()), {
            task.metric: spread.mean,
            f"{task.metric}_std": spread.std,
            "worst10": spread.worst10,
            "best10": spread.best10,
            f"{task.metric}_weighted": float(scores @ examples / examples.sum()),
            "clients_evaluated": len(ids),
            **task.summary(found),
        }

    def _personal(self, results: Reports) -> dict[str, Scalar]:
        """Summarise the clients' personal models; empty where nobody with test data reports one."""
        reports = [(n, metrics) for n, metrics in results if n > 0 and "personal_loss_sum" in metrics]
        if not reports:
            return {}
        found, name = _gathered(self._task, reports, "personal_"), f"personal_{self._task.metric}"
        spread = fairness(self._task.scores(found))
        return {
            name: spread.mean,
            f"{name}_std": spread.std,
            "personal_worst10": spread.worst10,
            "personal_best10": spread.best10,
            "personal_loss": float(found.loss_sum.sum() / found.num_examples.sum()),
        }


def _gathered(task: Task, results: Reports, prefix: str = "") -> Evaluation:
    """Put together what clients report of their evaluations, see `client_apps.app`."""

    def column(key: str) -> NDArray[Any]:
        values = [metrics[prefix + key] for _, metrics in results]
        return np.array([json.loads(value) if isinstance(value, str) else value for value in values])

    reported = [key for key in task.sums if all(prefix + key in metrics for _, metrics in results)]
    return Evaluation(
        num_examples=np.array([n for n, _ in results]),
        loss_sum=column("loss_sum"),
        sums={key: column(key) for key in reported},
    )


def _those(found: Evaluation, which: NDArray[np.bool_]) -> Evaluation:
    sums = {key: values[which] for key, values in found.sums.items()}
    return Evaluation(found.num_examples[which], found.loss_sum[which], sums)
