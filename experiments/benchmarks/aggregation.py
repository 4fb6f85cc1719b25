"""`python -m experiments.benchmarks.aggregation`: how time and extra memory grow with m and d, side by side.

For each model and number of clients m: Flower's own FedAvg, one read of the updates' bytes (the bandwidth
floor), FedAvg, FedAvgM and CRAFT, on the same results; `field` has every other strategy. Ratios come from
alternating repetitions in one process, so a machine that slows down slows all sides. Extra memory is the growth
of the peak resident set during one call.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import flwr.server.strategy
import numpy as np
import torch
from flwr.common import Code, FitRes, Parameters, Scalar, Status, ndarrays_to_parameters
from flwr.server.client_proxy import ClientProxy
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from client_apps import models
from strategies import CRAFT, FedAvg, FedAvgM, LayerMap, UpdateStrategy
from strategies.solvers import craft

from .cells import machine_memory

Results = list[tuple[ClientProxy, FitRes]]
Row = dict[str, Any]

SCALING: dict[str, Callable[..., UpdateStrategy]] = {"FedAvg": FedAvg, "FedAvgM": FedAvgM, "CRAFT": CRAFT}
"""What is measured over m and d."""

FLOWER, FLOOR = "Flower FedAvg", "one read"

MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "mlp-small": ({"name": "mlp", "hidden": [100, 32]}, {"channels": 1, "side": 8, "num_classes": 10}),
    "mlp": ({"name": "mlp", "hidden": [200, 200]}, {"channels": 1, "side": 28, "num_classes": 62}),
    "resnet20": ({"name": "resnet", "depth": 20, "norm": "group"}, {"channels": 3, "side": 32, "num_classes": 10}),
    "mlp-wide": ({"name": "mlp", "hidden": [1000, 960]}, {"channels": 1, "side": 28, "num_classes": 62}),
    # As many parameters as a ResNet-18, in 60 layers.
    "mlp-deep": ({"name": "mlp", "hidden": [430] * 59}, {"channels": 1, "side": 21, "num_classes": 62}),
}
CLIENTS = (10, 30, 100, 300, 1000)

FIELDS = ("section", "model", "d", "m", "device", "who", "seconds", "ratio", "repeats", "updates_mb", "extra_mb",
          "of_updates", "skipped")  # fmt: skip
"""Columns of a row. `ratio` is to Flower's FedAvg, or to our solve in the section "solve"; MB are 10^6 bytes."""


class _Client(ClientProxy):
    """A client that is only an id."""

    def _absent(self, *_: Any) -> Any:
        raise ValueError("this client exists only as a result")

    get_properties = get_parameters = fit = evaluate = reconnect = _absent  # type: ignore[assignment]


def make_model(name: str) -> nn.Module:
    """Build one of `MODELS`."""
    config, data = MODELS[name]
    return models.build(config, **data)


def make_round(name: str, m: int, seed: int = 0) -> tuple[LayerMap, Parameters, Results]:
    """Make a global model and `m` clients' results near it; float32, about 1e-2 away, with what methods ask for."""
    torch.manual_seed(seed)
    module = make_model(name)
    start = [t.numpy() for t in module.state_dict().values()]
    rng = np.random.default_rng(seed)
    results: Results = []
    for i in range(m):
        arrays = [a + np.float32(1e-2) * rng.standard_normal(a.shape, dtype=np.float32) for a in start]
        parameters = ndarrays_to_parameters(arrays)
        steps = 5 + i % 6
        metrics: dict[str, Scalar] = {
            "initial_loss": rng.uniform(1, 3),
            "step_weight": float(steps),
            "local_steps": steps,
        }
        results.append((_Client(str(i)), FitRes(Status(Code.OK, ""), parameters, 10 + i, metrics)))
    return LayerMap.from_module(module), ndarrays_to_parameters(start), results


def flower_fedavg() -> flwr.server.strategy.FedAvg:
    """Flower's own FedAvg; the function spares it a warning."""
    return flwr.server.strategy.FedAvg(fit_metrics_aggregation_fn=lambda _: {})


def alternate(
    calls: Mapping[str, Callable[[], object]], repeats: int, budget: float, *, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, run in turn after the warm-ups: `repeats` times, or until `budget` seconds are spent."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for repeat in range(warm_ups + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= warm_ups:
                times[name].append(time.perf_counter() - start)
        if repeat >= warm_ups and time.perf_counter() - began > budget:
            break
    return times


def solve_against_pinv(m: int, repeats: int, device: str) -> list[Row]:
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

    calls: dict[str, Callable[[], object]] = {
        "CRAFT's solve, float64": ours,
        "torch.linalg.pinv, float32": lambda: pinv(torch.float32),
        "torch.linalg.pinv, float64": lambda: pinv(torch.float64),
    }
    times = alternate(calls, repeats, budget=30)
    what = {"section": "solve", "model": "resnet20", "d": layers.size, "m": m, "device": device}
    return _timed(what, times)


def _timed(what: Row, times: Mapping[str, list[float]]) -> list[Row]:
    """One row per call; ratios to the first."""
    medians = {who: statistics.median(seconds) for who, seconds in times.items()}
    base = next(iter(medians.values()))
    return [
        {**what, "who": who, "seconds": s, "ratio": s / base, "repeats": len(times[who])} for who, s in medians.items()
    ]


def measure(model: str, m: int, repeats: int, budget: float = 10.0) -> list[Row]:
    """Measure one round of `model` and `m` clients in this process, which should be a fresh one."""
    layers, start, results = make_round(model, m)
    received = size_of(layers) * m

    def make(who: str, device: str = "cpu") -> Any:
        return (
            flower_fedavg() if who == FLOWER else SCALING[who](layers=layers, initial_parameters=start, device=device)
        )

    extra = {who: extra_memory(lambda who=who: make(who), results) for who in (FLOWER, *SCALING)}  # type: ignore[misc]
    rows: list[Row] = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        calls: dict[str, Callable[[], object]] = {}
        for who in (FLOWER, FLOOR, *SCALING):
            if who == FLOOR:
                calls[who] = lambda: read_all(results)
                continue
            strategy = make(who, device)
            strategy.aggregate_fit(1, results, [])  # so that every method has its memory
            calls[who] = lambda s=strategy: s.aggregate_fit(2, results, [])  # type: ignore[misc]
        what = {"section": "aggregate", "model": model, "d": layers.size, "m": m, "device": device,
                "updates_mb": received / 1e6}  # fmt: skip
        rows += _timed(what, alternate(calls, repeats, budget))
    for row in rows:
        if row["device"] == "cpu" and row["who"] in extra:
            row["extra_mb"] = extra[row["who"]] / 1e6
            row["of_updates"] = extra[row["who"]] / received
    return rows


def size_of(layers: LayerMap) -> int:
    """Bytes of one client's float32 update."""
    return 4 * layers.size


def read_all(results: Results) -> float:
    """Read every byte once: the bandwidth floor of any aggregation."""
    return sum(
        float(np.frombuffer(t, np.uint8, count=len(t) // 8 * 8).view(np.uint64).max())
        for _, r in results
        for t in r.parameters.tensors
    )


def extra_memory(make: Callable[[], Any], results: Results) -> int:
    """Bytes by which the peak resident set grows during one `aggregate_fit` of a fresh strategy."""
    make().aggregate_fit(1, results, [])  # libraries load and make their buffers on first use
    strategy = make()
    return peak_growth(lambda: strategy.aggregate_fit(1, results, []))


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the peak resident set grows during a call."""
    _release()  # what earlier calls have freed goes back, or it would hide what this one takes
    reset_peak()
    before = peak_resident()
    call()
    return peak_resident() - before


def _release() -> None:
    """Return freed memory to the system (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> None:
    """Set the peak back to what is resident now, so that earlier peaks do not hide the call's (Linux)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def peak_resident() -> int:
    """Peak resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def run(
    names: Sequence[str] = tuple(MODELS),
    clients: Sequence[int] = CLIENTS,
    *,
    repeats: int = 5,
    max_gb: float = 3.0,
    solve_clients: int = 100,
    report: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Measure every model with every number of clients, and CRAFT's solve against pseudo-inverses.

    Parameters
    ----------
    names : sequence of str
        Keys of `MODELS`.
    clients : sequence of int
        Numbers of clients m.
    repeats : int
        Alternating repetitions of each call; fewer, at least one, where they take more than 10 s.
    max_gb : float
        Rounds whose updates take more GB than this are skipped, and say so in their row.
    solve_clients : int
        m of the solves.
    report : callable
        Called with a line of text as each measurement starts.

    Returns
    -------
    list of dict
        Rows with the keys of `FIELDS`, those that apply.
    """
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    for name in names:
        layers = LayerMap.from_module(make_model(name))
        for m in clients:
            gb = size_of(layers) * m / 1e9
            if gb > max_gb:
                rows.append({
                    "section": "aggregate", "model": name, "d": layers.size, "m": m, "updates_mb": gb * 1e3,
                    "skipped": f"updates of {gb:.1f} GB exceed {max_gb:g} GB",
                })  # fmt: skip
                continue
            report(f"{name}, m={m}")
            # A process each: what one round leaves in the heap must not hide what the next one takes.
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                rows += pool.submit(measure, name, m, repeats).result()
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        report(f"solve against pinv, m={solve_clients}, {device}")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows += pool.submit(solve_against_pinv, solve_clients, repeats, device).result()
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """One line per round and device: every strategy's time as a ratio to Flower's FedAvg, and its extra memory."""
    rounds = Table(title="aggregate_fit: seconds (of ours: over Flower's) and extra memory over the updates",
                   box=box.SIMPLE, padding=(0, 1, 0, 0))  # fmt: skip
    for name in ("model", "d", "m", FLOWER, FLOOR, *SCALING):
        rounds.add_column(name, overflow="fold", justify="left" if name == "model" else "right")
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["section"] == "aggregate":
            key = (row["model"], row["d"], row["m"], row.get("device", ""))
            cells.setdefault(key, {})[row.get("who", "skipped")] = row
    for (model, d, m, device), found in cells.items():
        line = [model, f"{d:.1e}", f"{m} {device}" if device == "cuda" else f"{m}"]
        if "skipped" in found:
            rounds.add_row(*line, "skipped", *[""] * (1 + len(SCALING)))
            rounds.caption = f"skipped: {found['skipped']['skipped'].replace('updates of', 'the updates, e.g.')}"
            continue
        flower = f"{found[FLOWER]['seconds']:.3f} {_share(found[FLOWER])}"
        ours = [f"{found[who]['ratio']:.2f} {_share(found[who])}" for who in SCALING]
        rounds.add_row(*line, flower, f"{found[FLOOR]['ratio']:.3f}", *ours)
    solves = Table("m", "device", "who", "seconds", "ratio", title="CRAFT's solve, all layers of a ResNet-20")
    for row in rows:
        if row["section"] == "solve":
            solves.add_row(str(row["m"]), row["device"], row["who"], f"{row['seconds']:.3g}", f"{row['ratio']:.2f}")
    return [rounds, solves]


def _share(row: Row) -> str:
    return f"{row['of_updates']:4.0%}" if "of_updates" in row else ""


def figure_of(rows: Sequence[Row]) -> Figure:
    """Seconds and extra memory against m, a column of panels per model; the CPU only."""
    names = list(dict.fromkeys(row["model"] for row in rows if row["section"] == "aggregate"))
    figure = Figure(figsize=(3.2 * len(names) + 0.8, 6.4), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for column, name in enumerate(names):
        cells = [row for row in rows if row["section"] == "aggregate" and row["model"] == name]
        skipped = [row["m"] for row in cells if row.get("skipped")]
        title = f"{name}, d = {cells[0]['d']:.2g}"
        axes[0, column].set_title(f"{title}\nskipped: m = {', '.join(map(str, skipped))}" if skipped else title)
        for index, who in enumerate((FLOOR, FLOWER, *SCALING)):
            style = _style(index)
            points = [row for row in cells if row.get("who") == who and row["device"] == "cpu"]
            (handles[who],) = axes[0, column].plot([r["m"] for r in points], [r["seconds"] for r in points], **style)
            points = [row for row in points if "of_updates" in row]
            axes[1, column].plot([r["m"] for r in points], [max(r["of_updates"], 1e-3) for r in points], **style)
        for panel in axes[:, column]:
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3)
        axes[1, column].set_xlabel("clients m")
    axes[0, 0].set_ylabel("aggregate_fit, seconds")
    axes[1, 0].set_ylabel("extra memory / updates")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _style(index: int) -> dict[str, Any]:
    """Grey for the floor, black for Flower, Okabe and Ito's colours for ours; markers tell lines that coincide."""
    if index < 2:
        return {"color": ("0.5", "black")[index], "linestyle": (":", "--")[index], "marker": "."}
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    own = index - 2
    return {"color": colours[own % len(colours)], "marker": "s^oDvxP"[own % 7], "markersize": (6, 4)[own % 2]}


def save(rows: Sequence[Row], out: Path) -> None:
    """Write aggregation.csv, aggregation.png and machine.json into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    (out / "aggregation.csv").write_text(text.getvalue())
    figure_of(rows).savefig(out / "aggregation.png", dpi=150)
    machine = {"cpus": os.cpu_count(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    (out / "machine.json").write_text(json.dumps(machine))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and save a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small rounds only, about a minute")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all")
    parser.add_argument("--clients", type=int, nargs="+", metavar="M", help=f"default: {CLIENTS}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--max-gb", type=float, default=0.2 * machine_memory() / 2**30,
        help="skip rounds whose updates take more than this; default: a fifth of the memory",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args(argv)
    names = args.models or (["mlp-small", "mlp", "resnet20"] if args.quick else list(MODELS))
    clients = args.clients or ([10, 100] if args.quick else list(CLIENTS))
    console = Console()
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, medians of up to {args.repeats} repetitions"
    )
    rows = run(
        names, clients, repeats=args.repeats, max_gb=args.max_gb, solve_clients=min(100, max(clients)),
        report=console.print,
    )  # fmt: skip
    for table in tables(rows):
        console.print(table)
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
