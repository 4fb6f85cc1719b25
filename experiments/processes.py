"""ProcessTree: what a command starts, and everything that starts in turn, ends with the command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_POLL_SECONDS = 0.1
# Time to end by themselves; Flower's SuperLink and Ray take a few seconds.
_GRACE_SECONDS = 10.0
_GONE = "ZX"  # states of a process that is over
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked this process to end; not an Exception, so that nothing takes it for a failure of the work.

    Parameters
    ----------
    number : int
        The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class ProcessTree:
    """Start processes; on leaving the context all of them and all their descendants are gone, whatever happens.

    Flower's programs start others in sessions of their own, and those outlive a parent that was killed. On Linux this
    process therefore adopts the orphans among its descendants, so that none gets out of sight. Elsewhere only the
    process groups of what was started here are ended. Use it in a program's main thread: while the context is open,
    SIGINT, SIGTERM and SIGHUP raise `Ended` there (under nohup SIGHUP does not), and while it closes they wait. All
    children are taken note of here when they end, so nobody else can wait for one: start none meanwhile but with
    `start`.
    """

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[Any]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        _adopt(True)
        ending = [n for n in _ENDING if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]  # nohup's
        self._handlers = {number: signal.signal(number, _end) for number in ending}
        threading.Thread(target=self._reap_for_ever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with _held():
            self.end()
            self._closed.set()
        _adopt(False)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pipe: bool = False,
        errors: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a process in a session of its own.

        Parameters
        ----------
        words : sequence of str
            The command line.
        log : Path, optional
            File to which both its outputs are appended.
        cwd : Path, optional
            Its working directory; this process's by default.
        environment : mapping of str to str, optional
            Variables set in addition to this process's.
        pipe : bool
            Offer both outputs at `stdout` instead.
        errors : bool
            False: drop what goes to standard error.
        """
        out: Any = subprocess.PIPE if pipe else log.open("ab") if log else None
        try:
            with _held(), self._lock:
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=(subprocess.STDOUT if out else None) if errors else subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                self._started[process.pid] = process
        finally:
            if log and not pipe:
                out.close()
        return process

    def alive(self, process: subprocess.Popen[Any] | None = None) -> list[int]:
        """Return the ids of a process and its living descendants, or of all descendants of this process."""
        self._reap()
        if sys.platform != "linux":
            return [pid for pid, p in self._started.items() if p.poll() is None and process in (None, p)]
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may end while it is looked at
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state not in _GONE:
                    children.setdefault(int(parent), []).append(int(entry.name))
        found = [] if process is None or process.poll() is not None else [process.pid]
        queue = [os.getpid()] if process is None else list(found)
        while queue:
            below = children.get(queue.pop(), [])
            queue += below
            found += below
        return found

    def end(self, process: subprocess.Popen[Any] | None = None, grace: float = _GRACE_SECONDS) -> None:
        """End a process, or all, with all descendants, and wait: SIGTERM first, SIGKILL after `grace` seconds."""
        members = self.alive(process)
        for sig in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + grace
            asked: set[int] = set()
            while members and time.monotonic() < limit:
                for pid in set(members) - asked:
                    asked.add(pid)
                    _send(pid, sig)
                time.sleep(_POLL_SECONDS)
                # What was started meanwhile, and what lost its parent meanwhile.
                members = [*{*self.alive(process), *(m for m in members if _exists(m))}]

    def kill(self, process: subprocess.Popen[Any], grace: float = _GRACE_SECONDS) -> None:
        """Do to a process what `kill -9` does; what it started is ended, too, unless it notices within `grace` s."""
        members = self.alive(process)
        process.kill()
        process.wait()
        limit = time.monotonic() + grace
        while members := [pid for pid in members if _exists(pid)]:
            if time.monotonic() > limit:
                for pid in members:
                    _send(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> None:
        """Take note of children that have ended; adopted ones would stay zombies, which others wait for in vain."""
        with self._lock:
            while True:
                try:
                    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    return
                if ended is None:
                    return
                if (process := self._started.get(ended.si_pid)) is not None:
                    process.poll()
                else:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(ended.si_pid, os.WNOHANG)

    def _reap_for_ever(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            self._reap()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now.

    On Linux it is none that the kernel gives to outgoing connections, so that it stays free until it is listened on.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 0
    # Ray's workers listen below 20000.
    candidates = random.SystemRandom().sample(range(20_000, first), 100) if first > 21_000 else []
    for port in (*candidates, 0):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, port))
            return int(s.getsockname()[1])
    raise OSError(f"no TCP port is free on {host}.")


def wait_for(ready: Callable[[], Any], seconds: float, what: str, interval: float = 0.2) -> Any:
    """Call `ready` until it returns something true, and return that.

    Raises
    ------
    TimeoutError
        After `seconds`; it says that `what` did not happen.
    """
    limit = time.monotonic() + seconds
    while not (value := ready()):
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} within {seconds:g} s.")
        time.sleep(interval)
    return value


def _adopt(orphans: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _end(number: int, _: FrameType | None) -> None:
    raise Ended(number)


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """Let signals that would end this process wait for the end of the block."""
    caught: list[int] = []
    before = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def _exists(pid: int) -> bool:
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in _GONE
    except OSError:
        return False


def _send(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.kill if sys.platform == "linux" else os.killpg)(pid, sig)
