"""A small digits run in which something goes wrong, in this process, and all that a person could read of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Context, EvaluateIns, EvaluateRes, FitIns, FitRes, parameters_to_ndarrays
from safetensors.numpy import load_file

from client_apps.app import TaskClient
from client_apps.tasks import build
from experiments import engine
from experiments.config import check, compose
from experiments.server_app import make_server_app

BAD = 2
"""The client that does wrong, of six."""

Change = Callable[[FitRes, int], FitRes]
"""Makes what the client sends of its honest answer and the round's number."""

FAULTS: dict[str, Callable[[Stage], str]] = {}
"""By the name of its row: produces a fault, asserts what the row says of it, and returns what a person could read."""


def fault(name: str) -> Callable[[Callable[[Stage], str]], Callable[[Stage], str]]:
    """Register what produces a row of the table."""

    def register(produce: Callable[[Stage], str]) -> Callable[[Stage], str]:
        assert name not in FAULTS
        FAULTS[name] = produce
        return produce

    return register


class Wrongdoer(TaskClient):
    """A client of the digits task, one of which does what it is told instead of answering honestly."""

    wrong: Change | None = None
    evaluates: Callable[[EvaluateRes], EvaluateRes] | None = None

    def fit(self, ins: FitIns) -> FitRes:
        honest = super().fit(ins)
        if self.cid != BAD or self.wrong is None:
            return honest
        return type(self).wrong(honest, int(ins.config["server_round"]))

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        honest = super().evaluate(ins)
        if self.cid != BAD or self.evaluates is None:
            return honest
        return type(self).evaluates(honest)


class Stage:
    """Where a fault is produced: a folder of its own, and everything that is logged.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    @property
    def log(self) -> str:
        """Everything logged so far, and what each line of metrics.jsonl gives as reasons."""
        return "\n".join(self.lines)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is logged while the block runs."""
        lines = self.lines

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(f"{record.levelname} {record.getMessage()}")

        root, keep = logging.getLogger(), Keep()
        root.addHandler(keep)
        try:
            yield
        finally:
            root.removeHandler(keep)

    def config(self, *overrides: str) -> dict[str, Any]:
        """Compose a run of six clients in two rounds; later overrides win."""
        common = ("simulation=serial", "num_clients=6", "clients_per_round=6", "num_rounds=2", "client.lr=0.1")
        quiet = ("tracking.progress=false", "tracking.tensorboard=false", f"output_dir={self.folder / 'run'}")
        return compose([*common, *quiet, *overrides])

    def run(
        self,
        *overrides: str,
        wrong: Change | None = None,
        evaluates: Callable[[EvaluateRes], EvaluateRes] | None = None,
        fails: type[BaseException] | None = None,
    ) -> Run:
        """Run six clients, one of which does wrong; keep the run's error where one is expected.

        Raises
        ------
        AssertionError
            If the run ends otherwise than expected.
        """
        cfg = self.config(*overrides)

        class Told(Wrongdoer):
            pass

        Told.wrong, Told.evaluates = (
            staticmethod(wrong) if wrong else None,
            staticmethod(evaluates) if evaluates else None,
        )

        def client_fn(context: Context) -> Client:
            return Told(build(cfg), int(context.node_config["partition-id"]), context.state)

        error: BaseException | None = None
        with self.listening():
            try:
                engine.run(cfg, make_server_app(cfg, check(cfg)), ClientApp(client_fn=client_fn))
            except BaseException as raised:
                if fails is None or not isinstance(raised, fails):
                    raise
                error = raised
        assert (error is None) == (fails is None)
        return Run(Path(cfg["output_dir"]), error, self.log)


class Run:
    """What a run has left, and what can be read of it."""

    def __init__(self, folder: Path, error: BaseException | None, log: str) -> None:
        self.folder = folder
        self.error = error
        self.log = log

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, round 0 left out."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["round"]]

    @property
    def model(self) -> Mapping[str, np.ndarray]:
        """The saved model."""
        return load_file(self.folder / "model.safetensors")

    @property
    def bits(self) -> bytes:
        """The saved model's file."""
        return (self.folder / "model.safetensors").read_bytes()

    @property
    def status(self) -> dict[str, Any]:
        """status.json."""
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
        return found

    def text(self) -> str:
        """Everything that a person could read: the log, the error, the reasons in metrics.jsonl, status.json."""
        parts = [self.log]
        if self.error is not None:
            parts.append(f"{type(self.error).__name__}: {self.error}")
        for record in self.records:
            parts += [f"{key}: {value}" for key, value in record.items()]
        parts.append(json.dumps(self.status, ensure_ascii=False))
        return "\n".join(parts)


def arrays(res: FitRes) -> list[np.ndarray]:
    """Copies of the arrays of an answer."""
    return [np.array(a) for a in parameters_to_ndarrays(res.parameters)]
