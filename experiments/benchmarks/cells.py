"""Cells: single measurements, each in a process of its own, so that memory and start-up are its own too."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from experiments.engine import SerialGrid, serve_on

_SECONDS = 1800


def cell(module: str, function: str, /, **given: Any) -> dict[str, Any]:
    """Call a function of a benchmark's module in a new process, and return the dict it returns.

    The module is run with `--cell`, and answers with `answer`. What fails comes back as a `note`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--cell", function, json.dumps(given), str(out)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            text = f"no result after {_SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.communicate()
        if not out.exists():
            return {"note": "failed: " + " ".join(text.split())[-300:]}
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def answer(asked: list[str], **functions: Callable[..., dict[str, Any]]) -> None:
    """Do what `cell` asks for: `asked` are the values of `--cell`."""
    function, given, out = asked
    Path(out).write_text(json.dumps(functions[function](**json.loads(given))))


def simulate(engine: str, server: ServerApp, client: ClientApp, clients: int, store: int, gpus: float = 0.0) -> None:
    """Run both apps on an engine: "stock" (Flower's simulation), "ray" or "serial"; `store` bytes of shared memory."""
    init: Any = {
        "num_cpus": os.cpu_count(), "object_store_memory": store, "include_dashboard": False, "log_to_driver": False,
        "logging_level": logging.ERROR,
    }  # fmt: skip
    resources: Any = {"num_cpus": 1, "num_gpus": gpus}
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        if engine == "stock":
            from flwr.simulation import run_simulation

            run_simulation(server, client, clients, backend_config={"init_args": init, "client_resources": resources})
        elif engine == "ray":
            from experiments.engine.ray_grid import RayGrid

            with RayGrid(client, clients, init_args=init, client_resources=resources) as grid:
                serve_on(grid, server)
        else:
            serve_on(SerialGrid(client, clients), server)
    finally:
        log.setLevel(level)


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Sample this process's own and shared memory (MB above the start) while the block runs (Linux)."""
    peak = {"own_mb": 0.0, "shared_mb": 0.0, "all_mb": 0.0}
    first = resident()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            own, shared = (now - then for now, then in zip(resident(), first, strict=True))
            for key, value in (("own_mb", own), ("shared_mb", shared), ("all_mb", own + shared)):
                peak[key] = max(peak[key], value / 2**20)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def resident() -> tuple[int, int]:
    """Return this process's own (anonymous) and shared resident memory, in bytes; zeros where Linux's /proc is not."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0, 0
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    own, *shared = (int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem", "RssFile"))
    return own, sum(shared)


def machine_memory() -> int:
    """Bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
