"""What a client's message says, as the results that strategies take, or the reason why it cannot be read.

A message's content is a `RecordDict`: tensors in an `ArrayRecord`, numbers in `MetricRecord`s, everything else in
`ConfigRecord`s. Tensors are handed on as the `.npy` bytes they came in, by reference; nothing is decoded here, and
nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import Code, EvaluateRes, FitRes, Parameters, Scalar, Status

from .options import is_count, is_real
from .records import NUMPY, spellings
from .shares import capped_shares

LOSSES = ("loss", "eval_loss", "evaluate_loss", "val_loss", "valid_loss", "validation_loss", "test_loss")
"""Under which names a client may report the loss of an evaluation, in any spelling."""

RESERVED = frozenset(
    [
        "clients_sampled",
        "clients_accepted",
        "clients_rejected",
        "clients_failed",
        "clients_capped",
        "clients_clipped",
        "rejection_reasons",
        "failure_reasons",
        "failed_round",
        "failed_reason",
        "aggregate_seconds",
        "conflict_share_before",
        "conflict_share_after",
        "min_alignment",
        "residual",
        "rank",
        "kkt",
        "clients_contaminated",
        "contaminated_clients",
        "vote_margins",
        "gain",
        "cost",
        "clair_warning",
        "clients_left_out",
        "noise_level",
        "pair_distances",
        "program_gap",
        "program_residual",
        "subspace_rank",
        "effective_steps",
        "largest_lambda",
        "fine_tuned",
        "lambda_ref",
        "reference_ratio",
        "direction_norm",
        "cosine_to_mean",
        "parameter_norm",
        "personal_train_loss",
    ]
)
"""What a strategy reports of itself: of clients that report something by such a name, no mean is taken."""

# Characters of a metric's name; a client may send one of any length.
_LONGEST = 200
# Names listed in a reason.
_NAMED = 3

_OK = Status(Code.OK, "")

Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)


class UnusableReply(ValueError):
    """A reply that cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True)
class Reply:
    """What a client's reply says.

    Attributes
    ----------
    result : FitRes or EvaluateRes
    numbers : tuple of str
        The names under which its `MetricRecord`s hold numbers, without that of the weight.
    has_loss : bool
        Whether an evaluation came with a loss; without one, the result's is 0.
    """

    result: Any
    numbers: tuple[str, ...]
    has_loss: bool = True

    def without_loss(self) -> Reply:
        """Return the same reply of clients most of whom report no loss."""
        numbers = tuple(key for key in self.numbers if key.replace("-", "_") not in LOSSES)
        return replace(self, numbers=numbers, result=replace(self.result, loss=0.0), has_loss=False)


def read_fit(content: RecordDict, names: Sequence[str], *, arrayrecord_key: str, weighted_by_key: str) -> Reply:
    """Read the reply to a train message.

    Parameters
    ----------
    content : RecordDict
    names : sequence of str
        The model's tensors; the reply has to hold these, in any order.
    arrayrecord_key : str
        The record to take where there are several.
    weighted_by_key : str
        The number of examples; also with underscores.

    Raises
    ------
    UnusableReply
        If there is no such model in it, or no number of examples.
    """
    record = _array_record(content, arrayrecord_key)
    if len(record) != len(names) or any(name not in record for name in names):
        raise UnusableReply(_difference(record, names))
    tensors = []
    for name in names:
        array = record[name]
        if array.stype != NUMPY:
            raise UnusableReply(f"tensor {name!r} is serialized as {str(array.stype)[:40]!r}, not as {NUMPY!r}")
        tensors.append(array.data)
    metrics, numbers, count = _metrics(content, weighted_by_key)
    return Reply(FitRes(_OK, Parameters(tensors, NUMPY), cast(int, count), metrics), numbers)


def read_evaluation(content: RecordDict, *, weighted_by_key: str) -> Reply:
    """Read the reply to an evaluate message.

    Raises
    ------
    UnusableReply
        If there is no number of examples in it.
    """
    metrics, numbers, count = _metrics(content, weighted_by_key)
    losses = (metrics[key] for name in LOSSES for key in spellings(name) if key in metrics)
    loss = next(losses, None)
    has_loss = isinstance(loss, int | float) and not isinstance(loss, bool)
    result = EvaluateRes(_OK, cast(float, loss if has_loss else 0.0), cast(int, count), metrics)
    return Reply(result, numbers, has_loss)


def weighted_means(
    results: Iterable[tuple[int, Mapping[str, Scalar]]], keys: Iterable[str], *, largest: float | None = None
) -> dict[str, float]:
    """Return the mean of each metric over the clients that report a finite number, weighted by their examples.

    Parameters
    ----------
    results : iterable of (int, mapping)
        Numbers of examples, and metrics.
    keys : iterable of str
        Which metrics.
    largest : float, optional
        The largest share that one client may have (`capped_shares`).
    """
    results = [(n, metrics) for n, metrics in results if is_count(n)]
    means = {}
    for key in keys:
        known = [(n, float(metrics[key])) for n, metrics in results if is_real(metrics.get(key))]
        if known:
            shares, _ = capped_shares([n for n, _ in known], largest)
            means[key] = sum(share * value for share, (_, value) in zip(shares, known, strict=True))
    return means


def _array_record(content: RecordDict, key: str) -> ArrayRecord:
    found = content.get(key)
    if isinstance(found, ArrayRecord):
        return found
    records = list(_of(content, ArrayRecord))
    if not content:
        raise UnusableReply("its message is empty")
    if len(records) != 1:
        count = f"{len(records)} ArrayRecords, and none is called {key!r}" if records else "no ArrayRecord"
        raise UnusableReply(f"its message holds {count}")
    return records[0]


def _difference(record: ArrayRecord, names: Sequence[str]) -> str:
    missing = [name for name in names if name not in record]
    known = set(names)
    extra = [name for name in record if name not in known]
    parts = [
        f"{what} {', '.join(repr(str(n)[:80]) for n in those[:_NAMED])}"
        + (f" and {len(those) - _NAMED} more" if len(those) > _NAMED else "")
        for what, those in (("lacks", missing), ("has besides", extra))
        if those
    ]
    return f"its model {' and '.join(parts)}"


def _metrics(content: RecordDict, weighted_by_key: str) -> tuple[dict[str, Scalar], tuple[str, ...], object]:
    """Return what clients report as strategies know it, the names of the numbers in it, and the weight."""
    weights = spellings(weighted_by_key)
    values: dict[str, Scalar] = {}
    count: object = None
    for record in _of(content, MetricRecord):
        for key, value in record.items():
            if key in weights:
                count = value if count is None else count
            elif not isinstance(value, list) and len(key) <= _LONGEST:
                values.setdefault(key, value)
    if count is None:
        raise UnusableReply(f"its MetricRecords hold no {weighted_by_key!r}")
    if isinstance(count, list):
        raise UnusableReply(f"its {weighted_by_key!r} is a list, must be one number")
    if isinstance(count, float) and count.is_integer():
        count = int(count)
    numbers = tuple(values)
    _spell(values)
    for configured in _of(content, ConfigRecord):
        for key, value in configured.items():  # type: ignore[assignment]
            if not isinstance(value, list) and len(key) <= _LONGEST:
                values.setdefault(key, value)
    _spell(values)
    return values, numbers, count


def _spell(values: dict[str, Scalar]) -> None:
    """Add each value under its name with underscores, as strategies look it up, unless there is one."""
    for key in [key for key in values if "-" in key]:
        values.setdefault(key.replace("-", "_"), values[key])


def _of(content: RecordDict, kind: type[Record]) -> Iterator[Record]:
    return (record for record in content.values() if isinstance(record, kind))
