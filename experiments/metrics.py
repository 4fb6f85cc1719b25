"""What a run is judged by: fairness over clients, speed, and forgetting."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Fairness(NamedTuple):
    """How a metric is distributed over clients, every client counting once.

    Attributes
    ----------
    mean, std : float
        Unweighted mean and population standard deviation (``ddof=0``).
    worst10, best10 : float
        Mean of the lowest and of the highest tenth of the clients, the tenth rounded up to whole clients.
    """

    mean: float
    std: float
    worst10: float
    best10: float


class Forgetting(NamedTuple):
    """ζ and its two parts, in units of the metric summed over rounds; lower is better.

    Attributes
    ----------
    forgetting : float
        Sum of the positive ψ: rounds that were better than the last one.
    updatable : float
        Sum of the other ψ: rounds that were worse. Slow early learning makes it large and negative.
    zeta : float
        Sum of all ψ.
    """

    forgetting: float
    updatable: float
    zeta: float


def fairness(values: Iterable[float]) -> Fairness:
    """Summarise one value per client, where a higher value is better.

    Parameters
    ----------
    values : iterable of float
        One value per client, e.g. test accuracy in [0, 1]. NaN marks a client without test data, which
        is left out.

    Returns
    -------
    Fairness
        In the units of ``values``.

    Raises
    ------
    ValueError
        If no value is left.

    Notes
    -----
    Unweighted mean and population standard deviation over all clients are the measures of CRAFT
    (arXiv 2605.21317); the worst and best 10 % are those of q-FedAvg (arXiv 1905.10497).
    """
    array = np.fromiter(values, dtype=np.float64)
    array = np.sort(array[~np.isnan(array)])
    if array.size == 0:
        raise ValueError("Fairness needs at least one client with a value that is not NaN.")
    tenth = -(-array.size // 10)  # ceil in integers: in floats .1 * 70 rounds up to 8
    return Fairness(
        mean=float(array.mean()),
        std=float(array.std()),
        worst10=float(array[:tenth].mean()),
        best10=float(array[-tenth:].mean()),
    )


def rounds_to_target(rounds: Sequence[int], accuracies: Sequence[float], target: float) -> int | None:
    """Return the first round whose accuracy is at least ``target``, or None if there is none.

    Parameters
    ----------
    rounds : sequence of int
        Rounds in which accuracy was measured, ascending.
    accuracies : sequence of float
        Accuracy of each of those rounds, in the units of ``target``; NaN never reaches it.
    target : float
        The accuracy to reach.

    Raises
    ------
    ValueError
        If the two sequences differ in length.
    """
    reached = (round_ for round_, accuracy in zip(rounds, accuracies, strict=True) if accuracy >= target)
    return next(reached, None)


def forgetting(series: Sequence[float], higher_is_better: bool) -> Forgetting:
    """Measure how much of what was known during a run is lost at its end.

    ψ_r = metric_r − metric_last, with the sign flipped where lower is better; ζ = Σ_r ψ_r (FedRef,
    arXiv 2506.23210).

    Parameters
    ----------
    series : sequence of float
        The metric of the global model, one finite value per evaluated round, oldest first.
    higher_is_better : bool
        True for accuracy or Dice, False for a loss or HD95.

    Raises
    ------
    ValueError
        If the series is empty or holds a value that is not finite.
    """
    metric = np.asarray(series, dtype=np.float64)
    if metric.size == 0 or not np.isfinite(metric).all():
        raise ValueError("Forgetting needs a series of one or more finite values.")
    psi = metric - metric[-1] if higher_is_better else metric[-1] - metric
    gained, lost = float(psi[psi > 0].sum()), float(psi[psi <= 0].sum())
    return Forgetting(forgetting=gained, updatable=lost, zeta=gained + lost)
