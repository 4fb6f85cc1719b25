"""Faults of clients: what they send, or that they send nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flwr.common import FitRes, Parameters, ndarray_to_bytes, ndarrays_to_parameters

from client_apps.tasks import build
from strategies import RoundsFailed

from .stage import BAD, Change, Run, Stage, arrays, fault


@lru_cache(maxsize=1)
def without_it() -> bytes:
    """The model of the five others: what the bad client must not change by a bit."""
    with TemporaryDirectory() as folder:
        run = Stage(Path(folder)).run(wrong=raises)
        return run.bits


def raises(res: FitRes, number: int) -> FitRes:
    raise RuntimeError("the disk of this client is full")


def sent(change: Callable[[list[Any]], list[np.ndarray]]) -> Change:
    """A client that sends changed arrays."""
    return lambda res, _: replace(res, parameters=ndarrays_to_parameters(change(arrays(res))))


def first(change: Callable[[bytes], bytes]) -> Change:
    """A client that sends changed bytes for its first tensor."""

    def tamper(res: FitRes, number: int) -> FitRes:
        head, *rest = res.parameters.tensors
        return replace(res, parameters=Parameters([change(head), *rest], res.parameters.tensor_type))

    return tamper


def left_out(stage: Stage, wrong: Change, *overrides: str) -> Run:
    """Run with a client that cannot be used, and see that the others were, to the last bit."""
    run = stage.run(*overrides, wrong=wrong)
    assert [r["clients_accepted"] for r in run.records] == [5, 5]
    assert run.bits == without_it()
    assert run.status["status"] == "finished"
    return run


@fault("a client raises an exception")
def client_raises(stage: Stage) -> str:
    run = left_out(stage, raises)
    assert [r["clients_failed"] for r in run.records] == [1, 1]
    return run.text()


@fault("NaN in an update")
def not_a_number(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [np.full_like(a[0], np.nan), *a[1:]])).text()


@fault("Inf in an update")
def infinite(stage: Stage) -> str:
    def one(a: list[Any]) -> list[np.ndarray]:
        a[0].flat[0] = np.inf
        return a

    return left_out(stage, sent(one)).text()


@fault("a tensor of another shape")
def shape(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [a[0], a[1][:1], *a[2:]])).text()


@fault("a tensor of another kind of number")
def kind(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [a[0].astype(np.int64), *a[1:]])).text()


@fault("complex numbers")
def complex_numbers(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [a[0].astype(np.complex64), *a[1:]])).text()


@fault("a tensor is missing")
def missing(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: a[:-1])).text()


@fault("thousands of tensors")
def thousands(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: a + [np.zeros(0, np.float32)] * 5000)).text()


@fault("an empty message")
def empty(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [])).text()


@fault("a pickled array of objects")
def pickled(stage: Stage) -> str:
    marks: list[str] = []

    class Trap:
        def __reduce__(self) -> Any:
            return (marks.append, ("unpickled",))

    def trap(_: bytes) -> bytes:
        file = io.BytesIO()
        np.save(file, np.array([Trap()], dtype=object), allow_pickle=True)
        return file.getvalue()

    text = left_out(stage, first(trap)).text()
    assert marks == []
    return text


@fault("a `.npy` header that promises ten terabytes")
def lying(stage: Stage) -> str:
    def lie(data: bytes) -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (2_500_000_000_000,)}
        )
        return file.getvalue() + data[-64:]

    return left_out(stage, first(lie)).text()


@fault("bytes that are no array")
def garbage(stage: Stage) -> str:
    return left_out(stage, first(lambda _: b"\x00" * 200)).text()


@fault("a message cut short")
def cut(stage: Stage) -> str:
    return left_out(stage, first(lambda data: data[: len(data) // 2])).text()


@fault("`num_examples` is 0")
def no_examples(stage: Stage) -> str:
    return left_out(stage, lambda res, _: replace(res, num_examples=0)).text()


@fault("`num_examples` is negative")
def negative(stage: Stage) -> str:
    return left_out(stage, lambda res, _: replace(res, num_examples=-40)).text()


@fault("`num_examples` is beyond 64 bits")
def beyond(stage: Stage) -> str:
    return left_out(stage, lambda res, _: replace(res, num_examples=2**70)).text()


@fault("inflated `num_examples`, `max_weight_share` set")
def inflated(stage: Stage) -> str:
    wrong: Change = lambda res, _: replace(res, num_examples=10**12)  # noqa: E731
    run = stage.run("strategy=fedavg", "strategy.max_weight_share=0.5", wrong=wrong)
    assert [r["clients_accepted"] for r in run.records] == [6, 6]
    # Its half is what it would have with as many examples as all others together.
    size = sum(build(stage.config()).train_size(cid) for cid in range(6) if cid != BAD)
    half = Stage(stage.folder / "half").run("strategy=fedavg", wrong=lambda res, _: replace(res, num_examples=size))
    for name, array in run.model.items():
        np.testing.assert_allclose(array, half.model[name], rtol=1e-5, atol=1e-7)
    return run.text()


@fault("an update a million times too long, `clip_to_median` set")
def long(stage: Stage) -> str:
    stage.folder.mkdir(exist_ok=True)
    wrong = sent(lambda a: [a[0] * 1e6, *a[1:]])
    run = stage.run("strategy=fedavg", "strategy.clip_to_median=2", wrong=wrong)
    assert [r["clients_accepted"] for r in run.records] == [6, 6]
    honest = Stage(stage.folder / "honest").run("strategy=fedavg")
    norm, usual = (r.records[-1]["parameter_norm"] for r in (run, honest))
    assert norm < 1.5 * usual
    return run.text()


@fault("an update a million times too long, nothing set")
def unclipped(stage: Stage) -> str:
    run = stage.run("strategy=fedavg", wrong=sent(lambda a: [a[0] * 1e6, *a[1:]]))
    assert run.records[0]["parameter_norm"] > 1e5  # nobody knows that this is wrong: later rounds say that it diverges
    assert run.records[1]["clients_rejected"] > 0
    return run.text()


@fault("values too large for the model's numbers")
def too_large(stage: Stage) -> str:
    return left_out(stage, sent(lambda a: [np.full(a[0].shape, 1e200), *a[1:]])).text()


@fault("a client reports a status other than OK")
def status(stage: Stage) -> str:
    from flwr.common import Code, Status

    wrong: Change = lambda res, _: replace(res, status=Status(Code.FIT_NOT_IMPLEMENTED, "no data today"))  # noqa: E731
    return left_out(stage, wrong).text()


@fault("a metric that the method needs is missing")
def lacking(stage: Stage) -> str:
    def forget(res: FitRes, _: int) -> FitRes:
        return replace(res, metrics={k: v for k, v in res.metrics.items() if k != "initial_loss"})

    run = stage.run("strategy=qfedavg", wrong=forget)
    assert [r["clients_accepted"] for r in run.records] == [5, 5]
    assert run.bits == Stage(stage.folder / "without").run("strategy=qfedavg", wrong=raises).bits
    return run.text()


@fault("a metric that the method needs is NaN")
def nan_metric(stage: Stage) -> str:
    wrong: Change = lambda res, _: replace(res, metrics={**res.metrics, "initial_loss": float("nan")})  # noqa: E731
    run = stage.run("strategy=qfedavg", wrong=wrong)
    assert [r["clients_accepted"] for r in run.records] == [5, 5]
    assert run.bits == Stage(stage.folder / "without").run("strategy=qfedavg", wrong=raises).bits
    return run.text()


@fault("metrics that nobody asked for")
def more_metrics(stage: Stage) -> str:
    odd = {"note": "x" * 100_000, "blob": b"\x00" * 1000, "huge": 2**62, "line\nbreak": 1.0}
    run = stage.run(wrong=lambda res, _: replace(res, metrics={**res.metrics, **odd}))
    honest = Stage(stage.folder / "honest").run()
    assert run.bits == honest.bits
    assert [r["clients_accepted"] for r in run.records] == [6, 6]
    return run.text()


@fault("an evaluation whose loss is NaN")
def evaluation(stage: Stage) -> str:
    run = stage.run("evaluation=federated", evaluates=lambda res: replace(res, loss=float("nan")))
    assert [r["clients_accepted"] for r in run.records] == [6, 6]
    assert all(r["loss"] > 0 for r in run.records)
    return run.text()


@fault("the message is sent in another byte order")
def byte_order(stage: Stage) -> str:
    run = stage.run(wrong=first(lambda d: ndarray_to_bytes(np.load(io.BytesIO(d)).astype(">f4"))))
    honest = Stage(stage.folder / "honest").run()
    assert run.bits == honest.bits  # an array like any other: nothing to complain of
    return run.text()


@fault("too few usable results in one round")
def too_few(stage: Stage) -> str:
    def one_round(res: FitRes, number: int) -> FitRes:
        return replace(res, num_examples=0) if number == 1 else res

    run = stage.run("strategy.min_completed=6", wrong=one_round)
    assert [r["failed_round"] for r in run.records] == [True, False]
    assert run.status["status"] == "finished"
    return run.text()


@fault("too few usable results, round after round")
def always(stage: Stage) -> str:
    run = stage.run(
        "strategy.min_completed=6", "strategy.max_failed_rounds=3", "num_rounds=10", wrong=raises, fails=RoundsFailed
    )
    assert len(run.records) == 3
    assert run.status["status"] == "failed"
    start = Stage(stage.folder / "start").run("num_rounds=1", "strategy.min_completed=6", wrong=raises)
    assert run.bits == start.bits  # the model as it was
    return run.text()


@fault("the run diverges")
def diverges(stage: Stage) -> str:
    run = stage.run("strategy=fedavg", "strategy.server_lr=1e30", "num_rounds=9", fails=RoundsFailed)
    assert all(np.isfinite(a).all() for a in run.model.values())
    return run.text()
