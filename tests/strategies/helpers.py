"""What the strategy tests share: clients without a network, and results without clients."""

from collections.abc import Sequence

import numpy as np
import pytest
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from strategies import (
    AFL,
    CLAIR,
    CRAFT,
    ConFIG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFV,
    FedLF,
    FedMedian,
    FedMGDA,
    FedNova,
    FedProx,
    FedRef,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    Local,
    NormalisedMomentum,
    OracleFedAvg,
    QFedAvg,
)
from strategies.testing import Proxy


def manager(cids: Sequence[str]) -> SimpleClientManager:
    found = SimpleClientManager()
    for cid in cids:
        found.register(Proxy(cid))
    return found


def result(cid, arrays, num_examples=10, metrics=None) -> tuple[ClientProxy, FitRes]:
    parameters = arrays if isinstance(arrays, Parameters) else ndarrays_to_parameters(arrays)
    number = len(str(cid)) + sum(map(ord, str(cid)))
    reported = {"initial_loss": 1.0 + number % 3, "step_weight": 2.0 + number % 2}
    reported |= {"train_loss": 0.5 + number % 5, **(metrics or {})}
    return Proxy(str(cid)), FitRes(Status(Code.OK, ""), parameters, num_examples, reported)


def arrays_of(parameters) -> list[np.ndarray]:
    assert parameters is not None
    return parameters_to_ndarrays(parameters)


def model(seed=0, dtype=np.float32) -> list[np.ndarray]:
    """A small model: a matrix, a vector, a 0-d float and an int64 counter."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(4, 3)).astype(dtype),
        rng.normal(size=3).astype(dtype),
        np.array(rng.normal(), dtype=dtype),
        np.array(3, dtype=np.int64),
    ]


def trained(start, count, seed=1, scale=0.1):
    """`count` clients' models near `start`; counters move by the client's position."""
    rng = np.random.default_rng(seed)
    return [
        [
            (a + scale * rng.normal(size=a.shape)).astype(a.dtype) if a.dtype.kind == "f" else np.asarray(a + i)
            for a in start
        ]
        for i in range(count)
    ]


ALL = {
    "craft": lambda **k: CRAFT(**k),
    "craft-mean-norm": lambda **k: CRAFT(scale="mean_norm", server_lr=1.0, **k),
    "craft-inequality": lambda **k: CRAFT(constraint="inequality", **k),
    "craft-whole-ema-loss": lambda **k: CRAFT(granularity="model", reference="ema", targets="loss", **k),
    "normalised-momentum": lambda **k: NormalisedMomentum(**k),
    "fedavg": lambda **k: FedAvg(**k),
    "fedavgm": lambda **k: FedAvgM(**k),
    "fedprox": lambda **k: FedProx(**k),
    "fednova": lambda **k: FedNova(**k),
    "fedadam": lambda **k: FedAdam(**k),
    "fedyogi": lambda **k: FedYogi(**k),
    "fedadagrad": lambda **k: FedAdagrad(**k),
    "afl": lambda **k: AFL(**k),
    "qfedavg": lambda **k: QFedAvg(q=1.0, **k),
    "fedfv": lambda **k: FedFV(tau=2, **k),
    "fedmgda": lambda **k: FedMGDA(**k),
    "fedlf": lambda **k: FedLF(**k),
    "config": lambda **k: ConFIG(**k),
    "fedref": lambda **k: FedRef(window=2, lambda_global=0.1, **k),
    "fedref-gradient": lambda **k: FedRef(window=1, solver="gradient", server_lr=0.5, **k),
    "fedref-gated": lambda **k: FedRef(window=1, gate="loss", ref_every=1, ref_growth=2.0, **k),
    "clair": lambda **k: CLAIR(**k),
    "clair-clients": lambda **k: CLAIR(form="clients", rank=1, refit=False, personalise=False, **k),
    "local": lambda **k: Local(**k),
    "oracle-fedavg": lambda **k: OracleFedAvg(**k),
    "fedmedian": lambda **k: FedMedian(**k),
    "fedtrimmedavg": lambda **k: FedTrimmedAvg(**k),
    "krum": lambda **k: Krum(**k),
}
every_strategy = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def initial(seed=0):
    return ndarrays_to_parameters(model(seed))


def results(start, count=4, seed=1, sizes=(10, 20, 30, 40)):
    return [result(i, a, sizes[i % len(sizes)]) for i, a in enumerate(trained(start, count, seed))]
