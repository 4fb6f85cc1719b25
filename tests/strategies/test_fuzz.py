"""Fuzzing: bytes that may be tensors, and rounds of clients that may send anything."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.common import Code, EvaluateRes, Parameters, Status, ndarrays_to_parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import (
    AFL,
    CLAIR,
    CRAFT,
    FedAvg,
    FedFV,
    FedLF,
    FedMedian,
    FedMGDA,
    FedNova,
    FedRef,
    Krum,
    Local,
    QFedAvg,
    RoundsFailed,
)
from strategies.testing import Proxy
from strategies.updates import UnusableTensor, decode
from tests import npy_files

from .helpers import arrays_of, model, result, trained

ROOT = Path(__file__).parents[2]


@settings(max_examples=800, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(npy_files.anything)
@pytest.mark.filterwarnings("error")
def test_bytes_are_refused_or_read_as_numpy_reads_them(data):
    try:
        array = decode(data)
    except UnusableTensor:
        return
    npy_files.require_as_numpy_reads(array, data)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(npy_files.valid())
def test_every_array_of_numbers_is_read(made):
    array, data = made
    found = decode(data)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(npy_files.fitting())
def test_files_of_other_writers_are_read(data):
    npy_files.require_as_numpy_reads(decode(data), data)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_fuzzing_by_coverage_finds_nothing(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, array in enumerate([np.arange(6.0).reshape(2, 3), np.array(7), np.zeros((0, 3), ">f2"), np.array([True])]):
        (corpus / f"{i}.npy").write_bytes(npy_files.saved(array))
        (corpus / f"{i}-2.npy").write_bytes(npy_files.saved(np.asfortranarray(array), (2, 0)))
    options = ["-runs=100000", "-max_total_time=20", "-seed=1", "-max_len=300", "-rss_limit_mb=4096", "-verbosity=0"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.strategies.fuzz_decode", str(corpus), *options, f"-artifact_prefix={tmp_path}/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.glob("crash-*"))


# ---- rounds -------------------------------------------------------------------------------------------------------

START = [*model(), np.zeros(2, np.float64)]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**62, 2**70),
    st.just(10**5000),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just("\x1b[2J\n" * 10_000),
    st.lists(st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.just(np.zeros(3)),
)
keys = st.sampled_from(["initial_loss", "train_loss", "step_weight", "personal_loss", "x"]) | st.text(max_size=5)
metrics = st.one_of(st.none(), st.dictionaries(keys, scalars, max_size=5), st.lists(scalars, max_size=2), scalars)
codes = st.sampled_from([*Code, 0, 7, None, "OK"])
statuses = st.one_of(st.none(), st.builds(Status, codes, st.one_of(st.none(), st.text(max_size=20))))
values = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e6, 3e38, -1e149, 1e151, 1e300, math.nan, math.inf, -math.inf])


@st.composite
def tensors(draw: st.DrawFn, array: np.ndarray):
    """Nearly one of the model's: other values, another dtype, another shape, or another kind of thing."""
    with np.errstate(over="ignore", invalid="ignore"):
        match draw(st.integers(0, 6)):
            case 0 | 1 if array.dtype.kind == "f":
                array.reshape(-1)[draw(st.integers(0, array.size - 1))] = draw(values)
            case 0 | 1:
                array = np.array(draw(st.integers(-(2**63), 2**63 - 1)))
            case 2:
                array = np.asarray(
                    array.astype(draw(st.sampled_from(["<f2", ">f4", ">f8", ">i4", "<u8", "c8", "?", "O"])))
                )
            case 3:
                array = draw(st.sampled_from([array.reshape(-1), array[None], array.T, np.asfortranarray(array)]))
            case 4:
                return draw(npy_files.anything)
            case 5:
                return draw(
                    st.sampled_from([None, b"", "text", 5, [1.0], np.zeros(10**6, np.uint8)[::-1], memoryview(b"")])
                )
            case _:
                data = npy_files.saved(array)
                return draw(st.sampled_from([bytearray(data), memoryview(data), data[:-1], data + b"\0", data[:20]]))
    if array.dtype.kind == "O" or draw(st.booleans()):
        return array
    return npy_files.saved(array)


@st.composite
def tensor_lists(draw: st.DrawFn):
    """Nearly a model: one or two of its tensors are odd, or it has too many or too few, or is no list."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from([None, [], (), b"", "x" * len(START), 5, {}, [b""] * 100_000, [None] * len(START)]))
    arrays = trained(START, 1, seed=7)[0]
    found: list = [npy_files.saved(array) for array in arrays]
    for t in draw(st.sets(st.integers(0, len(arrays) - 1), min_size=1, max_size=2)):
        found[t] = draw(tensors(np.array(arrays[t])))
    return found


@st.composite
def hostile_results(draw: st.DrawFn, cid: str):
    """A client's result with one or two fields of another kind."""
    proxy, res = result(cid, trained(START, 1, seed=7)[0])
    fields = ["parameters", "parameters", "status", "num_examples", "metrics"]
    for field in draw(st.sets(st.sampled_from(fields), min_size=1, max_size=2)):
        if field == "status":
            res.status = draw(statuses)
        elif field == "num_examples":
            res.num_examples = draw(st.one_of(scalars, st.integers(1, 2**63), st.just(np.int32(5))))
        elif field == "metrics":
            res.metrics = draw(metrics)
        else:
            res.parameters = draw(st.one_of(st.none(), tensor_lists().map(lambda x: Parameters(x, "numpy.ndarray"))))
    return proxy, res


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(hostile_results("hostile"))
def test_a_result_is_used_or_refused_with_a_reason(sent):
    s = FedAvg(initial_parameters=ndarrays_to_parameters(START))
    after, found = s.aggregate_fit(1, [sent], [])
    assert found["clients_accepted"] + found["clients_rejected"] == 1
    assert found["failed_round"] is (found["clients_accepted"] == 0)
    assert len(json.loads(found.get("rejection_reasons", "[]"))) == found["clients_rejected"]
    assert all(np.isfinite(array).all() for array in arrays_of(after))


MAKERS = {
    "fedavg": FedAvg,
    "craft": CRAFT,
    "craft-loss": lambda **k: CRAFT(targets="loss", granularity="model", constraint="inequality", **k),
    "afl": AFL,
    "qfedavg": QFedAvg,
    "fedfv": FedFV,
    "fedlf": FedLF,
    "fedmgda": FedMGDA,
    "fednova": FedNova,
    "fedref": lambda **k: FedRef(window=1, gate="loss", **k),
    "clair": CLAIR,
    "krum": Krum,
    "fedmedian": FedMedian,
    "local": Local,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_no_client_breaks_a_round(make, data):
    options = data.draw(st.sampled_from([{}, {"max_weight_share": 0.3}, {"clip_to_median": 2.0}, None]), "options")
    options = {"max_weight_share": 0.4, "clip_to_median": 1.0} if options is None else options
    theta = ndarrays_to_parameters(START)
    s = make(initial_parameters=theta, max_failed_rounds=2, min_completed=1, **options)
    for number in (1, 2):
        before = arrays_of(theta)
        honest = [result(f"honest-{i}", a, 10 + i) for i, a in enumerate(trained(before, 3, seed=number))]
        hostile = [data.draw(hostile_results(f"hostile-{i}")) for i in range(data.draw(st.integers(1, 3)))]
        again = data.draw(st.sampled_from([[], hostile[:1], [*hostile, *hostile], honest[:1]]))
        failures = data.draw(st.lists(st.sampled_from([*hostile, RuntimeError("\n" * 9), KeyError(b"\0")]), max_size=2))
        sent = data.draw(st.permutations([*honest, *hostile, *again]))
        try:
            after, found = s.aggregate_fit(number, sent, failures)
        except RoundsFailed as error:
            json.dumps(error.metrics)
            return
        assert found["clients_accepted"] + found["clients_rejected"] == len(sent)
        assert found["clients_failed"] == len(failures)
        reasons = json.loads(found.get("rejection_reasons", "[]"))
        refused = [r for r in reasons if r.startswith("client honest-")]
        assert len(refused) == len([proxy for proxy, _ in again if proxy.cid.startswith("honest")])
        assert all("more than one" in r for r in refused)
        assert all(len(r) <= 300 and r.isprintable() for r in reasons)
        json.dumps(found, allow_nan=False)
        for new, old in zip(arrays_of(after), before, strict=True):
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
            assert np.isfinite(new).all()
        if found["failed_round"]:
            assert after.tensors == theta.tensors
        theta = after
        evaluated = s.evaluated(theta)
        assert all(np.isfinite(a).all() for a in arrays_of(evaluated))
        for tensor in s.memory.values():
            assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("share", [None, 0.3])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_client_breaks_an_evaluation(share, data):
    s = FedAvg(max_weight_share=share, evaluate_metrics_aggregation_fn=lambda pairs: {"seen": len(pairs)})
    honest = [(Proxy(f"honest-{i}"), EvaluateRes(Status(Code.OK, ""), 1.0 + i, 10, {})) for i in range(4)]
    fields = st.tuples(statuses, scalars, scalars | st.integers(1, 2**63 - 1), metrics)
    drawn = data.draw(st.lists(fields, min_size=1, max_size=3))
    hostile = [(Proxy(f"hostile-{i}"), EvaluateRes(*each)) for i, each in enumerate(drawn)]
    loss, found = s.aggregate_evaluate(1, data.draw(st.permutations([*honest, *hostile, *hostile[:1]])), hostile[:1])
    assert math.isfinite(loss)
    assert 4 <= found["seen"] <= 4 + len(hostile)
    assert s.aggregate_evaluate(1, honest, [])[0] == 2.5
