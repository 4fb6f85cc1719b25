"""Client apps and server apps as Flower's users write them, for engines to run; workers import this module."""

import os
import threading
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as MessageFedAvg

START = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(0.5), np.array([3, 4])]


# ---- the message API ---------------------------------------------------------------------------------------------


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


message_app = ClientApp()


@message_app.train()
def train(message: Message, context: Context) -> Message:
    """Add (partition id + 1) to every array; do what the config asks of this client, and count in the state."""
    cid = int(context.node_config["partition-id"])
    config = message.content["config"]
    if cid in config.get("raise", []):
        raise RuntimeError(f"client {cid} lost its data")
    if cid in config.get("exit", []):
        raise SystemExit(3)
    if cid in config.get("die", []):
        os._exit(1)
    if cid in config.get("die-once", []) and not (flag := Path(str(config["flag"])) / str(cid)).exists():
        flag.touch()
        os._exit(1)
    if cid in config.get("interrupt", []):
        raise KeyboardInterrupt
    if cid in config.get("speechless", []):
        raise Speechless
    if cid in config.get("astray", []):
        return message
    if cid in config.get("unsendable", []):
        reply = Message(RecordDict({"metrics": MetricRecord({"a": 1})}), reply_to=message)
        reply.content["metrics"].__dict__["_data"]["a"] = threading.Lock()
        return reply
    if cid in config.get("no-state", []):
        context.state = None
    if cid in config.get("hang", []):
        time.sleep(3600)
    if "sleep" in config:
        time.sleep(config["sleep"])
    arrays = [np.asarray(a + (cid + 1)) for a in message.content["arrays"].to_numpy_ndarrays()]
    count = context.state["count"]["calls"] if "count" in context.state else 0
    context.state["count"] = MetricRecord({"calls": count + 1})
    if "own" not in context.state:
        context.state["own"] = ArrayRecord([np.full(3, cid, np.float32)])
    own = context.state["own"].to_numpy_ndarrays()[0]
    context.state["own"] = ArrayRecord([own + 1])
    metrics = MetricRecord({"num-examples": cid + 1, "calls": count + 1, "own": float(own[0]), "pid": os.getpid()})
    size = int(config.get("reply-mb", 0))
    if size:
        arrays.append(np.full(size * 2**18, cid, np.float32))
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)


@message_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the mean of the first array."""
    first = message.content["arrays"].to_numpy_ndarrays()[0]
    metrics = MetricRecord({"num-examples": 2, "mean": float(first.mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def messages(nodes, number: int = 1, *, ttl: float | None = None, start=START, **config) -> list[Message]:
    """A train message for each node, sharing nothing but what they say."""
    return [
        Message(
            RecordDict({"arrays": ArrayRecord(list(start)), "config": ConfigRecord({"round": number, **config})}),
            node, "train", group_id=str(number), ttl=ttl,
        )
        for node in nodes
    ]  # fmt: skip


def by_partition(replies, first: int) -> dict[int, Message]:
    """Replies by partition id."""
    return {reply.metadata.src_node_id - first: reply for reply in replies}


def message_server(rounds: int, nodes: int, out: list) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = MessageFedAvg(min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
        result = strategy.start(
            grid, ArrayRecord(list(START[:2])), num_rounds=rounds, train_config=ConfigRecord({"round": 1})
        )
        out.append((result.arrays.to_numpy_ndarrays(), result.evaluate_metrics_clientapp))

    return app


# ---- the legacy API ----------------------------------------------------------------------------------------------


class Adder(NumPyClient):
    def __init__(self, cid: int) -> None:
        self.cid = cid

    def get_parameters(self, config):
        return [np.zeros(3, np.float32), np.zeros((), np.float32)]

    def fit(self, parameters, config):
        if config.get("raise") == self.cid:
            raise RuntimeError("lost its data")
        return [np.asarray(p + np.float32(self.cid + 1)) for p in parameters], self.cid + 1, {"cid": self.cid}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 1, {"accuracy": 0.5}


def client_fn(context: Context) -> Client:
    return Adder(int(context.node_config["partition-id"])).to_client()


legacy_app = ClientApp(client_fn=client_fn)


def legacy_server(rounds: int, nodes: int, out: list, **strategy) -> ServerApp:
    """An ordinary legacy ServerApp that keeps what its strategy aggregates."""

    class Keeping(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            results = sorted(results, key=lambda pair: pair[1].metrics["cid"])
            assert all(type(t) is bytes for _, res in results for t in res.parameters.tensors)
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            out.append((len(results), len(failures), parameters_to_ndarrays(parameters)))
            return parameters, metrics

    def server_fn(context: Context) -> ServerAppComponents:
        kept = Keeping(
            fraction_fit=1.0, min_fit_clients=nodes, min_evaluate_clients=nodes, min_available_clients=nodes,
            fit_metrics_aggregation_fn=lambda _: {}, evaluate_metrics_aggregation_fn=lambda _: {}, inplace=False,
            **strategy,
        )  # fmt: skip
        server = Server(client_manager=SimpleClientManager(), strategy=kept)
        return ServerAppComponents(server=server, config=ServerConfig(num_rounds=rounds))

    return ServerApp(server_fn=server_fn)


INITIAL = ndarrays_to_parameters([np.zeros(3, np.float32), np.zeros((), np.float32)])


class Unloadable(ClientApp):
    """An app that no worker can load."""

    def __reduce__(self):
        return _explode, ()


def _explode():
    raise ImportError("no module named nowhere")
