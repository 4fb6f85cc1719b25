"""A digits run in which some clients raise and one client's process dies: `python lossy_client.py ENGINE DIR`."""

import os
import sys

from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Context

from client_apps.app import TaskClient
from client_apps.tasks import build
from experiments import engine
from experiments.config import check, compose
from experiments.server_app import make_server_app


class LossyClient(TaskClient):
    def fit(self, ins):
        if self.cid % 4 == 1:
            raise RuntimeError(f"client {self.cid} lost its data")
        if self.cid == 2 and ins.config["server_round"] == 2:
            os._exit(1)
        return super().fit(ins)


def client_fn(context: Context) -> Client:
    return LossyClient(build(CFG), int(context.node_config["partition-id"]))


CFG = compose(
    [
        f"simulation={sys.argv[1]}",
        "num_clients=12",
        "clients_per_round=12",
        "num_rounds=3",
        "strategy.min_completed=2",
        "tracking.progress=false",
        f"output_dir={sys.argv[2]}",
    ]
)

if __name__ == "__main__":
    engine.run(CFG, make_server_app(CFG, check(CFG)), ClientApp(client_fn=client_fn))
