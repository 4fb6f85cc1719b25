"""check_strategy: what a strategy of this suite has to keep, as checks that an author of a new one can import.

All at once, in a test of any kind:

    from strategies.testing import check_strategy

    check_strategy(lambda **common: MyMethod(strength=0.5, **common))

or, with pytest, as one test for each check:

    import pytest
    from strategies.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_contract(check):
        check(lambda **common: MyMethod(strength=0.5, **common))

The function passed makes a new strategy each time it is called, with some keywords of `UpdateStrategy`: device, seed,
layers, initial_parameters, fraction_fit, server_lr_decay, min_completed, max_failed_rounds, max_weight_share,
clip_to_median; never server_lr. The clients report `train_loss`, `initial_loss`, `local_steps` and `step_weight`;
where a method needs more, `metrics` maps a client's index to what it reports besides:
`metrics=lambda i: {"variance": 1.0 + i}`.

A check that fails raises AssertionError: the check's name, what was expected, and what was seen. Everything is made
of Flower's plain objects: no network, no data, no files, and a second or two for all checks.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Scalar,
    Status,
    ndarrays_to_parameters,
)
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from .base import RoundsFailed, UpdateStrategy
from .layers import LayerMap
from .updates import decode_all

Make = Callable[..., UpdateStrategy]
"""Makes a new strategy from keywords of `UpdateStrategy`."""
Metrics = Callable[[int], Mapping[str, Scalar]]
"""Maps a client's index to what it reports besides the usual."""
Array = npt.NDArray[Any]
Result = tuple[ClientProxy, FitRes]

REPORTED = (
    "clients_sampled",
    "clients_accepted",
    "clients_rejected",
    "clients_failed",
    "conflict_share_before",
    "conflict_share_after",
    "min_alignment",
    "direction_norm",
    "cosine_to_mean",
    "parameter_norm",
    "train_loss",
    "failed_round",
    "aggregate_seconds",
)
"""The metrics that every successful round reports."""

_NAMES = (
    "fc.weight",
    "fc.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "scale",
)
_MEAN, _VAR, _COUNT = (_NAMES.index(f"norm.{x}") for x in ("running_mean", "running_var", "num_batches_tracked"))


class Check(Protocol):
    """One check; raises AssertionError."""

    def __call__(self, make_strategy: Make, *, device: str = "cpu", metrics: Metrics | None = None) -> None:
        """Run it on one device."""


CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which `check_strategy` runs them."""


def check_strategy(
    make_strategy: Make, *, devices: Sequence[str] | None = None, metrics: Metrics | None = None
) -> None:
    """Run every check on a strategy.

    Parameters
    ----------
    make_strategy : callable
        Takes keywords of `UpdateStrategy` and returns a new strategy: `lambda **common: MyMethod(**common)`.
    devices : sequence of str, optional
        Where its solves run, one after the other. Default: the CPU, and the GPU where there is one.
    metrics : callable, optional
        Maps a client's index, 0, 1, ..., to what it reports besides `train_loss`, `initial_loss`, `local_steps` and
        `step_weight`.

    Raises
    ------
    AssertionError
        By the first check that fails: its name, what was expected and what was seen.
    """
    found = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    for device in found if devices is None else devices:
        for check in CHECKS.values():
            check(make_strategy, device=device, metrics=metrics)


class Proxy(ClientProxy):
    """A client that is only an id; whatever it is asked, it is not there."""

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Raise ValueError."""
        raise ValueError("no such client")

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Raise ValueError."""
        raise ValueError("no such client")

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Raise ValueError."""
        raise ValueError("no such client")

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Raise ValueError."""
        raise ValueError("no such client")

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Raise ValueError."""
        raise ValueError("no such client")


# ---- what the checks are made of ----------------------------------------------------------------------------


class _Violation(AssertionError):
    """The contract is broken; the message says what was expected and what was seen."""


def _expect(ok: object, wanted: str, seen: object) -> None:
    if not ok:
        raise _Violation(f"expected {wanted}, saw {seen}")


class _Log(logging.Handler):
    """Collects what this suite logs, instead of showing it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Catch the log, and leave one thread to PyTorch: matrices this small only lose by more."""
    logger, log = logging.getLogger(__package__), _Log()
    before, threads = logger.propagate, torch.get_num_threads()
    logger.addHandler(log)
    logger.propagate = False
    torch.set_num_threads(1)
    try:
        yield log.lines
    finally:
        torch.set_num_threads(threads)
        logger.removeHandler(log)
        logger.propagate = before


@dataclass(frozen=True)
class _Subject:
    """The strategy under test, and clients for it."""

    make: Make
    device: str
    metrics: Metrics
    log: list[str]

    def strategy(self, start: Sequence[Array] | None = None, **common: Any) -> UpdateStrategy:
        if start is not None:
            common["initial_parameters"] = ndarrays_to_parameters(list(start))
        made = self.make(device=self.device, **common)
        _expect(isinstance(made, UpdateStrategy), "an UpdateStrategy from make_strategy", type(made).__name__)
        return made

    def reports(self, i: int) -> dict[str, Scalar]:
        """What client i reports; the losses all differ, and do not rise with i."""
        loss = 1 + 0.1 * (7 * i % 23) + 0.001 * i
        steps = 3 + i % 4
        usual: dict[str, Scalar] = {
            "train_loss": 0.9 * loss,
            "initial_loss": loss,
            "local_steps": steps,
            "step_weight": float(steps),
        }
        return {**usual, **self.metrics(i)}

    def result(self, i: int, arrays: Sequence[Array], n: Any = None, cid: str | None = None) -> Result:
        """Client i's result; by default under the id i, and with a number of examples that differs between clients."""
        parameters = ndarrays_to_parameters(list(arrays))
        res = FitRes(Status(Code.OK, ""), parameters, 10 + 7 * i % 31 if n is None else n, self.reports(i))
        return Proxy(str(i) if cid is None else cid), res

    def results(self, start: Sequence[Array], m: int = 5, seed: int = 1, scale: float = 0.1) -> list[Result]:
        """m clients that have trained from `start`."""
        return [self.result(i, arrays) for i, arrays in enumerate(_trained(start, m, seed, scale))]


def _model(dtype: Any = np.float32) -> list[Array]:
    """A small model: a matrix, a vector, a 0-d tensor and a counter."""
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(4, 3)).astype(dtype),
        rng.normal(size=3).astype(dtype),
        np.array(rng.normal(), dtype),
        np.array(3),
    ]


def _norm_model(dtype: Any = np.float32) -> list[Array]:
    """The model of `_NAMES`."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in [(4, 3), *[(4,)] * 5]]
    arrays[_VAR] = np.full(4, 0.5, dtype)
    return [*arrays, np.array(3), np.array(rng.normal(), dtype)]


def _norm_layers() -> LayerMap:
    return LayerMap.from_names(_NAMES, [a.shape for a in _norm_model()])


def _trained(start: Sequence[Array], m: int, seed: int = 1, scale: float = 0.1) -> list[list[Array]]:
    """m models near `start`; counters move by the client's index."""
    rng = np.random.default_rng(seed)

    def train(a: Array, i: int) -> Array:
        if a.dtype.kind != "f":
            return np.asarray(a + i)
        with np.errstate(over="ignore"):
            return np.asarray(a + scale * rng.normal(size=a.shape)).astype(a.dtype)

    return [[train(a, i) for a in start] for i in range(m)]


def _manager(clients: int) -> SimpleClientManager:
    manager = SimpleClientManager()
    for i in range(clients):
        manager.register(Proxy(str(i)))
    return manager


def _aggregate(
    s: UpdateStrategy, number: int, sent: list[Result], failures: Sequence[BaseException] = ()
) -> tuple[Parameters, dict[str, Scalar]]:
    parameters, metrics = s.aggregate_fit(number, sent, list(failures))
    if parameters is None:
        raise _Violation("expected a model from aggregate_fit, saw None")
    return parameters, metrics


def _moved(s: UpdateStrategy, number: int, sent: list[Result], what: str = "a round") -> Parameters:
    """Play a round that has to succeed, and return the model, which has to be finite."""
    parameters, metrics = _aggregate(s, number, sent)
    seen = {key: metrics[key] for key in ("failed_reason", "rejection_reasons") if key in metrics}
    _expect(metrics.get("failed_round") is False, f"{what} to succeed (round {number})", seen)
    _require_finite(s, parameters, metrics, what)
    return parameters


def _require_finite(s: UpdateStrategy, parameters: Parameters, metrics: Mapping[str, Scalar], what: str) -> None:
    for i, array in enumerate(_arrays(parameters)):
        _expect(np.isfinite(array).all(), f"a finite model after {what}", f"NaN or Inf in tensor {i}")
    for key, value in metrics.items():
        fine = not isinstance(value, float) or math.isfinite(value)
        _expect(fine, f"finite metrics after {what}", f"{key}={value!r}")
    for key, tensor in s.memory.items():
        _expect(bool(torch.isfinite(tensor).all()), f"finite memory after {what}", f"NaN or Inf in {key!r}")


def _arrays(parameters: Parameters) -> list[Array]:
    return list(map(np.asarray, decode_all(parameters)))


def _bits(parameters: Parameters) -> list[bytes]:
    return [bytes(tensor) for tensor in parameters.tensors]


def _require_same(found: Parameters, expected: Parameters, wanted: str) -> None:
    """Require the same bits, or say by how much they differ."""
    if _bits(found) == _bits(expected):
        return
    for i, (a, b) in enumerate(zip(_arrays(found), _arrays(expected), strict=False)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise _Violation(f"expected {wanted}, saw tensor {i} as {a.dtype}{a.shape} and {b.dtype}{b.shape}")
        if not np.array_equal(a, b):
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            raise _Violation(f"expected {wanted}, saw a difference of {apart:.3g} in tensor {i}")
    raise _Violation(f"expected {wanted}, saw other bytes")


def _as_saved(s: UpdateStrategy) -> dict[str, Any]:
    """The state, once through JSON but for its tensors."""
    state = s.state_dict()
    memory = {key: tensor.clone() for key, tensor in state["memory"].items()}
    return {**json.loads(json.dumps({k: v for k, v in state.items() if k != "memory"})), "memory": memory}


def _difference(one: Mapping[str, Any], two: Mapping[str, Any], ignore: Sequence[str] = ()) -> str:
    """Say in what two states differ; empty if in nothing."""
    for key in one:
        if key == "memory" or key in ignore:
            continue
        if one[key] != two[key]:
            return f"{key}={one[key]!r} and {key}={two[key]!r}"
    a, b = one["memory"], two["memory"]
    if set(a) != set(b):
        return f"memory of {sorted(a)} and {sorted(b)}"
    return next((f"other numbers in memory {key!r}" for key in a if not torch.equal(a[key], b[key])), "")


def _check(body: Callable[[_Subject], None]) -> Callable[[_Subject], None]:
    """List a check in `CHECKS` under its name without the underscore."""
    name = body.__name__.removeprefix("_")

    def check(make_strategy: Make, *, device: str = "cpu", metrics: Metrics | None = None) -> None:
        with _listening() as log:
            try:
                body(_Subject(make_strategy, device, metrics or (lambda i: {}), log))
            except _Violation as error:
                raise AssertionError(f"{name}: {error}") from error
            except Exception as error:
                seen = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{name}: expected no error, saw {seen}") from error

    check.__name__ = check.__qualname__ = name
    check.__doc__ = body.__doc__
    CHECKS[name] = check
    return body


# ---- the checks: clients that cannot be used -----------------------------------------------------------------


@_check
def _unusable_clients_are_left_out(subject: _Subject) -> None:
    """Results that cannot be used are rejected, named and counted, and the rest moves the model as without them."""
    start = _model()
    good = subject.results(start)
    other = _trained(start, 1, seed=9)[0]

    def spoilt(position: int, value: float) -> list[Array]:
        arrays = [a.copy() for a in other]
        arrays[position].reshape(-1)[0] = value
        return arrays

    bad = {
        "NaN": subject.result(0, spoilt(0, math.nan), cid="NaN"),
        "Inf": subject.result(0, spoilt(1, math.inf), cid="Inf"),
        "0-d NaN": subject.result(0, spoilt(2, math.nan), cid="0-d NaN"),
        "shape": subject.result(0, [other[0].T, *other[1:]], cid="shape"),
        "dtype": subject.result(0, [other[0].astype(np.int64), *other[1:]], cid="dtype"),
        "missing tensor": subject.result(0, other[:-1], cid="missing tensor"),
        "further tensor": subject.result(0, [*other, other[0]], cid="further tensor"),
        "no examples": subject.result(0, other, 0, cid="no examples"),
        "fewer than none": subject.result(0, other, -5, cid="fewer than none"),
        "half an example": subject.result(0, other, 0.5, cid="half an example"),
        "status": subject.result(0, other, cid="status"),
        "no arrays": subject.result(0, other, cid="no arrays"),
    }
    bad["status"][1].status = Status(Code.FIT_NOT_IMPLEMENTED, "cannot fit")
    bad["no arrays"][1].parameters = Parameters([b"no .npy"] * len(start), "numpy.ndarray")
    expected = _moved(subject.strategy(start, min_completed=1), 1, good)
    first, *others = bad.values()
    mixed = [first, *good, *others]
    s = subject.strategy(start, min_completed=1)
    del subject.log[:]
    parameters, metrics = _aggregate(s, 1, mixed)
    counts = metrics.get("clients_accepted"), metrics.get("clients_rejected")
    _expect(counts == (len(good), len(bad)), f"{len(good)} clients accepted and {len(bad)} rejected", counts)
    reasons = json.loads(str(metrics.get("rejection_reasons", "[]")))
    for cid in bad:
        _expect(
            any(f"client {cid}: " in r for r in reasons), f"a reason for client {cid!r} in rejection_reasons", reasons
        )
        _expect(any(f"client {cid}: " in line for line in subject.log), f"client {cid!r} in the log", subject.log)
    _require_same(parameters, expected, "the same bits as without the rejected clients")


@_check
def _huge_numbers_are_rejected(subject: _Subject) -> None:
    """A client whose numbers cannot be squared is left out; where all are so, the round fails."""
    start = _model(np.float64)
    good, huge = subject.results(start), subject.result(9, _trained(start, 1, scale=1e170)[0])
    s = subject.strategy(start)
    parameters, metrics = _aggregate(s, 1, [huge, *good])
    _expect(metrics.get("clients_rejected") == 1, "an update of 1e170 to be rejected", metrics)
    _require_same(parameters, _moved(subject.strategy(start), 1, good), "the same bits as without the huge client")
    s = subject.strategy(start)
    parameters, metrics = _aggregate(s, 1, [huge])
    _expect(metrics.get("failed_round") is True, "a failed round where every client is rejected", metrics)
    _expect(metrics.get("failed_reason"), "a sentence in failed_reason", metrics)
    _require_same(parameters, ndarrays_to_parameters(start), "the model as it was")


@_check
def _duplicates_count_once(subject: _Subject) -> None:
    """Of several results by one client one is used, the same in any order of arrival."""
    start = _model()
    good = subject.results(start)
    expected = _moved(subject.strategy(start), 1, good)
    found, metrics = _aggregate(subject.strategy(start), 1, [*good, good[0]])
    _expect(metrics.get("clients_rejected") == 1, "the second of two results to be rejected", metrics)
    _require_same(found, expected, "the same bits as without the second result")
    other = subject.result(0, _trained(start, 1, seed=7)[0])
    one, _ = _aggregate(subject.strategy(start), 1, [*good, other])
    two, _ = _aggregate(subject.strategy(start), 1, [other, *good])
    _require_same(one, two, "the same one of two results whichever comes first")


@_check
def _required_metrics_are_required(subject: _Subject) -> None:
    """A client that does not report, as a number, what the method `requires` is rejected with the key's name."""
    start = _model()
    good = subject.results(start)
    for key in subject.strategy().requires:
        _expect(key in subject.reports(0), f"clients that report {key!r} (pass metrics=)", sorted(subject.reports(0)))
        for value in (None, math.nan, "much"):
            _, res = subject.result(8, _trained(start, 1, seed=9)[0])
            res.metrics = {k: v for k, v in res.metrics.items() if k != key}
            if value is not None:
                res.metrics[key] = value
            s = subject.strategy(start)
            parameters, metrics = _aggregate(s, 1, [*good, (Proxy("8"), res)])
            reasons = str(metrics.get("rejection_reasons"))
            named = metrics.get("clients_rejected") == 1 and "client 8: " in reasons and key in reasons
            _expect(named, f"a client with {key}={value!r} to be rejected with the key's name", reasons)
            expected = _moved(subject.strategy(start), 1, good)
            _require_same(parameters, expected, f"the same bits as without the client that has no {key!r}")


@_check
def _an_inflated_count_has_the_largest_share(subject: _Subject) -> None:
    """With `max_weight_share`, a client counts no more than that, whatever number of examples it claims."""

    def play(counts: Sequence[int]) -> list[Parameters]:
        start: Sequence[Array] = _norm_model()
        s, models = subject.strategy(start, layers=_norm_layers(), max_weight_share=0.5), []
        for number in (1, 2):
            trained = _trained(start, 4, seed=number)
            sent = [subject.result(i, a, n) for i, (a, n) in enumerate(zip(trained, counts, strict=True))]
            models.append(_moved(s, number, sent))
            start = _arrays(models[-1])
        return models

    # What is left of the half is dealt by 1 : 2 : 1, and eighths are exact.
    for found, expected in zip(play((10, 20, 10, 10**15)), play((1, 2, 1, 4)), strict=True):
        _require_same(found, expected, "a client that claims 10^15 examples to count as one with half of them")


@_check
def _a_long_update_is_cut_to_length(subject: _Subject) -> None:
    """With `clip_to_median`, an update that is longer counts as one that ends there."""
    start = _model(np.float64)[:3]

    def play(way: float, **options: Any) -> list[Array]:
        theta: Sequence[Array] = start
        s = subject.strategy(start, **options)
        for number in (1, 2):
            trained = _trained(theta, 5, seed=number)
            ways = [[a - b for a, b in zip(x, theta, strict=True)] for x in trained]
            lengths = [math.hypot(*(float(np.linalg.norm(a)) for a in each)) for each in ways]
            shorter = sorted([*lengths[:3], lengths[4]])
            # Client 3 goes the furthest, so of the five the median is the third of the others.
            goes = [
                [a * way * shorter[2] / lengths[3] for a in each] if i == 3 else each for i, each in enumerate(ways)
            ]
            sent = [subject.result(i, [a + b for a, b in zip(theta, each, strict=True)]) for i, each in enumerate(goes)]
            theta = _arrays(_moved(s, number, sent, "a round with a long update"))
        return list(theta)

    for t, (found, wanted, before) in enumerate(zip(play(1e4, clip_to_median=3.0), play(3.0), start, strict=True)):
        apart, way = np.linalg.norm(found - wanted), np.linalg.norm(wanted - before)
        seen = f"{apart:.3g} of {way:.3g} in tensor {t}"
        _expect(apart <= 1e-5 * way + 1e-9, "an update of 10^4 times the median to count as one of 3 times", seen)


# ---- the checks: who sends, and in which order ---------------------------------------------------------------


@_check
def _the_order_of_arrival_changes_no_bit(subject: _Subject) -> None:
    """Results in any order give the same bits, also in the round after."""
    start = _model()
    sent = subject.results(start, 7)
    orders = [list(range(7)), [6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 5, 2, 4]]
    first: list[Parameters] = []
    second: list[Parameters] = []
    for order in orders:
        s = subject.strategy(start)
        first.append(_moved(s, 1, [sent[i] for i in order]))
        later = subject.results(_arrays(first[-1]), 7, seed=2)
        second.append(_moved(s, 2, [later[i] for i in order if i != 2]))
    for one, two in zip(first[1:], second[1:], strict=True):
        _require_same(one, first[0], "the same bits in any order of arrival")
        _require_same(two, second[0], "the same bits in any order of arrival in round 2")


@_check
def _client_ids_do_not_matter(subject: _Subject) -> None:
    """The same clients under other ids, and so in another order, give the same model up to rounding."""
    start = _model(np.float64)
    ids = ["30", "2", "client-b", "11", "client-a", "7"]

    def play(ids: Sequence[str]) -> list[Array]:
        s, theta = subject.strategy(start), start
        for number, present in ((1, (0, 1, 2, 3, 4)), (2, (1, 2, 3, 4, 5)), (3, (0, 1, 2, 3, 4, 5))):
            models = _trained(theta, 6, seed=number)
            sent = [subject.result(i, models[i], cid=ids[i]) for i in present]
            theta = list(_arrays(_moved(s, number, sent)))
        return theta

    for i, (a, b, before) in enumerate(zip(play("012345"), play(ids), start, strict=True)):
        apart, way = np.linalg.norm(a - b), np.linalg.norm(a - before)
        seen = f"{apart:.3g} of {way:.3g} in tensor {i}"
        _expect(apart <= 1e-5 * way + 1e-9, "the same model under other client ids up to rounding", seen)


@_check
def _identical_clients_go_where_one_goes(subject: _Subject) -> None:
    """Clients alike in everything move each tensor in the direction in which one of them alone does."""
    start = _model(np.float64)
    client = _trained(start, 1)[0]
    alone = _arrays(_moved(subject.strategy(start), 1, [subject.result(0, client)]))
    several = [subject.result(0, client, cid=str(i)) for i in range(5)]
    together = _arrays(_moved(subject.strategy(start), 1, several))
    for i, (one, many, before) in enumerate(zip(alone, together, start, strict=True)):
        if before.dtype.kind != "f":
            continue
        a, b = (one - before).ravel(), (many - before).ravel()
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        if lengths == 0:
            _expect(
                not a.any() and not b.any(), f"tensor {i} moved by one client and by five alike", "only one of them"
            )
            continue
        cosine = float(a @ b) / lengths
        wanted = f"five identical clients to move tensor {i} along the way of one"
        _expect(cosine > 1 - 1e-5, wanted, f"a cosine of {cosine:.6f}")


@_check
def _one_client_is_enough(subject: _Subject) -> None:
    """A round of one client succeeds, moves the model, and can be repeated."""
    theta: Sequence[Array] = _model()
    s = subject.strategy(theta)
    for number in (1, 2, 3):
        before = theta
        theta = _arrays(_moved(s, number, [subject.result(number % 2, _trained(theta, 1, seed=number)[0])]))
    _expect(any(not np.array_equal(a, b) for a, b in zip(theta, before, strict=True)), "a model that moves", "none")


@_check
def _clients_come_and_go(subject: _Subject) -> None:
    """Rounds with other clients each time succeed, and repeat bit for bit."""
    rounds = ("abcde", "cdefg", "ah", "f", "abcdefgh", "de")

    def play() -> Parameters:
        theta: Sequence[Array] = _model()
        s = subject.strategy(theta)
        for number, present in enumerate(rounds, start=1):
            models = _trained(theta, len(present), seed=number)
            sent = [subject.result(ord(cid) - 97, a, cid=cid) for cid, a in zip(present, models, strict=True)]
            parameters = _moved(s, number, sent, "a round of other clients")
            theta = _arrays(parameters)
        return parameters

    _require_same(play(), play(), "the same bits from the same run played twice")


# ---- the checks: numbers --------------------------------------------------------------------------------------


@_check
def _zero_updates_leave_the_model(subject: _Subject) -> None:
    """Clients that send the model back leave it in round 1; later, and among others, they do no harm."""
    start = _model()
    still = [subject.result(i, start) for i in range(3)]
    s = subject.strategy(start)
    parameters = _moved(s, 1, still, "a round of zero updates")
    _require_same(parameters, ndarrays_to_parameters(start), "the model as it was after zero updates")
    theta = _arrays(_moved(s, 2, subject.results(start), "a round after one of zero updates"))
    for number in (3, 4):
        still = [subject.result(i, theta) for i in range(3)]
        theta = _arrays(_moved(s, number, still, "a later round of zero updates"))
    mixed = [*subject.results(theta, 3, seed=4), subject.result(3, theta), subject.result(4, theta)]
    _moved(s, 5, mixed, "a round in which some updates are zero")


@_check
def _a_tensor_that_nobody_changed_does_no_harm(subject: _Subject) -> None:
    """A tensor that all clients return as it was stays in round 1, while the others move."""
    start = _model()
    s = subject.strategy(start)
    sent = [subject.result(i, [a[0], start[1], *a[2:]]) for i, a in enumerate(_trained(start, 4))]
    theta = _arrays(_moved(s, 1, sent, "a round that leaves a tensor as it is"))
    _expect(np.array_equal(theta[1], start[1]), "a tensor that nobody changed to stay", theta[1] - start[1])
    _expect(not np.array_equal(theta[0], start[0]), "the other tensors to move", "none")
    sent = [subject.result(i, [a[0], theta[1], *a[2:]]) for i, a in enumerate(_trained(theta, 4, seed=2))]
    _moved(s, 2, sent, "another round that leaves a tensor as it is")
    _moved(s, 3, subject.results(theta, 4, seed=3), "a round after one that left a tensor as it is")


@_check
def _updates_that_cancel_do_no_harm(subject: _Subject) -> None:
    """Opposite updates give neither NaN nor a step of scaled-up rounding errors."""
    start = _model(np.float64)[:3]
    u, v = ([a - b for a, b in zip(x, start, strict=True)] for x in _trained(start, 2, seed=3))
    ways = [u, [-a for a in u], v, [-a for a in v]]
    length = max(math.hypot(*(float(np.linalg.norm(a)) for a in way)) for way in ways)
    for alike in (True, False):  # reports that are the same for all leave nobody to prefer
        s = subject.strategy(start)
        sent = [
            subject.result(0 if alike else i, [a + b for a, b in zip(start, way, strict=True)], 10, cid=str(i))
            for i, way in enumerate(ways)
        ]
        theta = _arrays(_moved(s, 1, sent, "a round of updates that cancel"))
        step = math.hypot(*(float(np.linalg.norm(a - b)) for a, b in zip(theta, start, strict=True)))
        _expect(step <= 10 * (length + len(start)), f"a step of the updates' size, about {length:.2g}", f"{step:.3g}")
        _moved(s, 2, subject.results(theta, seed=5), "a round after updates that cancel")


@_check
def _scales_from_tiny_to_huge(subject: _Subject) -> None:
    """Updates of size 1e-12 and 1e12 move the model; of any larger size they do so, or the round fails cleanly."""
    start = [np.zeros((3, 2)), np.zeros(4)]
    for scale in (1e-12, 1e12):
        s = subject.strategy(start)
        theta = _arrays(_moved(s, 1, subject.results(start, 4, scale=scale), f"a round of updates of {scale:g}"))
        _expect(all(a.any() for a in theta), f"updates of {scale:g} to move every tensor", theta)
        _moved(s, 2, subject.results(theta, 4, seed=2, scale=scale), f"another round of updates of {scale:g}")
    for dtype, scale in ((np.float64, 1e45), (np.float64, 1e140), (np.float32, 5e37), (np.float16, 1e4)):
        model = [a.astype(dtype) for a in start]
        s = subject.strategy(model)
        for number in (1, 2):
            parameters, metrics = _aggregate(s, number, subject.results(model, 4, scale=scale))
            what = f"a round of {np.dtype(dtype).name} updates of {scale:g}"
            _require_finite(s, parameters, metrics, what)
            if metrics.get("failed_round") is not False:
                _expect(metrics.get("failed_reason"), f"a sentence in failed_reason after {what}", metrics)
                _require_same(parameters, ndarrays_to_parameters(model), f"the model as it was after {what} failed")
            model = list(_arrays(parameters))


@_check
def _very_unequal_shares(subject: _Subject) -> None:
    """Clients with a billion times the data of others make no NaN."""
    theta: Sequence[Array] = _model()
    s = subject.strategy(theta)
    for number in (1, 2):
        models = _trained(theta, 3, seed=number)
        sent = [subject.result(i, a, n) for i, (a, n) in enumerate(zip(models, (1, 10**9, 5), strict=True))]
        theta = _arrays(_moved(s, number, sent, "a round of very unequal shares"))


@_check
def _dtypes_shapes_buffers_and_counters(subject: _Subject) -> None:
    """Over rounds, dtypes and shapes stay; buffers are averaged by data shares and counters take the largest.

    Where a method merges them by a rule of its own, they stay among the clients' values.
    """
    layers = _norm_layers()
    for dtype in (np.float16, np.float32, np.float64):
        start = _norm_model(dtype)
        theta: Sequence[Array] = start
        s = subject.strategy(start, layers=layers)
        for number in (1, 2, 3):
            sent, variances, means = [], [], []
            for i, arrays in enumerate(_trained(theta, 3, seed=number)):
                # The variances fall from round to round: a step beyond their mean would turn them negative.
                arrays[_VAR] = (np.array([1e-3, 0.5, 0.01, 2.0]) / (4**number * (1 + i))).astype(dtype)
                arrays[_COUNT] = np.array(10 * number - 3 * i)
                variances.append(arrays[_VAR].astype(np.float64))
                means.append(arrays[_MEAN].astype(np.float64))
                sent.append(subject.result(i, arrays, (10, 30, 60)[i]))
            theta = _arrays(_moved(s, number, sent))
            for name, a, b in zip(_NAMES, theta, start, strict=True):
                found, wanted = (f"{x.dtype}{list(x.shape)}" for x in (a, b))
                _expect(found == wanted, f"{name} to stay {wanted} in round {number}", found)
            shares, rounding = np.array([0.1, 0.3, 0.6]), 4 * float(np.finfo(dtype).eps)
            for t, clients in ((_VAR, variances), (_MEAN, means)):
                sent_by = np.stack(clients)
                slack = rounding * np.abs(sent_by).max()
                inside = (sent_by.min(axis=0) - slack <= theta[t]) & (theta[t] <= sent_by.max(axis=0) + slack)
                what = f"{_NAMES[t]} in round {number} ({np.dtype(dtype).name})"
                _expect(inside.all(), f"{what} between the clients' values", theta[t])
                if type(s).merge_buffer is UpdateStrategy.merge_buffer:
                    apart = np.abs(theta[t] - shares @ sent_by).max()
                    _expect(apart <= slack, f"{what} averaged by data shares", f"a difference of {apart:.3g}")
            _expect((theta[_VAR] >= 0).all(), "no negative variance", theta[_VAR])
            counts = [10 * number - 3 * i for i in range(3)]
            if type(s).merge_counter is UpdateStrategy.merge_counter:
                counts = counts[:1]
            _expect(theta[_COUNT] in counts, f"a counter out of {counts}", theta[_COUNT])
        moved = not np.array_equal(theta[0], start[0])
        _expect(moved, f"a {np.dtype(dtype).name} model that moves", "the same weights after three rounds")


@_check
def _more_clients_than_numbers(subject: _Subject) -> None:
    """Layers narrower than the number of clients, alone and beside wide ones, 0-d and empty ones too."""
    for shapes in ([(3,)], [(20,), (2,), ()], [(0,), (3,)]):
        theta: Sequence[Array] = [np.zeros(shape, np.float32) for shape in shapes]
        s = subject.strategy(theta)
        for number in (1, 2):
            what = f"a round of 12 clients and tensors of {shapes}"
            theta = _arrays(_moved(s, number, subject.results(theta, 12, seed=number), what))


@_check
def _layers_given_or_not(subject: _Subject) -> None:
    """With a LayerMap and without, rounds succeed; without is the map of each array by itself."""
    start = _norm_model()
    ends: list[Parameters] = []
    for layers in (None, LayerMap.from_arrays(start), _norm_layers()):
        s = subject.strategy(start, layers=layers)
        theta = _arrays(_moved(s, 1, subject.results(start), f"a round with layers={layers}"))
        ends.append(_moved(s, 2, subject.results(theta, 6, seed=2), f"a round with layers={layers}"))
    _require_same(ends[0], ends[1], "layers=None to be LayerMap.from_arrays")
    layers = _norm_layers()
    s = subject.strategy(layers=layers)
    with_config = s.configure_fit(1, ndarrays_to_parameters(start), _manager(2))
    _expect(len(with_config) == 2, "2 clients of 2 configured", len(with_config))
    try:
        s.configure_fit(1, ndarrays_to_parameters(start[:-1]), _manager(2))
    except ValueError:
        return
    raise _Violation("expected a model that does not fit the LayerMap to be refused, saw it taken")


# ---- the checks: whose memory it is ---------------------------------------------------------------------------


@_check
def _what_is_received_and_returned_is_left_alone(subject: _Subject) -> None:
    """Results are not changed; a model returned is not changed by later rounds, nor by what becomes of the results."""
    start = _model()

    def play(overwrite: bool) -> list[Parameters]:
        s, theta, models = subject.strategy(start), start, []
        for number in (1, 2, 3):
            owned = _trained(theta, 4, seed=number)
            sent = [subject.result(i, a) for i, a in enumerate(owned)]
            for (_, res), arrays in zip(sent, owned, strict=True):
                res.parameters = _holding(arrays)
            before = _content(sent)
            models.append(_moved(s, number, sent))
            wanted = "results that aggregate_fit leaves as they are"
            _expect(_content(sent) == before, wanted, f"other ones after round {number}")
            theta = _arrays(models[-1])
            for array in [a for arrays in owned for a in arrays] if overwrite else []:
                array[...] = 77  # as an engine does that reads the next result into the same memory
        return models

    for one, two in zip(play(False), play(True), strict=True):
        _require_same(two, one, "the same bits after the results' memory was used for something else")


def _holding(tensors: Sequence[Any]) -> Parameters:
    """Parameters as an engine of this suite hands them over: arrays, or views of bytes."""
    return Parameters(list(tensors), "numpy.ndarray")


def _content(sent: Sequence[Result]) -> list[tuple[str, int, dict[str, Scalar], list[bytes]]]:
    return [
        (proxy.cid, res.num_examples, dict(res.metrics), [np.asarray(t).tobytes() for t in res.parameters.tensors])
        for proxy, res in sent
    ]


@_check
def _returned_models_stay(subject: _Subject) -> None:
    """A model once returned keeps its bits while the strategy goes on."""
    start = _model()
    s = subject.strategy(start)
    first = _moved(s, 1, subject.results(start))
    evaluated = s.evaluated(first)
    kept = _bits(first), _bits(evaluated)
    theta: Sequence[Array] = _arrays(first)
    for number in (2, 3):
        theta = _arrays(_moved(s, number, subject.results(theta, seed=number)))
    _expect((_bits(first), _bits(evaluated)) == kept, "the model of round 1 to stay as it was returned", "another")


@_check
def _lent_memory_is_given_back(subject: _Subject) -> None:
    """Results in memory lent for the round give the same bits, and nothing views that memory afterwards."""
    start = _model()
    sent = subject.results(start)
    s = subject.strategy(start)
    expected = [_moved(s, 1, sent), _moved(s, 2, sent)]
    s = subject.strategy(start)
    working = gc.isenabled()
    gc.disable()  # references must not hang in a cycle either
    try:
        for number in (1, 2):
            owners = [[bytearray(tensor) for tensor in res.parameters.tensors] for _, res in sent]
            before = [[bytes(owner) for owner in tensors] for tensors in owners]
            lent = _lent(sent, owners)
            rejected = _holding([memoryview(b"junk")] * len(start))
            lent += [lent[0], (Proxy("junk"), FitRes(Status(Code.OK, ""), rejected, 1, subject.reports(0)))]
            _require_same(_aggregate(s, number, lent)[0], expected[number - 1], "the same bits from lent memory")
            after = [[bytes(owner) for owner in tensors] for tensors in owners]
            _expect(after == before, "lent memory that nobody writes to", "other bytes in it")
            del lent, rejected
            for owner in [owner for tensors in owners for owner in tensors]:
                try:
                    owner.append(0)  # refused while anything views it
                except BufferError:
                    raise _Violation(f"expected lent memory to be let go, saw views of it in round {number}") from None
    finally:
        if working:
            gc.enable()


def _lent(sent: Sequence[Result], owners: Sequence[Sequence[bytearray]]) -> list[Result]:
    """The results in their owners' memory: as memoryviews, as arrays of bytes, and decoded and read-only."""
    lent = []
    for i, ((proxy, res), tensors) in enumerate(zip(sent, owners, strict=True)):
        views: list[Any] = [memoryview(t) if i % 3 == 0 else np.frombuffer(t, np.uint8) for t in tensors]
        if i % 3 == 2:
            views = list(_arrays(_holding(views)))
        lent.append((proxy, FitRes(res.status, _holding(views), res.num_examples, res.metrics)))
    return lent


@_check
def _instances_and_copies_share_nothing(subject: _Subject) -> None:
    """Using one instance changes no other; a deep copy of an unused one does what the original would."""
    start = _model()
    used, idle = subject.strategy(start), subject.strategy(start)
    _expect(type(used).__name__ in repr(used), "repr with the name of the class", repr(used))
    before = idle.state_dict()
    copied = copy.deepcopy(idle)
    ends = []
    for s in (used, copied):
        theta = _arrays(_moved(s, 1, subject.results(start)))
        ends.append(_moved(s, 2, subject.results(theta, 3, seed=2)))
    _require_same(ends[1], ends[0], "a deep copy to do what the original would")
    apart = _difference(before, idle.state_dict())
    _expect(not apart, "an instance that is not used to stay as it was made", apart)


# ---- the checks: state ----------------------------------------------------------------------------------------


@_check
def _the_state_is_json_and_tensors(subject: _Subject) -> None:
    """The state is JSON but for CPU vectors and matrices of the declared kinds, and is a copy of its own."""
    start = _model()
    s = subject.strategy(start)
    fresh = s.state_dict()
    subject.strategy(start).load_state_dict(fresh)
    theta = _arrays(_moved(s, 1, subject.results(start)))
    state = s.state_dict()
    plain = {k: v for k, v in state.items() if k != "memory"}
    _expect(json.loads(json.dumps(plain, allow_nan=False)) == plain, "a state that JSON gives back", plain)
    kinds = {**dict.fromkeys(type(s).remembers, 1), **dict.fromkeys(type(s).remembers_rows, 2)}
    for key, tensor in state["memory"].items():
        kind = key.partition("/")[0]
        _expect(kind in kinds, "memory of the kinds in `remembers` and `remembers_rows`", key)
        fine = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.device.type == "cpu"
        fine = fine and tensor.ndim == kinds[kind]
        _expect(fine, f"memory {key!r} to be a floating-point CPU tensor with {kinds[kind]} dimensions", tensor)
    saved = _as_saved(s)
    _moved(s, 2, subject.results(theta, 3, seed=2))
    apart = _difference(saved, state)
    _expect(not apart, "a state that later rounds leave as it is", apart)


@_check
def _a_resumed_run_continues_bit_for_bit(subject: _Subject) -> None:
    """A run resumed from its state ends as the uninterrupted one, after a failed round too."""
    common: dict[str, Any] = {"seed": 3, "fraction_fit": 0.4, "server_lr_decay": 0.9}
    initial = ndarrays_to_parameters(_model())

    def play(
        s: UpdateStrategy, numbers: Sequence[int], theta: Parameters, fails: int
    ) -> tuple[Parameters, dict[str, Scalar]]:
        clients = _manager(10)
        metrics: dict[str, Scalar] = {}
        for number in numbers:
            chosen = s.configure_fit(number, theta, clients)
            counted = int(chosen[0][1].config["server_round"])
            models = _trained(_arrays(theta), len(chosen), seed=counted)
            sent = [subject.result(int(p.cid), a) for (p, _), a in zip(chosen, models, strict=True)]
            gone = [RuntimeError("gone")] * len(sent) if counted == fails else []
            theta, metrics = _aggregate(s, number, [] if gone else sent, gone)
        return theta, {k: v for k, v in metrics.items() if k != "aggregate_seconds"}

    for fails in (0, 3):
        s = subject.strategy(**common)
        half, _ = play(s, (1, 2, 3), initial, fails)
        state = _as_saved(s)
        expected, metrics = play(s, (4, 5), half, fails)
        end = s.state_dict()
        for numbers in ((1, 2), (4, 5)):  # Flower counts anew from 1; a caller may count on
            s = subject.strategy(**common)
            s.load_state_dict(state)
            apart = _difference(state, s.state_dict())
            _expect(not apart, "a state that is what was loaded", apart)
            found, seen = play(s, numbers, half, fails)
            after = f"after a resume whose next round is {numbers[0]}{' and a failed round' if fails else ''}"
            _require_same(found, expected, f"the bits of the uninterrupted run {after}")
            apart = _difference(end, s.state_dict())
            _expect(not apart, f"the state of the uninterrupted run {after}", apart)
            _expect(seen == metrics, f"the metrics of the uninterrupted run {after}", f"{seen} and {metrics}")


@_check
def _unfit_states_are_refused(subject: _Subject) -> None:
    """A state that is another strategy's, incomplete or damaged is refused in a sentence, and changes nothing."""
    start = _model()
    s = subject.strategy(start)
    theta = _arrays(_moved(s, 1, subject.results(start)))
    _moved(s, 2, subject.results(theta, 3, seed=2))
    state = _as_saved(s)
    holder = subject.strategy(start)
    _moved(holder, 1, subject.results(start, 4, seed=8))
    before = holder.state_dict()
    for what, unfit in _unfit(state, type(s)):
        try:
            holder.load_state_dict(unfit)
        except ValueError as error:
            sentence = str(error).strip()
            _expect(sentence and "\n" not in sentence, f"one sentence that refuses a state {what}", repr(sentence))
        else:
            raise _Violation(f"expected a state {what} to be refused, saw it loaded")
        apart = _difference(before, holder.state_dict())
        _expect(not apart, f"nothing changed by a state {what}", apart)
    # Memory that got lost on the way: a method may do without, but not find out in the middle of a run.
    lost = [state["memory"], *({k: v} for k, v in list(state["memory"].items())[:1])]
    for gone in lost if state["memory"] else []:
        holder = subject.strategy(start)
        try:
            holder.load_state_dict({**state, "memory": {k: v for k, v in state["memory"].items() if k not in gone}})
        except ValueError:
            continue
        _moved(holder, 3, subject.results(start, 3, seed=4), f"a round after a resume without memory {sorted(gone)}")


def _unfit(state: Mapping[str, Any], cls: type[UpdateStrategy]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield states that do not fit, and what is wrong with each."""
    yield "of another strategy", {**state, "strategy": "Another"}
    for key in state:
        yield f"without {key}", {k: v for k, v in state.items() if k != key}
    for key, value in [
        ("round", "three"),
        ("round", -1),
        ("failed_rounds", -1),
        ("failed_rounds", None),
        ("start_norm", "long"),
        ("start_norm", math.nan),
        ("memory", None),
        ("memory", {"unheard-of/tensor0": torch.zeros(12)}),
        ("records", None),
        ("records", []),
    ]:
        yield f"with {key}={value!r}", {**state, key: value}
    memory, records = state["memory"], state["records"]
    for kind in (*cls.remembers, *cls.remembers_rows):
        named = [key for key in memory if key.startswith(f"{kind}/")]
        if not named:
            continue
        key, tensor = named[0], memory[named[0]]
        for what, damaged in [
            ("NaN", torch.full_like(tensor, math.nan)),
            ("one dimension more", tensor[None]),
            ("more numbers", torch.cat([tensor, tensor], dim=-1)),
            ("integers", tensor.to(torch.int64)),
            ("a list", tensor.tolist()),
        ]:
            yield f"with {what} in memory {key!r}", {**state, "memory": {**memory, key: damaged}}
        yield f"with memory {kind!r} of an unknown layer", {**state, "memory": {**memory, f"{kind}/unheard-of": tensor}}
    if not records:
        yield "with records that the method does not keep", {**state, "records": {"unheard-of": 1}}
    for key, value in records.items():
        yield f"without record {key!r}", {**state, "records": {k: v for k, v in records.items() if k != key}}
        yield f"with record {key}='damaged'", {**state, "records": {**records, key: "damaged"}}
        yield f"with record {key}=None", {**state, "records": {**records, key: None}}
        spoilt = _with_nan(value)
        if spoilt is not None:
            yield f"with NaN in record {key!r}", {**state, "records": {**records, key: spoilt}}


def _with_nan(value: Any) -> Any:
    """Return a JSON value with its first float replaced by NaN; None if it holds no float."""
    if isinstance(value, float):
        return math.nan
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        spoilt = _with_nan(part)
        if spoilt is not None:
            whole = copy.copy(value)
            whole[key] = spoilt
            return whole
    return None


# ---- the checks: rounds that fail -----------------------------------------------------------------------------


@_check
def _failed_rounds_change_nothing(subject: _Subject) -> None:
    """After a round that fails, whatever the reason, model, memory and records are what they were before it."""
    start = _model()
    initial = ndarrays_to_parameters(start)

    def overflow(s: UpdateStrategy, number: int, sent: list[Result]) -> tuple[Parameters, dict[str, Scalar]]:
        vars(s)["step_size"] = lambda number: 1e300
        try:
            return _aggregate(s, number, sent)
        finally:
            del vars(s)["step_size"]

    def empty(s: UpdateStrategy, number: int, sent: list[Result]) -> tuple[Parameters, dict[str, Scalar]]:
        return _aggregate(s, number, [])

    def few(s: UpdateStrategy, number: int, sent: list[Result]) -> tuple[Parameters, dict[str, Scalar]]:
        return _aggregate(s, number, sent[:1], [RuntimeError("gone")] * 4)

    for what, fail in (("overflows", overflow), ("has no results", empty), ("has too few results", few)):
        s = subject.strategy(start)
        before = s.state_dict()
        parameters, metrics = fail(s, 1, subject.results(start))
        _expect(metrics.get("failed_round") is True, f"a round that {what} to fail", metrics)
        _expect(metrics.get("failed_reason"), f"a sentence in failed_reason of a round that {what}", metrics)
        _require_same(parameters, initial, f"the model as it was after a first round that {what}")
        _require_same(s.evaluated(parameters), initial, f"the model to evaluate as it was after a round that {what}")
        apart = _difference(before, s.state_dict(), ignore=("round", "failed_rounds"))
        _expect(not apart, f"the state as it was after a first round that {what}", apart)
        plain = subject.strategy(start)
        second = subject.results(start)
        first, theirs = _moved(s, 2, second), _moved(plain, 2, second)
        _require_same(first, theirs, f"the round after one that {what} as if that had not been")
        before = s.state_dict()
        third = subject.results(_arrays(first), 3, seed=3)
        parameters, _ = fail(s, 3, third)
        _require_same(parameters, first, f"the model as it was after a later round that {what}")
        apart = _difference(before, s.state_dict(), ignore=("round", "failed_rounds"))
        _expect(not apart, f"the state as it was after a later round that {what}", apart)
        _require_same(_moved(s, 4, third), _moved(plain, 4, third), f"the next round as if none that {what} had been")


@_check
def _failures_in_a_row_end_the_run(subject: _Subject) -> None:
    """Failed rounds are counted, with the clients' reasons, and too many in a row raise RoundsFailed."""
    start = _model()
    initial = ndarrays_to_parameters(start)
    s = subject.strategy(start, max_failed_rounds=3)
    chosen = s.configure_fit(1, initial, _manager(4))
    parameters, metrics = _aggregate(s, 1, [], [RuntimeError("boom")] * len(chosen))
    _require_same(parameters, initial, "the model as it was after a round without results")
    counts = tuple(metrics.get(f"clients_{x}") for x in ("sampled", "failed", "accepted"))
    _expect(counts == (4, 4, 0), "4 clients sampled, 4 failed and 0 accepted", counts)
    _expect("boom" in str(metrics.get("failure_reasons")), "why clients failed in failure_reasons", metrics)
    _aggregate(s, 2, [])
    spoilt = [np.full_like(a, np.nan) if a.dtype.kind == "f" else a for a in start]
    try:
        _aggregate(s, 3, [subject.result(0, spoilt)])
    except RoundsFailed as error:
        sentence = str(error)
        _expect(
            "3 rounds in a row failed" in sentence and "NaN" in sentence, "how many rounds failed and why", sentence
        )
        _expect("\n" not in sentence, "one sentence", sentence)
        _expect(error.metrics.get("clients_rejected") == 1, "the last round's metrics", error.metrics)
        return
    raise _Violation("expected RoundsFailed after three failed rounds, saw none")


# ---- the checks: what a round tells ---------------------------------------------------------------------------


@_check
def _seeds_choose_the_clients(subject: _Subject) -> None:
    """The clients of a round depend on the seed and the round, and on nothing else."""
    initial, clients = ndarrays_to_parameters(_model()), _manager(20)

    def sampled(seed: int) -> list[list[str]]:
        s = subject.strategy(seed=seed, fraction_fit=0.3)
        return [[p.cid for p, _ in s.configure_fit(number, initial, clients)] for number in (1, 2, 3)]

    one, two = sampled(5), sampled(5)
    _expect(one == two, "the same clients from the same seed", f"{one} and {two}")
    _expect(all(len(set(ids)) == 6 for ids in one), "6 of 20 clients with fraction_fit=0.3", one)
    _expect(len({tuple(ids) for ids in one}) == 3, "other clients in other rounds", one)
    _expect(sampled(6) != one, "other clients from another seed", one)


@_check
def _clients_are_told_what_they_need(subject: _Subject) -> None:
    """The fit config holds the round's number, the method's own entries, and asks for the loss where it is required."""
    s = subject.strategy(on_fit_config_fn=lambda number: {"lr": 0.1 * number})
    chosen = s.configure_fit(2, ndarrays_to_parameters(_model()), _manager(3))
    wanted = {"server_round": 2, **s.fit_config(), "lr": 0.2}
    if "initial_loss" in s.requires:
        wanted["initial_loss"] = True
    for _, ins in chosen:
        _expect(ins.config == wanted, f"the fit config {wanted}", ins.config)
        _require_scalars(ins.config, "the fit config")


@_check
def _metrics_are_scalars(subject: _Subject) -> None:
    """Metrics are Flower's scalars and JSON, hold what every strategy reports, and say why clients are not used."""
    start = _model()
    s = subject.strategy(start)
    sent = [*subject.results(start), subject.result(9, start[:1])]
    _, metrics = _aggregate(s, 1, sent, [ValueError("lost")])
    _require_scalars(metrics, "the metrics")
    missing = [key for key in REPORTED if key not in metrics]
    _expect(not missing, "the metrics every strategy reports", f"none of {missing}")
    counts = tuple(metrics[f"clients_{x}"] for x in ("sampled", "accepted", "rejected", "failed"))
    _expect(counts == (7, 5, 1, 1), "7 clients sampled, 5 accepted, 1 rejected and 1 failed", counts)
    for key, text in (("rejection_reasons", "client 9: "), ("failure_reasons", "lost")):
        listed = json.loads(str(metrics.get(key, "[]")))
        _expect(len(listed) == 1 and text in listed[0], f"one reason in {key}, with {text!r}", listed)
    accepted = [res for _, res in sent[:5]]
    loss = sum(r.num_examples * float(r.metrics["train_loss"]) for r in accepted) / sum(
        r.num_examples for r in accepted
    )
    seen = metrics["train_loss"]
    _expect(isinstance(seen, float) and math.isclose(seen, loss, rel_tol=1e-9), f"a mean train_loss of {loss}", seen)


def _require_scalars(metrics: Mapping[str, Scalar], what: str) -> None:
    for key, value in metrics.items():
        plain = type(key) is str and type(value) in (bool, int, float, str)
        _expect(plain, f"{what} to be bool, int, float or str", f"{key!r} of {type(value).__name__}")
    json.dumps(dict(metrics), allow_nan=False)


@_check
def _the_evaluated_model_is_a_model(subject: _Subject) -> None:
    """What is evaluated has the model's dtypes and shapes and is finite, and asking for it changes nothing."""
    ends = []
    for asks in (True, False):
        parameters = ndarrays_to_parameters(_norm_model())
        start = _arrays(parameters)
        s = subject.strategy(start, layers=_norm_layers())
        for number in (1, 2, 3):
            parameters = _moved(s, number, subject.results(_arrays(parameters), seed=number))
            for asked in (parameters, ndarrays_to_parameters(list(start))) if asks else ():
                _require_model(_arrays(s.evaluated(asked)), start)
        ends.append(parameters)
    _require_same(ends[0], ends[1], "the same bits whether evaluated() is called or not")
    seen: list[list[Array]] = []

    def evaluate(number: int, arrays: list[Array], config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
        seen.append(arrays)
        return 0.0, {}

    s = subject.strategy(start, layers=_norm_layers(), evaluate_fn=evaluate)
    parameters = _moved(s, 1, subject.results(start))
    s.evaluate(1, parameters)
    _expect(len(seen) == 1, "evaluate_fn to be called", f"{len(seen)} calls")
    wanted = _arrays(s.evaluated(parameters))
    _expect(all(map(np.array_equal, seen[0], wanted)), "evaluate_fn to get evaluated(parameters)", "another model")


def _require_model(arrays: Sequence[Array], start: Sequence[Array]) -> None:
    found, wanted = ([f"{a.dtype}{list(a.shape)}" for a in x] for x in (arrays, start))
    _expect(found == wanted, f"evaluated() to return {wanted}", found)
    _expect(all(np.isfinite(a).all() for a in arrays), "evaluated() to be finite", "NaN or Inf")
