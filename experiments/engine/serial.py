"""Engines that run virtual clients; everything that reaches into Flower's internals is here.

`flower` is Flower's own Ray simulation. `serial` runs the same apps one client after the other in this process:
for debugging, and for models so small that sending a client to a worker costs more than training it.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

ENGINES = ("flower", "serial")

# Node ids of the serial engine are partition ids plus this; Flower keeps the small numbers for itself.
_FIRST_NODE = 1000


def run(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    """Run both apps on the engine `cfg["simulation"]` describes, until the ServerApp returns.

    Raises
    ------
    Exception
        Whatever the ServerApp raised.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    engine = {"flower": _run_flower, "serial": _run_serial}[cfg["simulation"]["engine"]]
    with flower_log_to(Path(cfg["output_dir"]) / "flower.log"):
        engine(cfg, server_app, client_app)


def _run_flower(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray announces a future default at every start; choosing it now silences that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Deprecated in favour of `flwr run`, but the only way to simulate inside a process that composes its own
    # configuration.
    from flwr.simulation import run_simulation

    sim = cfg["simulation"]
    if cfg["tracking"]["progress"]:
        rich.get_console().print(f"Starting Ray with {sim['num_cpus']} CPUs; until round 1 this takes half a minute.")
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=cfg["num_clients"],
        backend_config={
            "init_args": {
                "num_cpus": sim["num_cpus"],
                "object_store_memory": int(sim["object_store_mb"] * 2**20),
                "include_dashboard": False,
                "log_to_driver": False,
                "logging_level": logging.ERROR,
            },
            "client_resources": {"num_cpus": sim["client_cpus"], "num_gpus": sim["client_gpus"]},
        },
    )


def _run_serial(cfg: Mapping[str, Any], server_app: ServerApp, client_app: ClientApp) -> None:
    grid = SerialGrid(client_app, cfg["num_clients"])
    context = Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config={})
    server_app(grid, context)


class SerialGrid(Grid):
    """A Flower grid whose nodes are partitions of one client app, run in this process, one at a time.

    A message is answered when it is pushed. A client that raises gives an error reply, as on any grid. Each
    client keeps its `Context`, and so its state, across rounds.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int
        Number of nodes; node i has `partition-id` i and `num-partitions` num_clients.
    """

    def __init__(self, client_app: ClientApp, num_clients: int) -> None:
        self._app = client_app
        self.set_run(Run.create_empty(run_id=uuid.uuid4().int >> 65))
        self._contexts = {
            _FIRST_NODE + i: Context(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for i in range(num_clients)
        }
        self._replies: dict[str, Message] = {}
        # Flower's server sends from several threads; clients share a model and torch's generator.
        self._lock = threading.Lock()

    def set_run(self, run: Run) -> None:
        """Name the run that messages belong to."""
        self._run = run
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, SUPERLINK_NODE_ID

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message; Flower's own constructor does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes, in partition order."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run each message's client now and keep the reply."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            with self._lock, _one_thread():
                self._replies[message.metadata.message_id] = self._answer(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand out the replies to these messages, once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run each message's client and return the replies; nothing is left to wait for."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self._contexts.get(message.metadata.dst_node_id)
        if context is None:
            error = Error(ErrorCode.NODE_UNAVAILABLE, f"there is no node {message.metadata.dst_node_id}")
            return Message(error, reply_to=message)
        try:
            reply = self._app(message=message, context=context)
        except Exception as error:
            logging.getLogger("flwr").exception("client %s raised", context.node_config["partition-id"])
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        return reply


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give a client one thread, as a worker process does, so that sums have the same order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def flower_log_to(path: Path) -> Iterator[None]:
    """Send Flower's log, with clients' tracebacks, to a file instead of the console."""
    logger = logging.getLogger("flwr")
    handlers, propagate = list(logger.handlers), logger.propagate
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    logger.handlers, logger.propagate = [file], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file.close()
