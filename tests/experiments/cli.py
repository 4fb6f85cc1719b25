"""Runs the project's commands as a person would, in processes of their own that never outlive the test."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path = ROOT, timeout: float = 420, **environment: str) -> subprocess.CompletedProcess:
    """Run a command with output captured; on a timeout its whole process group is ended."""
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, "")


def run(*overrides: str, **options) -> subprocess.CompletedProcess:
    """`python -m experiments.run ...`"""
    return command(sys.executable, "-m", "experiments.run", *overrides, **options)


def rounds(folder: Path) -> list[dict]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
