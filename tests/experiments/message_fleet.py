"""`python -m tests.experiments.message_fleet FOLDER`: a ServerApp of one's own on a SuperLink, killed and resumed.

An app of Flower's message API, whose server side is `MessageStrategy(Checkpointed(FedAvgM()))`, runs on a SuperLink and
two SuperNodes on loopback. Its ServerApp is killed (kill -9) after the first checkpoint, and the app submitted again.
"""

import io
import os
import signal
import sys
import time
from pathlib import Path

from experiments.processes import ProcessTree, free_port, wait_for
from experiments.submit import Flower, program, quiet, wait_until_serving

NODES, ROUNDS, SECONDS = 2, 4, 300

PROJECT = """\
[project]
name = "message-fleet"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.42"]

[tool.flwr.app]
publisher = "tests"
fab-format-version = 1
flwr-version-target = "1.42.0"

[tool.flwr.app.components]
serverapp = "ownapp.server:app"
clientapp = "ownapp.client:app"

[tool.flwr.app.config]
folder = ""
"""
SERVER = f"""\
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from strategies import Checkpointed, FedAvgM, MessageStrategy

app = ServerApp()


def serve(grid, folder):
    sampling = dict(min_available_clients={NODES}, fraction_evaluate=0.0, device="cpu")
    strategy = Checkpointed(FedAvgM(**sampling), folder, every=1, keep={ROUNDS}, num_rounds={ROUNDS}, resume="auto")
    start = ArrayRecord({{"layer.weight": Array(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))}})
    return MessageStrategy(strategy).start(grid, start, num_rounds={ROUNDS} - strategy.rounds_done, timeout=120)


@app.main()
def main(grid, context):
    serve(grid, context.run_config["folder"])
"""
CLIENT = """\
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    partition, number = context.node_config["partition-id"], message.content["config"]["server-round"]
    drift = np.random.default_rng([partition, number])
    moved = {
        name: Array((a.numpy() + drift.normal(size=a.shape)).astype(np.float32))
        for name, a in message.content["arrays"].items()
    }
    metrics = MetricRecord({"num-examples": 10 + partition, "train_loss": 1.0 / number, f"only-{partition}": 1.0})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)
"""


def write(app: Path) -> None:
    """Write the app."""
    (app / "ownapp").mkdir(parents=True)
    files = {
        "pyproject.toml": PROJECT,
        "LICENSE": "Apache-2.0",
        "ownapp/__init__.py": "",
        "ownapp/server.py": SERVER,
        "ownapp/client.py": CLIENT,
    }
    for name, text in files.items():
        (app / name).write_text(text)


def main(folder: Path) -> int:
    app, home, saved = folder / "app", folder / "flwr", folder / "checkpoints"
    write(app)
    home.mkdir()
    with ProcessTree() as tree:
        port = free_port()
        (home / "config.toml").write_text(f'[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
        flower, environment = Flower(tree, "own", home), quiet(home)
        log = folder / "superlink.log"
        process = tree.start(
            [program("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port),
             "--disable-runtime-dependency-installation"],
            log=log, cwd=folder, environment=environment,
        )  # fmt: skip
        wait_until_serving(process, log, port)
        for number in range(NODES):
            tree.start(
                [program("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}", "--node-config",
                 f"partition-id={number} num-partitions={NODES}", "--port", str(free_port())],
                log=folder / f"node-{number}.log", cwd=folder, environment=environment,
            )  # fmt: skip
        words = [f'folder="{saved}"']
        flower.run(str(app), words)
        wait_for((saved / "round-000001").exists, SECONDS, "the first checkpoint was not written", interval=0.05)
        killed = [pid for pid in tree.alive() if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        there = sorted(path.name for path in saved.glob("round-*"))
        sys.stdout.write(f"killed {len(killed)} with {there}\n")
        out = io.StringIO()
        status, reason = flower.follow(flower.run(str(app), words), out, timeout=SECONDS)
        sys.stdout.write(f"{out.getvalue()}\n{status} {reason}\n")
    return 0 if status == "finished:completed" else 1


if __name__ == "__main__":
    began = time.monotonic()
    code = main(Path(sys.argv[1]))
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")
    sys.exit(code)
