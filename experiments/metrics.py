"""What a run is judged by: fairness over clients, speed, forgetting, and stability over rounds."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
    """ζ and its two parts, in units of the metric summed over evaluated rounds; lower is better.

    The round of the untrained model, where it was evaluated, is one of them. As these are sums and not means, runs
    with another number of evaluations are not comparable.

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
    metric = _finite("Forgetting", series)
    psi = metric - metric[-1] if higher_is_better else metric[-1] - metric
    gained, lost = float(psi[psi > 0].sum()), float(psi[psi <= 0].sum())
    return Forgetting(forgetting=gained, updatable=lost, zeta=gained + lost)


def total_variation(series: Sequence[float]) -> float:
    """Return how far a metric has gone up and down, Σ_r |metric_{r+1} − metric_r|; 0 for a single value.

    A metric that only rises has its gain, last less first, and every fall adds twice its depth. Our choice: the
    methods' papers define no such measure.

    Parameters
    ----------
    series : sequence of float
        The metric of the global model, one finite value per evaluated round, oldest first.

    Returns
    -------
    float
        In the units of the metric.

    Raises
    ------
    ValueError
        If the series is empty or holds a value that is not finite.
    """
    return float(np.abs(np.diff(_finite("Total variation", series))).sum())


def share_fell(series: Sequence[float]) -> float:
    """Return the share of evaluated rounds in which a metric fell below its value in the evaluated round before.

    |{r : metric_{r+1} < metric_r}| / (R − 1) for R evaluated rounds: the first has none before it and does not count;
    0 for a single value. Our choice, as in `total_variation`.

    Parameters
    ----------
    series : sequence of float
        The metric of the global model, where a higher value is better; as in `total_variation`.

    Raises
    ------
    ValueError
        If the series is empty or holds a value that is not finite.
    """
    return _share(np.diff(_finite("The share of rounds that fell", series)) < 0)


def udp(series: Sequence[float], delta: float) -> float:
    """Return the unbounded drift probability: the share of rounds whose loss rose by more than δ over the one before.

    |{r : F_{r+1} − F_r > δ}| / (R − 1) for R rounds with a loss: the first has none before it and does not count;
    0 for a single value. The name is FedRef's (arXiv 2506.23210), which defines it nowhere in public; the formula is
    our choice. Where other clients train in every round, some of the rises are theirs, not the model's: δ sets the
    least that counts.

    Parameters
    ----------
    series : sequence of float
        The clients' aggregated training loss, one finite value per round that counts, oldest first: not of a failed
        round, which does not move the model.
    delta : float
        δ, in the units of the loss.

    Raises
    ------
    ValueError
        If the series is empty or holds a value that is not finite.
    """
    return _share(np.diff(_finite("UDP", series)) > delta)


def udp_norm(step_norms: Sequence[float], delta: float) -> float:
    """Return the norm version of `udp`: the share of rounds that moved the global model by more than δ.

    |{r : ‖θ_{r+1} − θ_r‖ > δ}| / T for T rounds of training, failed ones, which do not move it, among them.

    Parameters
    ----------
    step_norms : sequence of float
        ‖θ_{r+1} − θ_r‖, one finite value per round, oldest first.
    delta : float
        δ, in the units of the norms.

    Raises
    ------
    ValueError
        If the series is empty or holds a value that is not finite.
    """
    return _share(_finite("UDP", step_norms) > delta)


def straightness(distance: float, path_length: float) -> float:
    """Return ‖θ_T − θ_0‖ / Σ_r ‖θ_{r+1} − θ_r‖, how straight the global model's way through weight space is.

    1 where every step went the same way, 0 where the model came back to its start, and 1 for a way of length 0, which
    took no detour. Our choice, as in `total_variation`.

    Parameters
    ----------
    distance : float
        ‖θ_T − θ_0‖.
    path_length : float
        The sum of the norms of all steps. By the triangle inequality it is at least the distance; rounding that says
        otherwise is cut off.

    Raises
    ------
    ValueError
        If one of them is not finite, or is negative.
    """
    if not (np.isfinite([distance, path_length]).all() and min(distance, path_length) >= 0):
        raise ValueError(f"Straightness needs two finite lengths of at least 0, but got {distance} and {path_length}.")
    return min(1.0, distance / path_length) if path_length > 0 else 1.0


def _finite(name: str, series: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(series, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"{name} needs a series of one or more finite values.")
    return values


def _share(which: NDArray[np.bool_]) -> float:
    """Return the share of those that are true; 0 of nothing."""
    return float(which.mean()) if which.size else 0.0
