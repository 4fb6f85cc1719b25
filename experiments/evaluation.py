"""Evaluator: the global model on every client's test split, on the server in one pass or by the clients themselves.

Both ways count correct answers per client and go through the same summary, so they give the same numbers. Only clients
can evaluate their personal models (Ditto), which never leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.common import NDArrays, Scalar

from client_apps.arrays import set_arrays
from client_apps.tasks import Task

from .metrics import fairness

ClientSink = Callable[[int, Any, Any, Any, Any], None]
"""Receives (round, client ids, numbers of examples, accuracies, mean losses)."""


class Evaluator:
    """Evaluates the global model on the clients' test splits.

    Parameters
    ----------
    task : Task
        Holds the data and makes the model.
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
        return self._summarise(
            server_round, np.asarray(self._clients), found.num_examples, found.correct, found.loss_sum
        )

    def start_round(self, server_round: int) -> dict[str, Scalar]:
        """Flower's `on_evaluate_config_fn`: note the round that clients are about to evaluate."""
        self._round = server_round
        return {}

    def from_clients(self, results: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
        """Flower's `evaluate_metrics_aggregation_fn`: what the clients counted, summarised.

        Parameters
        ----------
        results : list of (int, dict)
            Each client's number of test examples, and its metrics `partition_id`, `correct` and `loss_sum`; with
            personal models also `personal_correct` and `personal_loss_sum`.

        Returns
        -------
        dict
            Of the global model `accuracy`, `accuracy_std`, `worst10`, `best10`, `accuracy_weighted` and
            `clients_evaluated`. Where clients report them, of their personal models `personal_accuracy`,
            `personal_accuracy_std`, `personal_worst10`, `personal_best10`, every client counting once, and
            `personal_loss`, the mean over all examples. Clients without test data are left out.
        """
        columns = [
            np.array([metrics[key] for _, metrics in results]) for key in ("partition_id", "correct", "loss_sum")
        ]
        examples = np.array([n for n, _ in results])
        _, metrics = self._summarise(self._round, columns[0], examples, columns[1], columns[2])
        return metrics | _personal(results)

    def _summarise(
        self, server_round: int, ids: np.ndarray, examples: np.ndarray, correct: np.ndarray, loss_sum: np.ndarray
    ) -> tuple[float, dict[str, Scalar]]:
        tested = examples > 0  # a client with a single sample has nothing to test on
        ids, examples, correct, loss_sum = ids[tested], examples[tested], correct[tested], loss_sum[tested]
        accuracy = correct / examples
        self._sink(server_round, ids, examples, accuracy, loss_sum / examples)
        spread = fairness(accuracy)
        return float(loss_sum.sum() / examples.sum()), {
            "accuracy": spread.mean,
            "accuracy_std": spread.std,
            "worst10": spread.worst10,
            "best10": spread.best10,
            "accuracy_weighted": float(correct.sum() / examples.sum()),
            "clients_evaluated": len(ids),
        }


def _personal(results: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
    """Summarise the clients' personal models; empty where nobody with test data reports one."""
    found = [(n, metrics) for n, metrics in results if n > 0 and "personal_correct" in metrics]
    if not found:
        return {}
    examples = np.array([n for n, _ in found])
    correct, loss_sum = (
        np.array([metrics[key] for _, metrics in found]) for key in ("personal_correct", "personal_loss_sum")
    )
    spread = fairness(correct / examples)
    return {
        "personal_accuracy": spread.mean,
        "personal_accuracy_std": spread.std,
        "personal_worst10": spread.worst10,
        "personal_best10": spread.best10,
        "personal_loss": float(loss_sum.sum() / examples.sum()),
    }
