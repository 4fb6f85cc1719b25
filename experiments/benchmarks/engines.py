"""`python -m experiments.benchmarks.engines`: what an engine costs a client, and how many clients a second train.

Overhead: clients that add one to what they receive, on Flower's simulation (both of its APIs), on our Ray grid, and
in a plain loop over the same client function. Training: whole rounds of FedAvg, on Flower's simulation, on the Ray
grid, in one process, and in a plain PyTorch loop in one process and in as many as there are workers.
Every cell runs in processes of its own, one cell after the other, so that memory is its own too.
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Parameters, ndarrays_to_parameters
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table

from client_apps import make_client_app
from client_apps.arrays import get_arrays
from client_apps.tasks import Task
from experiments.config import check, compose
from experiments.engine import VirtualGrid
from strategies import FedAvg, LayerMap, partition_order

from .cells import answer, cell, machine_memory, peak_memory, simulate

_MODULE = "experiments.benchmarks.engines"  # whatever name it runs under
# Floats of a payload of 40 bytes, of a ResNet-20 (1.08 MB), and of 6.9 MB.
PAYLOADS = {"40 B": 10, "1.08 MB": 270_000, "6.9 MB": 1_725_000}
_BARRIER = 600  # seconds; a process that died must not keep the others
WORKLOADS = {
    "digits": ["client.lr=0.1"],
    "W1": ["dataset=femnist", "model=mlp", "model.hidden=[200,200]", "client.lr=0.02"],
    "W2": ["dataset=cifar10", "model=resnet20", "dataset.max_samples=25", "client.lr=0.02"],
}
# Flower's own server holds about this many times the payload of a round; beyond the machine's memory a cell is skipped.
_STOCK_COPIES = 3.0


# ---- clients that do nothing -------------------------------------------------------------------------------------

message_app = ClientApp()


@message_app.train()
def add_one(message: Message, context: Context) -> Message:
    """Add one to every array."""
    arrays = [a + 1 for a in message.content["arrays"].to_numpy_ndarrays()]  # type: ignore[union-attr]
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


class _AddOne(NumPyClient):
    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        return [p + 1 for p in parameters], 1, {}


def _client(context: Context) -> Any:
    return _AddOne().to_client()


legacy_app = ClientApp(client_fn=_client)


class _Keep(FlowerFedAvg):
    """Times the exchange with the clients, and does not aggregate."""

    def __init__(self, clients: int, size: int, times: list[float]) -> None:
        start = ndarrays_to_parameters([np.zeros(size, np.float32)])
        super().__init__(
            min_fit_clients=clients, min_available_clients=clients, fraction_evaluate=0.0, min_evaluate_clients=0,
            initial_parameters=start,
        )  # fmt: skip
        self.times = times

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        client_manager.wait_for(self.min_available_clients)
        self.times.append(-time.perf_counter())
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.times[-1] += time.perf_counter()
        assert not failures
        assert len(results) == self.min_fit_clients
        return None, {}


def overhead(engine: str, api: str, clients: int, size: int, rounds: int) -> dict[str, Any]:
    """Seconds of a round of clients that add one, and the server's memory; the first round is left out."""
    times: list[float] = []
    if engine == "loop":
        with peak_memory() as memory:
            start = np.zeros(size, np.float32)
            for _ in range(rounds + 1):
                times.append(-time.perf_counter())
                replies = [_AddOne().fit([start], {}) for _ in range(clients)]
                times[-1] += time.perf_counter()
                del replies
        return _summary(times, clients, memory)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if api == "legacy":
            strategy = _Keep(clients, size, times)
            server = Server(client_manager=SimpleClientManager(), strategy=strategy)
            parts = ServerAppComponents(server=server, config=ServerConfig(num_rounds=rounds + 1))
            ServerApp(server_fn=lambda _: parts)(grid, context)
            return
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        arrays = ArrayRecord([np.zeros(size, np.float32)])
        for _ in range(rounds + 1):
            times.append(-time.perf_counter())
            nodes = grid.get_node_ids()
            replies = list(grid.send_and_receive([Message(RecordDict({"arrays": arrays}), n, "train") for n in nodes]))
            times[-1] += time.perf_counter()
            assert len(replies) == clients
            assert not any(reply.has_error() for reply in replies)
            del replies

    store = int(min(max(2.5 * clients * size * 4, 256 * 2**20), 0.25 * machine_memory()))
    with peak_memory() as memory:
        simulate(engine, app, legacy_app if api == "legacy" else message_app, clients, store)
    return _summary(times, clients, memory)


# ---- training ----------------------------------------------------------------------------------------------------


def training(
    engine: str,
    workload: str,
    per_round: int,
    rounds: int,
    data_dir: str,
    *,
    vectorize: Any = "auto",
    gpus: float = 0.0,
) -> dict[str, Any]:
    """Seconds of a round of FedAvg over 1000 clients of about 14 or 20 samples; the first round is left out."""
    cfg = compose([
        *WORKLOADS[workload], f"data_dir={data_dir}", "num_clients=1000", "dataset.partition.kind=iid",
        "client.batch_size=20", f"clients_per_round={per_round}", "strategy=fedavg", f"client.vectorize={vectorize}",
        f"client.device={'cuda' if gpus else 'cpu'}",
    ])  # fmt: skip
    task = check(cfg)
    times: list[float] = []
    if engine.startswith("loop"):
        with peak_memory() as memory:
            loop(task, cfg, per_round, rounds + 1, int(engine.removeprefix("loop")), times)
        return _summary(times, per_round, memory)

    class Timed(FedAvg):
        def configure_fit(self, *given: Any, **named: Any) -> Any:
            times.append(-time.perf_counter())
            return super().configure_fit(*given, **named)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            assert len(results) == per_round
            result = super().aggregate_fit(server_round, results, failures)
            results.clear()
            times[-1] += time.perf_counter()
            return result

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = task.new_model()
        strategy = Timed(
            layers=LayerMap.from_module(model), initial_parameters=ndarrays_to_parameters(get_arrays(model)),
            fraction_fit=0.0, min_fit_clients=per_round, min_available_clients=1000, fraction_evaluate=0.0,
            min_evaluate_clients=0, partition_order=partition_order if not isinstance(grid, VirtualGrid) else None,
        )  # fmt: skip
        server = Server(client_manager=SimpleClientManager(), strategy=strategy)
        if isinstance(grid, VirtualGrid):
            grid.lends_views = True
        parts = ServerAppComponents(server=server, config=ServerConfig(num_rounds=rounds + 1))
        ServerApp(server_fn=lambda _: parts)(grid, context)

    with peak_memory() as memory:
        simulate(engine, app, make_client_app(cfg), 1000, 2 * 2**30, gpus)
    return _summary(times, per_round, memory)


def loop(task: Task, cfg: dict[str, Any], per_round: int, rounds: int, processes: int, times: list[float]) -> None:
    """FedAvg without any framework: load the global weights, local SGD, add up; processes share nothing but sums."""
    torch.set_num_threads(1)
    data = [_tensors(task, cid) for cid in range(task.num_clients)]
    model = task.new_model()
    weights = [p.detach().clone() for p in model.parameters()]
    sums = [[torch.zeros_like(w) for w in weights] for _ in range(processes)]
    for tensor in (*weights, *(s for each in sums for s in each)):
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    rng = np.random.default_rng(1)
    cohorts = [rng.choice(task.num_clients, per_round, replace=False).tolist() for _ in range(rounds)]
    context = multiprocessing.get_context("fork")
    go, done = context.Barrier(processes), context.Barrier(processes)
    total = sum(len(data[c][1]) for c in cohorts[0])

    def work(rank: int) -> None:
        parameters = list(model.parameters())
        for cohort in cohorts:
            go.wait(_BARRIER)
            if rank == 0:
                times.append(-time.perf_counter())
            for each in sums[rank]:
                each.zero_()
            for cid in cohort[rank::processes]:
                images, labels = data[cid]
                with torch.no_grad():
                    for p, w in zip(parameters, weights, strict=True):
                        p.copy_(w)
                order = torch.randperm(len(labels))
                for batch in torch.split(order, cfg["client"]["batch_size"]):
                    loss = F.cross_entropy(model(images[batch]), labels[batch])
                    gradients = torch.autograd.grad(loss, parameters)
                    with torch.no_grad():
                        for p, g in zip(parameters, gradients, strict=True):
                            p.add_(g, alpha=-cfg["client"]["lr"])
                with torch.no_grad():
                    for s, p in zip(sums[rank], parameters, strict=True):
                        s.add_(p, alpha=len(labels) / total)
            done.wait(_BARRIER)
            if rank == 0:
                for i, w in enumerate(weights):
                    w.copy_(torch.stack([s[i] for s in sums]).sum(0))
                times[-1] += time.perf_counter()

    helpers = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(1, processes)]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()


def _tensors(task: Any, cid: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = task._tensors(task._split(cid).train)
    return task._normalise(images), labels


def _summary(times: Sequence[float], clients: int, memory: dict[str, float]) -> dict[str, Any]:
    seconds = statistics.median(times[1:])
    return {
        "seconds": seconds, "ms_per_client": 1e3 * seconds / clients, "clients_per_s": clients / seconds,
        "rounds": len(times) - 1, **{k: round(v, 1) for k, v in memory.items()},
    }  # fmt: skip


# ---- the whole ---------------------------------------------------------------------------------------------------


def run(
    *, sizes: Sequence[int] = (100, 1000), payloads: Sequence[str] = tuple(PAYLOADS), rounds: int = 3,
    data_dir: str | None = None, progress: Callable[[str], None] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure every cell and return rows; training needs real data."""
    rows: list[dict[str, Any]] = []

    def add(section: str, what: str, who: str, **given: Any) -> None:
        progress(f"{section}: {what}, {who} ...")
        rows.append({"section": section, "what": what, "engine": who, **cell(_MODULE, section, **given)})

    for name in payloads:
        for clients in sizes:
            what = f"{clients} clients x {name}"
            for engine, api in (("stock", "message"), ("stock", "legacy"), ("ray", "message"), ("ray", "legacy"),
                                ("loop", "")):  # fmt: skip
                if engine == "stock" and _STOCK_COPIES * clients * PAYLOADS[name] * 4 > 0.6 * machine_memory():
                    rows.append({"section": "overhead", "what": what, "engine": f"{engine} {api}",
                                 "note": "skipped: would not fit into this machine's memory"})  # fmt: skip
                    continue
                few = 1 if engine == "stock" and clients * PAYLOADS[name] > 1e8 else rounds
                add("overhead", what, f"{engine} {api}".strip(), engine=engine, api=api, clients=clients,
                    size=PAYLOADS[name], rounds=few)  # fmt: skip
    if data_dir is None:
        progress("training: skipped, as no data folder is given (--data-dir, or DATA_DIR)")
        return rows
    for workload, per_round in (("W1", 100), ("W1", 1000), ("W2", 100)):
        if per_round > max(sizes):
            continue
        cores = os.cpu_count() or 1
        engines: dict[str, dict[str, Any]] = {
            "stock": {}, "ray": {}, "serial": {}, **{f"loop{n}": {} for n in {1, cores}},
            # What training many clients at once is worth.
            "ray, one by one": {"vectorize": False}, "ray, at once": {"vectorize": True},
        }  # fmt: skip
        if torch.cuda.is_available():
            gpu = {"gpus": 1 / min(4, cores)}
            engines |= {
                "ray, GPU, one by one": {**gpu, "vectorize": False},
                "ray, GPU, at once": {**gpu, "vectorize": True},
            }
        for engine, options in engines.items():
            few = 2 if workload == "W2" or engine == "stock" else 4 * rounds
            add(
                "training", f"{workload}, {per_round} of 1000 clients a round", engine,
                engine=engine.partition(",")[0], workload=workload, per_round=per_round, rounds=few,
                data_dir=str(Path(data_dir).resolve()), **options,
            )  # fmt: skip
    return rows


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add how many times as fast a row is as Flower's simulation through the same API, else through its faster one."""
    for row in rows:
        stock = [
            r for r in rows if (r["section"], r["what"]) == (row["section"], row["what"])
            and r["engine"].startswith("stock") and "seconds" in r
        ]  # fmt: skip
        same = [r for r in stock if r["engine"].partition(" ")[2] == row["engine"].partition(" ")[2]]
        if stock and "seconds" in row:
            row["ratio"] = min(r["seconds"] for r in same or stock) / row["seconds"]


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Make a table of each section, with ratios to Flower's simulation."""
    made = []
    for section in ("overhead", "training"):
        table = Table(
            "what", "engine", "ms a client", "clients/s", "x stock", "server: own MB", "shared", "peak",
            title=section,
        )  # fmt: skip
        for row in (r for r in rows if r["section"] == section):
            if "seconds" not in row:
                table.add_row(row["what"], row["engine"], row["note"][-80:])
                continue
            ratio = f"{row['ratio']:.1f}" if "ratio" in row else ""
            table.add_row(row["what"], row["engine"], f"{row['ms_per_client']:.3f}", f"{row['clients_per_s']:.0f}",
                          ratio, f"{row['own_mb']:.0f}", f"{row['shared_mb']:.0f}", f"{row['all_mb']:.0f}")  # fmt: skip
        if table.row_count:
            made.append(table)
    return made


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw milliseconds a client, and clients a second, by engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sections = [s for s in ("overhead", "training") if any(r["section"] == s and "seconds" in r for r in rows)]
    figure, axes = plt.subplots(1, max(len(sections), 1), figsize=(7.5 * max(len(sections), 1), 5), squeeze=False)
    for axis, section in zip(axes[0], sections, strict=False):
        mine = [r for r in rows if r["section"] == section]
        whats, engines = list(dict.fromkeys(r["what"] for r in mine)), list(dict.fromkeys(r["engine"] for r in mine))
        key = "ms_per_client" if section == "overhead" else "clients_per_s"
        for i, engine in enumerate(engines):
            found = {r["what"]: r[key] for r in mine if r["engine"] == engine and key in r}
            at = [whats.index(w) + (i - (len(engines) - 1) / 2) * 0.8 / len(engines) for w in found]
            axis.bar(at, list(found.values()), 0.8 / len(engines), label=engine)
        axis.set_xticks(range(len(whats)), [w.replace(" x ", "\n").replace(", ", "\n", 1) for w in whats], fontsize=8)
        axis.set_yscale("log")
        axis.set_ylabel("milliseconds a client" if section == "overhead" else "clients trained a second")
        axis.set_title("Clients that do nothing" if section == "overhead" else "Whole FedAvg rounds")
        axis.set_ylim(top=8 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=8, ncols=4, loc="upper center")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write engines.csv and engines.png."""
    out.mkdir(parents=True, exist_ok=True)
    keys = ["section", "what", "engine", "seconds", "ms_per_client", "clients_per_s", "ratio", "rounds", "own_mb",
            "shared_mb", "all_mb", "note"]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, keys)
    writer.writeheader()
    writer.writerows(rows)
    (out / "engines.csv").write_text(text.getvalue())
    plot(rows, out / "engines.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 clients, the two small payloads")
    parser.add_argument("--only", choices=("overhead", "training"))
    parser.add_argument("--data-dir", default=os.environ.get("DATA_DIR"), help="real data for the training section")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        answer(args.cell, overhead=overhead, training=training)
        return
    console = Console()
    rows = run(
        sizes=(100,) if args.quick else (100, 1000),
        payloads=() if args.only == "training" else list(PAYLOADS)[:2] if args.quick else tuple(PAYLOADS),
        data_dir=None if args.only == "overhead" else args.data_dir,
        progress=console.print,
    )
    add_ratios(rows)
    for table in tables(rows):
        console.print(table)
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
