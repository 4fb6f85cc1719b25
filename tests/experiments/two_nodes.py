"""A digits run on a two-node Ray cluster on loopback, one node of which is killed: `python two_nodes.py ENGINE DIR`.

The node dies while clients of round 2 run on both nodes.
"""

import os
import sys
import threading
import time
from pathlib import Path

import ray
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Context
from ray.cluster_utils import Cluster

from client_apps.app import TaskClient
from client_apps.tasks import build
from experiments import engine
from experiments.config import check, compose
from experiments.server_app import make_server_app

CLIENTS = 12
ENGINE, FOLDER = sys.argv[1], Path(sys.argv[2])


def nodes_seen(number: int) -> int:
    """On how many nodes clients of a round have begun."""
    return len(list(FOLDER.glob(f"seen-{number}-*")))


class SlowClient(TaskClient):
    """Says on which node it begins each round, and takes its time."""

    def fit(self, ins):
        node = ray.get_runtime_context().get_node_id()
        (FOLDER / f"seen-{ins.config['server_round']}-{node}").touch()
        until = time.monotonic() + 120
        while ins.config["server_round"] == 1 and time.monotonic() < until and nodes_seen(1) < 2:
            time.sleep(0.05)  # until the second node's worker is up
        time.sleep(0.5)  # the work of a slow client, in which its node can die
        return super().fit(ins)


def client_fn(context: Context) -> Client:
    return SlowClient(build(CFG), int(context.node_config["partition-id"]))


CFG = compose(
    [
        f"simulation={ENGINE}",
        f"num_clients={CLIENTS}",
        f"clients_per_round={CLIENTS}",
        "num_rounds=3",
        "strategy.min_completed=1",
        "strategy.max_failed_rounds=3",
        "tracking.progress=false",
        f"output_dir={FOLDER / 'run'}",
    ]
)


def kill_one(cluster: Cluster, node) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if nodes_seen(2) == 2:
            cluster.remove_node(node, allow_graceful=False)
            (FOLDER / "killed").touch()
            return
        time.sleep(0.02)


def main() -> None:
    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    try:
        node = cluster.add_node(num_cpus=1, **memory)
        cluster.wait_for_nodes()
        CFG["simulation"]["address"] = cluster.address
        threading.Thread(target=kill_one, args=(cluster, node), daemon=True).start()
        engine.run(CFG, make_server_app(CFG, check(CFG)), ClientApp(client_fn=client_fn))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    main()
