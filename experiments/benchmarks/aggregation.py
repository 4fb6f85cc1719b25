"""`python -m experiments.benchmarks.aggregation`: time and extra memory of an aggregation, side by side.

Every ratio comes from alternating repetitions in one process, so a machine that slows down slows both sides.
Extra memory is the growth of the process's peak resident set during one call, each call in a fresh process.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import io
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flwr.server.strategy
import numpy as np
import torch
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.server.client_proxy import ClientProxy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from client_apps import models
from strategies import CRAFT, FedAvg, FedAvgM, LayerMap, UpdateStrategy
from strategies.solvers import craft

Results = list[tuple[ClientProxy, FitRes]]

STRATEGIES: dict[str, Callable[..., UpdateStrategy]] = {"FedAvg": FedAvg, "FedAvgM": FedAvgM, "CRAFT": CRAFT}
"""What is measured; a new strategy joins by a line."""


class _Client(ClientProxy):
    """A client that is only an id."""

    def _absent(self, *_: Any) -> Any:
        raise ValueError("this client exists only as a result")

    get_properties = get_parameters = fit = evaluate = reconnect = _absent  # type: ignore[assignment]


def make_model(name: str) -> nn.Module:
    """Build the MLP 784-200-200-62 or a ResNet-20 with GroupNorm."""
    if name == "mlp":
        return models.build({"name": "mlp", "hidden": [200, 200]}, channels=1, side=28, num_classes=62)
    return models.build({"name": "resnet", "depth": 20, "norm": "group"}, channels=3, side=32, num_classes=10)


def make_round(name: str, m: int, seed: int = 0) -> tuple[LayerMap, Parameters, Results]:
    """Make a global model and `m` clients' results near it; float32, about 1e-2 away."""
    torch.manual_seed(seed)
    module = make_model(name)
    start = [t.numpy() for t in module.state_dict().values()]
    rng = np.random.default_rng(seed)
    results: Results = []
    for i in range(m):
        arrays = [a + rng.normal(scale=1e-2, size=a.shape).astype(np.float32) for a in start]
        parameters = ndarrays_to_parameters(arrays)
        results.append((_Client(str(i)), FitRes(Status(Code.OK, ""), parameters, 10 + i, {})))
    return LayerMap.from_module(module), ndarrays_to_parameters(start), results


def flower_fedavg() -> flwr.server.strategy.FedAvg:
    """Flower's own FedAvg; the function spares it a warning."""
    return flwr.server.strategy.FedAvg(fit_metrics_aggregation_fn=lambda _: {})


def alternate(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each call, run in turn `repeats` times after one warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, seconds in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if repeat:
                seconds.append(time.perf_counter() - began)
    return [statistics.median(s) for s in times]


def solve_against_pinv(m: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """Layer-wise CRAFT solves of a ResNet-20 round against `torch.linalg.pinv` of each layer's U."""
    layers, _, _ = make_round("resnet20", 1)
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(m, layer.size, generator=generator).to(device) for layer in layers.layers]
    rho = torch.full((m,), 1 / m, device=device)

    def ours() -> list[Tensor]:
        out = [craft.solve(block, rho).direction for block in blocks]
        _synchronise(device)
        return out

    def pinv(dtype: torch.dtype) -> list[Tensor]:
        out = []
        for block in blocks:
            U = block.to(dtype)
            U = U / U.norm(dim=1, keepdim=True)
            out.append(torch.linalg.pinv(U) @ rho.to(dtype))
        _synchronise(device)
        return out

    seconds = alternate([ours, lambda: pinv(torch.float32), lambda: pinv(torch.float64)], repeats)
    names = ("Gram + eigh, float64 (ours)", "torch.linalg.pinv, float32", "torch.linalg.pinv, float64")
    return [
        {"what": f"solve of {len(blocks)} layers, m={m}, d={layers.size}, {device}", "who": who, "seconds": s,
         "ratio": s / seconds[0]}
        for who, s in zip(names, seconds, strict=True)
    ]  # fmt: skip


def aggregate_time(model: str, m: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """Time `aggregate_fit` of each strategy against Flower's FedAvg on the same results."""
    layers, start, results = make_round(model, m)
    theirs = flower_fedavg()
    calls: list[Callable[[], object]] = [lambda: theirs.aggregate_fit(2, results, []), lambda: read_all(results)]
    for make in STRATEGIES.values():
        strategy = make(layers=layers, initial_parameters=start, device=device)
        strategy.aggregate_fit(1, results, [])  # so that every method has its memory
        calls.append(lambda s=strategy: s.aggregate_fit(2, results, []))  # type: ignore[misc]
    seconds = alternate(calls, repeats)
    names = ("Flower FedAvg", "one read of the updates", *STRATEGIES)
    return [
        {"what": f"aggregate_fit, {model}, m={m}, d={layers.size}, {device}", "who": who, "seconds": s,
         "ratio": s / seconds[0]}
        for who, s in zip(names, seconds, strict=True)
    ]  # fmt: skip


def read_all(results: Results) -> float:
    """Read every byte once: the bandwidth floor of any aggregation."""
    return sum(
        float(np.frombuffer(t, np.uint8, count=len(t) // 8 * 8).view(np.uint64).max())
        for _, r in results
        for t in r.parameters.tensors
    )


def aggregate_memory(model: str, m: int) -> list[dict[str, Any]]:
    """Peak extra memory of one `aggregate_fit`, each strategy in a process of its own."""
    rows = []
    for who in ("Flower FedAvg", *STRATEGIES):
        context = multiprocessing.get_context("spawn")
        queue: Any = context.Queue()
        process = context.Process(target=_measure, args=(queue, model, m, who))
        process.start()
        extra, received, block, size = queue.get(timeout=600)
        process.join()
        rows.append({
            "what": f"extra memory, {model}, m={m}, d={size}", "who": who, "mb": extra / 2**20,
            "of_updates": extra / received, "of_block": extra / block,
        })  # fmt: skip
    return rows


def _measure(queue: Any, model: str, m: int, who: str) -> None:
    layers, start, results = make_round(model, m)
    received = sum(len(t) for _, r in results for t in r.parameters.tensors)

    def make() -> Any:
        return flower_fedavg() if who == "Flower FedAvg" else STRATEGIES[who](layers=layers, initial_parameters=start)

    make().aggregate_fit(1, results, [])  # libraries load and make their buffers on first use
    strategy = make()
    _release()  # what that call has freed goes back, or it would hide what the next one takes
    _reset_peak()
    before = _peak()
    strategy.aggregate_fit(1, results, [])
    block = m * max(layer.size for layer in layers.layers) * 8
    queue.put((_peak() - before, received, block, layers.size))


def _release() -> None:
    """Return freed memory to the system (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> None:
    """Set the peak back to what is resident now, so that earlier peaks do not hide the call's (Linux)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def _peak() -> int:
    """Peak resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and save a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[100])
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args(argv)
    console = Console()
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {args.repeats} repetitions, medians"
    )
    rows: list[dict[str, Any]] = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for m in args.clients:
        for device in devices:
            rows += solve_against_pinv(m, max(1, args.repeats // 2), device)
            rows += aggregate_time("resnet20", m, args.repeats, device)
            rows += aggregate_time("mlp", m, args.repeats, device)
        rows += aggregate_memory("resnet20", m)
        rows += aggregate_memory("mlp", m)
    table = Table("what", "who", "seconds", "ratio", "extra MB", "of the updates", "of the largest float64 block")
    for row in rows:
        table.add_row(
            row["what"], row["who"], _format(row.get("seconds"), ".4f"), _format(row.get("ratio"), ".2f"),
            _format(row.get("mb"), ".1f"), _format(row.get("of_updates"), ".1%"), _format(row.get("of_block"), ".2f"),
        )  # fmt: skip
    console.print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["what", "who", "seconds", "ratio", "mb", "of_updates", "of_block"])
    writer.writeheader()
    writer.writerows(rows)
    (args.out / "aggregation.csv").write_text(text.getvalue())
    (args.out / "machine.json").write_text(
        json.dumps({"cpus": os.cpu_count(), "torch": torch.__version__, "threads": torch.get_num_threads()})
    )
    console.print(f"saved in {args.out}")


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
