"""`python -m experiments.benchmarks.growth`: how the cost of a round grows, fitted, and carried on to larger ones.

One quantity grows at a time, over two decades: registered clients N, clients a round m, parameters d, layers. Clients
add noise of their own to what they receive, so that the engine and the solve are measured, not training. Each cost is
fitted by a power law a·x^b over the upper decade, where fixed costs no longer hide the growth.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table

from experiments.engine import VirtualGrid
from strategies import CRAFT

from .cells import answer, cell, peak_memory, simulate

_MODULE = "experiments.benchmarks.growth"  # whatever name it runs under
BASE = {"registered": 1000, "cohort": 30, "parameters": 270_000, "layers": 22}
SERIES = {
    "registered": (100, 300, 1000, 3000, 10_000),
    "cohort": (10, 30, 100, 300, 1000),
    "parameters": (30_000, 100_000, 300_000, 1_000_000, 3_000_000),
    "layers": (3, 10, 30, 100, 300),
}
COSTS = {
    "exchange": "seconds of the exchange with the clients",
    "aggregate": "seconds of CRAFT's aggregate_fit",
    "rest": "seconds of sampling and all else",
    "setup": "seconds from the ServerApp's start to the first instructions",
    "all_mb": "MB the server takes",
}

app = ClientApp()


@app.train()
def add_noise(message: Message, context: Context) -> Message:
    """Add this client's noise to every array; speaks the legacy server's language."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    received = message.content["fitins.parameters"].to_numpy_ndarrays()  # type: ignore[union-attr]
    arrays = [a + rng.standard_normal(a.shape, np.float32) for a in received]
    content = RecordDict({
        "fitres.parameters": ArrayRecord(arrays),
        "fitres.num_examples": MetricRecord({"num_examples": 10}),
        "fitres.metrics": ConfigRecord(),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    })  # fmt: skip
    return Message(content, reply_to=message)


def measure(registered: int, cohort: int, parameters: int, layers: int, rounds: int = 3) -> dict[str, Any]:
    """Costs of a round, in the median over rounds after the first."""
    seen: dict[str, list[float]] = {"exchange": [], "aggregate": [], "rest": [], "setup": []}
    size = parameters // layers
    start = [np.zeros(size, np.float32) for _ in range(layers)]

    class Timed(CRAFT):
        mark = 0.0

        def configure_fit(self, *given: Any, **named: Any) -> Any:
            result = super().configure_fit(*given, **named)
            now = time.perf_counter()
            seen["setup" if not seen["setup"] else "rest"].append(now - self.mark)
            self.mark = now
            return result

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            began = time.perf_counter()
            seen["exchange"].append(began - self.mark)
            assert len(results) == cohort
            result = super().aggregate_fit(server_round, results, failures)
            results.clear()
            self.mark = time.perf_counter()
            seen["aggregate"].append(self.mark - began)
            return result

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        assert isinstance(grid, VirtualGrid)
        strategy = Timed(
            initial_parameters=ndarrays_to_parameters(start), fraction_fit=0.0, min_fit_clients=cohort,
            min_available_clients=registered, fraction_evaluate=0.0, min_evaluate_clients=0, server_lr=0.01,
        )  # fmt: skip
        strategy.mark = time.perf_counter()
        grid.lends_views = True
        inner = Server(client_manager=SimpleClientManager(), strategy=strategy)
        parts = ServerAppComponents(server=inner, config=ServerConfig(num_rounds=rounds + 1))
        ServerApp(server_fn=lambda _: parts)(grid, context)

    store = int(max(2.5 * cohort * parameters * 4, 256 * 2**20))
    with peak_memory() as memory:
        simulate("ray", server, app, registered, store)
    costs = {key: statistics.median(values[1:] or values) for key, values in seen.items()}
    return {**costs, **memory}


def run(
    *, series: dict[str, Sequence[int]] | None = None, progress: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Measure every point of every series."""
    rows = []
    for name, values in (series or SERIES).items():
        for value in values:
            progress(f"growth: {name} = {value}")
            given = {**BASE, name: value}
            given["registered"] = max(given["registered"], given["cohort"])
            rows.append({"series": name, "value": value, **cell(_MODULE, "measure", **given)})
    return rows


def fit(rows: Sequence[dict[str, Any]], series: str, cost: str) -> tuple[float, float] | None:
    """Fit a·x^b to the upper half of a series; None where the cost is too small to measure."""
    points = [(r["value"], r[cost]) for r in rows if r["series"] == series and r.get(cost, 0) > 0]
    points = points[len(points) // 2 :]
    if len(points) < 2:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    slope, intercept = np.polyfit(x, y, 1)
    return float(math.exp(intercept)), float(slope)


def table(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Make a table of each series, with the fitted exponents below."""
    made = []
    for name in dict.fromkeys(r["series"] for r in rows):
        t = Table(name, *COSTS.values(), title=f"growth with {name}")
        for r in (r for r in rows if r["series"] == name):
            t.add_row(str(r["value"]), *(r.get("note", "") if c not in r else f"{r[c]:.4g}" for c in COSTS))
        fits = [fit(rows, name, c) for c in COSTS]
        t.add_row("exponent", *("" if f is None else f"{f[1]:.2f}" for f in fits), style="bold")
        made.append(t)
    return made


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each series on log axes with its fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r["series"] for r in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 4.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for cost in ("exchange", "aggregate", "rest"):
            points = [(r["value"], r[cost]) for r in rows if r["series"] == name and r.get(cost, 0) > 0]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            found = fit(rows, name, cost)
            label = cost if found is None else f"{cost}: exponent {found[1]:.2f}"
            line = axis.loglog(x, y, "o-", label=label)[0]
            if found is not None:
                upper = np.array(x[len(x) // 2 :], dtype=float)
                axis.loglog(upper, found[0] * upper ** found[1], "--", color=line.get_color(), alpha=0.5)
        axis.set_xlabel(name)
        axis.set_ylabel("seconds a round")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write growth.csv and growth.png."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["series", "value", *COSTS, "own_mb", "shared_mb", "note"])
    writer.writeheader()
    writer.writerows(rows)
    (out / "growth.csv").write_text(text.getvalue())
    lines = ["series,cost,factor,exponent"]
    for name in dict.fromkeys(r["series"] for r in rows):
        for cost in COSTS:
            if (found := fit(rows, name, cost)) is not None:
                lines.append(f"{name},{cost},{found[0]:.4g},{found[1]:.3f}")
    (out / "growth_fits.csv").write_text("\n".join(lines) + "\n")
    plot(rows, out / "growth.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three points a series, up to a tenth of the size")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        answer(args.cell, measure=measure)
        return
    console = Console()
    console.print(f"{os.cpu_count()} CPUs; otherwise {BASE}")
    rows = run(series={k: v[:3] for k, v in SERIES.items()} if args.quick else None, progress=console.print)
    for each in table(rows):
        console.print(each)
    save(rows, args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
