"""Stability: how the global model moves, and what it forgets, from round to round."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.common import Parameters
from numpy.typing import NDArray

from strategies import LayerMap
from strategies.options import is_real
from strategies.updates import decode_all

from .metrics import forgetting, share_fell, straightness, total_variation, udp, udp_norm

logger = logging.getLogger(__name__)

Arrays = list[NDArray[Any]]


class Stability:
    """Measures the way of the global model from its start, one round after the other.

    θ is the trainable floating-point tensors; running statistics and counters do not count. Everything is counted over
    what this object has seen, and what was loaded into it with `load_state`. Forgetting and total variation are
    sums over the evaluated rounds, round 0 (the untrained model) included where it was evaluated, so runs with another
    number of evaluations are not comparable.

    A round costs one decoding of the model, as views, and two passes over its tensors, in float64 with a temporary of
    the size of one tensor: about 10 ns a parameter. The models of the start and of the last round stay in memory.

    Parameters
    ----------
    layers : LayerMap, optional
        Which tensors are trainable; by default those that are floating-point.
    metric : str
        Name of the headline metric in a round's record; higher is better.
    udp_loss_delta, udp_norm_delta : float
        δ of `experiments.metrics.udp`, in the units of the loss, and of `udp_norm`, in those of the weights.
    """

    def __init__(self, layers: LayerMap | None, metric: str, *, udp_loss_delta: float, udp_norm_delta: float) -> None:
        self._layers = layers
        self._metric = metric
        self._loss_delta = udp_loss_delta
        self._norm_delta = udp_norm_delta
        self._parameters: Parameters | None = None  # θ_r
        self._start: Arrays | None = []  # None: a model that cannot be measured
        self._now: Arrays | None = []
        self._distance = 0.0
        self._steps: list[float] = []
        self._losses: list[float] = []
        self._scores: list[float] = []

    def start(self, parameters: Parameters) -> None:
        """Take θ_0; of several calls the first counts."""
        if self._parameters is None:
            self._start = self._now = self._trainable(parameters)
            self._parameters = parameters

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return what a resumed run needs besides the global model: the start, by position, and the series so far."""
        series = {"steps": self._steps, "losses": self._losses, "scores": self._scores}
        return {
            **{name: np.array(values, np.float64) for name, values in series.items()},
            "distance": np.array(self._distance),
            "measurable": np.array([self._start is not None, self._now is not None]),
            **{f"start/{i}": np.asarray(a, order="C") for i, a in enumerate(self._start or [])},
        }

    def load_state(self, state: Mapping[str, NDArray[Any]], parameters: Parameters) -> None:
        """Go on where `state` was taken.

        Parameters
        ----------
        state : mapping of str to ndarray
        parameters : Parameters
            θ_r, the global model at that time.
        """
        started, measurable = state["measurable"].tolist()
        self._steps, self._losses, self._scores = (state[name].tolist() for name in ("steps", "losses", "scores"))
        self._distance = float(state["distance"])
        count = sum(name.startswith("start/") for name in state)
        self._start = [state[f"start/{i}"] for i in range(count)] if started else None
        self._now = self._trainable(parameters) if measurable else None
        self._parameters = parameters

    def measure(self, parameters: Parameters | None, record: Mapping[str, Any]) -> dict[str, float]:
        """Return what is to be added to a round's record.

        Parameters
        ----------
        parameters : Parameters or None
            θ_r, the global model after the round: in a failed round that of before, a step of length 0. None, and θ_0
            where `start` was not called before, leave out all that needs two models.
        record : mapping
            The round's record: its `round`, 0 being the model before all training, the clients' aggregated
            `train_loss`, and the headline metric where the round was evaluated. Where `failed_round` is true, the loss
            does not count: the model did not move.

        Returns
        -------
        dict
            From round 1 on `step_norm`, ‖θ_r − θ_{r−1}‖, `path_length`, the sum of these, `distance_from_start`,
            ‖θ_r − θ_0‖, `straightness` and `udp_norm`; `udp_loss` once a loss counts; in an evaluated round
            `forgetting`, `updatable`, `zeta`, `total_variation` and `share_fell` of the headline metric. All are those
            of the rounds so far. What is not finite is NaN: lengths to and from a model that is not, or that cannot
            be read or has another shape, which is logged, and all that counts on them.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._measure(parameters, record)
        return {name: value if math.isfinite(value) else math.nan for name, value in found.items()}

    def _measure(self, parameters: Parameters | None, record: Mapping[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        if record["round"] and parameters is not None and self._parameters is not None:
            step = self._move(parameters)
            self._steps.append(step)
            length = _sum(self._steps)
            found |= {"step_norm": step, "path_length": length, "distance_from_start": self._distance}
            finite = math.isfinite(length) and math.isfinite(self._distance)
            found["straightness"] = straightness(self._distance, length) if finite else math.nan
            known = all(map(math.isfinite, self._steps))
            found["udp_norm"] = udp_norm(self._steps, self._norm_delta) if known else math.nan
        elif parameters is not None:
            self.start(parameters)
        if is_real(record.get("train_loss")) and not record.get("failed_round"):
            self._losses.append(float(record["train_loss"]))
        if self._losses:
            found["udp_loss"] = udp(self._losses, self._loss_delta)
        if is_real(record.get(self._metric)):
            self._scores.append(float(record[self._metric]))
            found |= forgetting(self._scores, higher_is_better=True)._asdict()
            found["total_variation"] = total_variation(self._scores)
            found["share_fell"] = share_fell(self._scores)
        return found

    def _move(self, parameters: Parameters) -> float:
        """Go on to the next model, and return the length of the step."""
        if parameters is self._parameters:
            return 0.0
        before, self._now, self._parameters = self._now, self._trainable(parameters), parameters
        self._distance = _distance(self._now, self._start)
        return self._distance if before is self._start else _distance(self._now, before)

    def _trainable(self, parameters: Parameters) -> Arrays | None:
        """Decode a model as views, and return those of its trainable tensors; None if there is no such model."""
        try:
            arrays = decode_all(parameters)
            self._layers = LayerMap.from_arrays(arrays) if self._layers is None else self._layers.for_arrays(arrays)
        except ValueError as error:
            logger.warning("the way of the global model cannot be measured: %s", " ".join(str(error).split()))
            return None
        return [arrays[t] for t in self._layers.indices("trainable")]


def _distance(one: Arrays | None, other: Arrays | None) -> float:
    """Return the Euclidean distance of two models, summed up in float64 tensor by tensor; NaN if one is None."""
    if one is None or other is None:
        return math.nan
    squares = []
    for a, b in zip(one, other, strict=True):
        difference = np.asarray(np.subtract(a, b, dtype=np.float64))  # of 0-d arrays NumPy returns a scalar
        squares.append(float(np.square(difference, out=difference).sum()))
    return math.sqrt(_sum(squares))


def _sum(lengths: list[float]) -> float:
    """Return the sum of numbers that are not negative, infinite where it is beyond every float."""
    try:
        return math.fsum(lengths)
    except OverflowError:
        return math.inf
