"""What a ProcessTree starts never outlives it, however it is left."""

import functools
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from experiments.processes import free_port

from .cli import ROOT, command
from .marked import processes_with

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes through /proc")

START = """
import sys
from experiments.processes import Ended, ProcessTree
try:
    with ProcessTree() as tree:
        first = tree.start(["bash", "-c", {shell!r}], pipe=True)
        line = first.stdout.readline()
        print(line, end="", flush=True)
        {then}
except Ended as ended:
    sys.exit(128 + ended.number)
"""


@pytest.fixture
def mark() -> str:
    return f"mark-{uuid.uuid4().hex}"


def script(shell: str, then: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(START).format(shell=shell, then=then)]


# A child in a session of its own, whose parent is gone or is killed; one that does not listen to SIGTERM.
ORPHAN = "setsid sleep 1000 & echo ready"
STUBBORN = "trap '' TERM; echo ready; sleep 1000 & while true; do wait; done"


@pytest.mark.parametrize(
    ("shell", "then", "status"),
    [
        (ORPHAN, "first.wait()", 0),
        (ORPHAN, "raise SystemExit(7)", 7),
        ("setsid sleep 1000 & echo ready; wait", "tree.kill(first, grace=0.5)", 0),
        (STUBBORN, "tree.end(first, grace=0.5)", 0),
    ],
)
def test_nothing_is_left(mark, shell, then, status):
    done = command(*script(shell, then), MARK=mark)
    assert done.stdout == "ready\n"
    assert done.returncode == status
    assert processes_with(mark) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(mark, number):
    words = ["env", f"MARK={mark}", *script("setsid sleep 1000 & echo ready; sleep 1000", "first.wait()")]
    # The tests may run under nohup themselves.
    default = functools.partial(signal.signal, number, signal.SIG_DFL)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=default)
    try:
        assert process.stdout.readline() == "ready\n"
        assert len(processes_with(mark)) >= 3
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert processes_with(mark) == []
    finally:
        process.kill()
        process.communicate()


def test_under_nohup_a_hangup_ends_nothing(mark):
    words = ["env", f"MARK={mark}", *script("echo ready; sleep 1; exit 7", "print(first.wait(), flush=True)")]
    ignored = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=ignored)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "7\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_adopted_process_that_ends_is_no_zombie_to_those_who_wait_for_it(mark):
    """Flower's programs end when their parent's id is gone, which the id of a zombie is not."""
    shell = "pid=$(sleep 1000 >/dev/null & echo $!); echo $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done"
    then = "import os; os.kill(int(line), 9); first.wait(30)"
    done = command(*script(shell, then), MARK=mark)
    assert done.returncode == 0, done.stdout
    assert processes_with(mark) == []


def test_a_free_port_is_none_of_those_that_outgoing_connections_get():
    ports = [free_port() for _ in range(20)]
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if ranges.exists():
        low, high = map(int, ranges.read_text().split())
        assert low <= 21_000 or not any(low <= port <= high for port in ports)
