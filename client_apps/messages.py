"""Flower's message API for clients that are written for its older one: messages in, messages out, either form.

Flower's ClientApp hands every message to a `Client` as `FitIns` or `EvaluateIns`, made from records with names of
Flower's own. Servers that run a `flwr.serverapp.strategy.Strategy` send other ones: the model under `arrays`, by
tensor names, and what it asks for under `config`, its keys with hyphens; they expect `arrays` and `metrics` back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flwr.client import Client
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    EvaluateIns,
    FitIns,
    Message,
    MetricRecord,
    Parameters,
    RecordDict,
    Scalar,
)

from client_apps.errors import ConfigError
from client_apps.wire import decode

_NUMPY = "numpy.ndarray"
# The record that holds the model in a message of the older form, by the message's type.
_LEGACY = {"train": "fitins.parameters", "evaluate": "evaluateins.parameters"}
_ARRAYS, _CONFIG, _METRICS, _EXAMPLES = "arrays", "config", "metrics", "num-examples"

Record = TypeVar("Record", ArrayRecord, ConfigRecord)


def answer(
    client_fn: Callable[[Context], Client],
    names: Callable[[Client], Sequence[str]],
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
) -> Message:
    """Answer a message in the form in which it came.

    With its first two arguments bound it is a Flower mod. As the last of an app's mods it leaves what all others see,
    in both directions, as the server sent and expects it.

    Parameters
    ----------
    client_fn : callable
        Makes the client.
    names : callable
        Says which tensors a client's model has, in their order.
    message : Message
        A message of type train or evaluate in the message API's form is answered here: with the trained tensors under
        `arrays` (train only), by the names and in the order in which they came; the numbers that the client reports
        under `metrics`, with `num-examples`, and for an evaluation `loss`; and its texts, if any, under `config`. Any
        other goes to `call_next`.

    Raises
    ------
    ConfigError
        The message does not hold exactly one model of the client's, or more than one config.
    """
    kind = message.metadata.message_type
    if kind not in _LEGACY or _LEGACY[kind] in message.content:
        return call_next(message, context)
    record = _one(message.content, ArrayRecord, _ARRAYS)
    if record is None:
        raise ConfigError(f"The {kind} message holds no ArrayRecord; send the model under {_ARRAYS!r}.")
    client = client_fn(context)
    keys = _in_order(record, names(client))
    parameters, config = Parameters([record[key].data for key in keys], _NUMPY), _config(message.content)
    content = RecordDict()
    if kind == "train":
        trained = client.fit(FitIns(parameters, config))
        tensors = dict(zip(keys, trained.parameters.tensors, strict=True))
        content[_ARRAYS] = ArrayRecord({key: _array(tensors[key]) for key in record})
        _report(content, trained.num_examples, trained.metrics)
    else:
        evaluated = client.evaluate(EvaluateIns(parameters, config))
        _report(content, evaluated.num_examples, {"loss": evaluated.loss, **evaluated.metrics})
    return Message(content, reply_to=message)


def _one(content: RecordDict, kind: type[Record], key: str) -> Record | None:
    """Return the record of a kind: the one so called, or the only one."""
    found = {name: record for name, record in content.items() if isinstance(record, kind)}
    if key in found or not found:
        return found.get(key)
    if len(found) > 1:
        raise ConfigError(
            f"The message holds {len(found)} {kind.__name__}s ({', '.join(sorted(found)[:5])}) and none is called "
            f"{key!r}; send one, or call the right one so."
        )
    return next(iter(found.values()))


def _in_order(record: ArrayRecord, names: Sequence[str]) -> list[str]:
    """Return the record's keys in the order of the model's tensors; a list of arrays has numbers for keys."""
    for key, array in record.items():
        if array.stype != _NUMPY:
            raise ConfigError(f"The message's {key} is serialized as {array.stype!r}, not {_NUMPY!r}; send arrays.")
    if record.keys() == set(names):
        return list(names)
    if list(record) == [str(i) for i in range(len(names))]:
        return list(record)
    unlike = [*(name for name in names if name not in record), *(key for key in record if key not in set(names))]
    where = "the message" if unlike[0] in record else "the configured model"
    raise ConfigError(
        f"The message's tensors are not the configured model's: only {where} has {unlike[0]}; "
        "server and clients must be given the same model configuration."
    )


def _config(content: RecordDict) -> dict[str, Scalar]:
    """Return what is asked for, under names with underscores too."""
    record = _one(content, ConfigRecord, _CONFIG)
    config: dict[str, Any] = {} if record is None else dict(record)
    for key in list(config):
        config.setdefault(key.replace("-", "_"), config[key])
    return config


def _array(data: bytes) -> Array:
    array = decode(data)
    return Array(str(array.dtype), array.shape, _NUMPY, data)


def _report(content: RecordDict, num_examples: int, metrics: Mapping[str, Scalar]) -> None:
    numbers, texts = MetricRecord({_EXAMPLES: num_examples}), ConfigRecord()
    for key, value in metrics.items():
        if isinstance(value, int | float):
            numbers[key] = int(value) if isinstance(value, bool) else value
        else:
            texts[key] = value
    content[_METRICS] = numbers
    if texts:
        content[_CONFIG] = texts
