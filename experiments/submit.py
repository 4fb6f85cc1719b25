"""`python -m experiments.submit`: submit an app with `flwr run`, show its log, wait, and return how the run ended."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import httpx

from .processes import Ended, ProcessTree, free_port, wait_for

COMPLETED, FAILED, NOT_SUBMITTED, TIMEOUT, SIGNALLED = 0, 1, 2, 3, 128
_LOCAL = "own"  # the connection to a SuperLink of one's own
_START_SECONDS = 120.0
_CALL_SECONDS = 120.0
_TICK_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0  # how long a SuperLink may be out of reach while a run is followed
_TAIL = 15  # lines of a log shown where a process did not start
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}

_DESCRIPTION = """\
Submit a Flower app, show the run's log, wait for its end, and say how it ended.

Without SUPERLINK the app runs in Flower's simulation, on a SuperLink of its own that is ended afterwards with all it
started. With SUPERLINK, the name of a connection in Flower's config.toml, the SuperLink stays as it is.
"""
_STATUS = """\
exit status:
  0  the run completed
  1  the run failed or was stopped
  2  it could not be submitted, or the SuperLink got lost; a sentence says why
  3  --timeout passed: the run has been stopped
  128 + n  ended by signal n (Ctrl-C: 130). On a SuperLink of its own the run is ended; on another one it goes on
"""


class FlowerError(RuntimeError):
    """A call of Flower's command line failed; the message is what it said, in one sentence."""


class Flower:
    """Flower's command line, with one connection to a SuperLink.

    Parameters
    ----------
    tree : ProcessTree
        Ends what is called, should it hang.
    superlink : str
        The connection's name in config.toml.
    home : Path, optional
        The folder with config.toml; `FLWR_HOME`, or Flower's own, by default.
    ends : bool
        Whether the SuperLink, and with it the run, ends with this process.
    """

    def __init__(self, tree: ProcessTree, superlink: str, home: Path | None = None, *, ends: bool = False) -> None:
        self.tree = tree
        self.superlink = superlink
        self.ends = ends
        self.environment = {**_QUIET, **({"FLWR_HOME": str(home)} if home else {})}

    def call(self, *words: str) -> dict[str, Any]:
        """Call `flwr ... --format json` and return its answer.

        Raises
        ------
        FlowerError
            If it fails, or gives no answer.
        """
        try:
            process = self.tree.start(
                [program("flwr"), *words, "--format", "json"], environment=self.environment, pipe=True
            )
        except OSError as error:
            raise FlowerError(f"Flower's command line cannot be started: {error}") from error
        try:
            text, _ = process.communicate(timeout=_CALL_SECONDS)
        except subprocess.TimeoutExpired:
            perhaps = " The run may have been accepted all the same; look with flwr ls." if words[0] == "run" else ""
            raise FlowerError(f"flwr {words[0]} gave no answer within {_CALL_SECONDS:g} s.{perhaps}") from None
        finally:
            if process.poll() is None:
                self.tree.end(process)
        answer = _json_in(text)
        if answer is None or not answer.get("success"):
            said = (answer or {}).get("error-message") or text
            said = re.sub(r"^Using SuperLink: (.*?)\n", r"\1: ", str(said).lstrip())
            raise FlowerError(" ".join(said.split()) or f"flwr {words[0]} ended with {process.returncode}.")
        return answer

    def run(self, app: str, run_config: Sequence[str] = (), federation_config: Sequence[str] = ()) -> str:
        """Submit an app and return the run's id."""
        words = ["run", app, self.superlink]
        for option, values in (("--run-config", run_config), ("--federation-config", federation_config)):
            for value in values:
                words += [option, value]
        return str(self.call(*words)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """Return a run's status, such as "finished:failed", and its reason, which may be empty."""
        runs = self.call("ls", self.superlink, "--run-id", run).get("runs")
        if not isinstance(runs, list) or len(runs) != 1:
            raise FlowerError(f"the SuperLink does not list run {run}.")
        (found,) = runs
        reason = str(found.get("status-details") or "")
        return str(found["status"]), "" if reason == "N/A" else " ".join(reason.split())

    def stop(self, run: str) -> None:
        """Stop a run."""
        self.call("stop", run, self.superlink)

    def follow(
        self, run: str, out: TextIO, *, timeout: float | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[str, str]:
        """Copy a run's log to `out` until the run is over, and return its status and reason.

        Parameters
        ----------
        run : str
            Its id.
        out : text file
            Gets the whole log, each line once, even if the connection breaks in between.
        timeout : float, optional
            Seconds after which TimeoutError is raised; the run goes on.
        meanwhile : callable
            Called about five times a second.

        Raises
        ------
        TimeoutError
        FlowerError
            If the SuperLink has been out of reach for a minute.
        """
        end = None if timeout is None else time.monotonic() + timeout
        lost: float | None = None
        copied = 0
        while True:
            copied += self._copy(["log", run, self.superlink, "--stream"], copied, out, end, meanwhile)
            try:
                status, reason = self.status(run)
                lost = None
            except FlowerError:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > _PATIENCE_SECONDS:
                    raise
                status = ""
            if status.startswith("finished"):
                # The last lines may reach the SuperLink after the run's end, of which the stream takes notice first.
                self._copy(["log", run, self.superlink, "--show"], copied, out, None, meanwhile)
                return status, reason
            _pause(1.0, end, meanwhile)

    def _copy(
        self, words: Sequence[str], skip: int, out: TextIO, end: float | None, meanwhile: Callable[[], None]
    ) -> int:
        """Copy the log that a call prints but for its first `skip` characters; return how many were copied."""
        process = self.tree.start([program("flwr"), *words], environment=self.environment, pipe=True, errors=False)
        copy = _Copy(process, skip, out)
        copy.start()
        try:
            while copy.is_alive():
                _pause(_TICK_SECONDS, end, meanwhile)
        finally:
            self.tree.end(process)
            copy.join()
            assert process.stdout is not None
            process.stdout.close()
        if copy.error is not None:
            raise copy.error
        return copy.count


class _Copy(threading.Thread):
    """Copies a log from a process that prints it, without the process's own first line."""

    def __init__(self, process: subprocess.Popen[str], skip: int, out: TextIO) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.skip = skip
        self.out = out
        self.count = 0
        self.error: OSError | None = None

    def run(self) -> None:
        """Copy until the process closes its output."""
        assert self.process.stdout is not None
        blank = ""  # an empty line that may be the one `--show` adds
        try:
            for number, line in enumerate(self.process.stdout):
                if number == 0 and "Using SuperLink" in line:
                    continue
                new, self.skip = blank + line[max(0, self.skip) :], self.skip - len(line)
                blank = "\n" if new.endswith("\n\n") or new == "\n" else ""
                if new := new.removesuffix(blank):
                    self.out.write(new)
                    self.out.flush()
                    self.count += len(new)
        except OSError as error:  # nobody reads our own output any more
            self.error = error


def program(name: str) -> str:
    """Return the path of one of Flower's programs: the one installed with this Python."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def quiet(home: Path) -> dict[str, str]:
    """Return what Flower's programs find in their environment: their folder, this Python's programs, no telemetry."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # they start others by name
    return {**_QUIET, "FLWR_HOME": str(home), "PATH": path}


@contextlib.contextmanager
def own_superlink(tree: ProcessTree) -> Iterator[Flower]:
    """Start a SuperLink for simulations, whose apps run in the current folder; it leaves nothing but their results.

    Raises
    ------
    FlowerError
        If it does not start, with what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="flwr-", ignore_cleanup_errors=True) as folder:
        home, port = Path(folder), free_port()
        address = f"127.0.0.1:{port}"
        (home / "config.toml").write_text(f'[superlink.{_LOCAL}]\naddress = "{address}"\ninsecure = true\n')
        process = tree.start(
            [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port),
             "--database", str(home / "state.db"), "--disable-runtime-dependency-installation"],
            log=home / "superlink.log",
            environment=quiet(home),
        )  # fmt: skip
        try:
            wait_until_serving(process, home / "superlink.log", port)
            yield Flower(tree, _LOCAL, home, ends=True)
        finally:
            tree.end()


def wait_until_serving(process: subprocess.Popen[str], log: Path, port: int, ca: Path | None = None) -> None:
    """Wait until a SuperLink answers.

    Raises
    ------
    FlowerError
        If it ends before, or does not answer in two minutes.
    """

    def healthy() -> bool:
        if process.poll() is not None:
            raise FlowerError(f"the SuperLink ended with {process.returncode} before it served:\n{tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            return client.get(url).is_success
        return False

    context = ssl.create_default_context(cafile=str(ca)) if ca else True
    url = f"{'https' if ca else 'http'}://127.0.0.1:{port}/health"
    with httpx.Client(verify=context, trust_env=False, timeout=5.0) as client:
        try:
            wait_for(healthy, _START_SECONDS, "the SuperLink did not answer")
        except TimeoutError as error:
            raise FlowerError(f"{error}\n{tail(log)}") from None


def tail(log: Path) -> str:
    """Return the last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])


def submit(
    flower: Flower,
    app: str,
    run_config: Sequence[str] = (),
    federation_config: Sequence[str] = (),
    *,
    timeout: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    out: TextIO | None = None,
) -> int:
    """Submit an app, show its log until the run is over, and return the exit status; errors are printed.

    Parameters
    ----------
    flower : Flower
        The connection.
    app : str
        The app's folder.
    run_config, federation_config : sequence of str
        As `flwr run` takes them.
    timeout : float, optional
        Seconds after which the run is stopped.
    meanwhile : callable
        Called about five times a second while the run goes on.
    out : text file, optional
        Where everything is written; standard output by default.
    """
    out = out or sys.stdout

    def say(text: str) -> None:
        out.write(f"{text}\n")
        out.flush()

    try:
        run = flower.run(app, run_config, federation_config)
    except FlowerError as error:
        say(f"the app could not be submitted: {error}")
        return NOT_SUBMITTED
    except Ended:
        if not flower.ends:
            say(f"the run may have been accepted all the same; `flwr ls {flower.superlink}` tells")
        raise
    say(f"run {run} submitted")
    try:
        status, reason = flower.follow(run, out, timeout=timeout, meanwhile=meanwhile)
    except TimeoutError:
        try:
            flower.stop(run)
        except FlowerError as error:
            say(f"run {run} has not ended after {timeout:g} s, and cannot be stopped: {error}")
        else:
            say(f"run {run} was stopped: it had not ended after {timeout:g} s")
        return TIMEOUT
    except FlowerError as error:
        say(f"how run {run} ends is not known, the SuperLink is lost: {error}")
        return NOT_SUBMITTED
    except Ended:
        name = flower.superlink
        if flower.ends:
            say(f"run {run} ends with its SuperLink")
        else:
            say(f"run {run} goes on; `flwr log {run} {name}` shows it, `flwr stop {run} {name}` ends it")
        raise
    say(f"run {run} {status}{': ' if reason else ''}{reason}")
    return COMPLETED if status == "finished:completed" else FAILED


def shadowed(app: Path, cwd: Path) -> str | None:
    """Return the name of a package of the app that another one in `cwd` would hide from a simulation's workers.

    Ray's workers look for packages in the working directory before they look into the app's bundle.
    """
    if app.resolve() == cwd.resolve() or not app.is_dir():
        return None
    packages = (path.parent.name for path in sorted(app.glob("*/__init__.py")))
    return next((name for name in packages if (cwd / name).is_dir() or (cwd / f"{name}.py").exists()), None)


def _pause(seconds: float, end: float | None, meanwhile: Callable[[], None]) -> None:
    meanwhile()
    if end is not None and time.monotonic() > end:
        raise TimeoutError
    time.sleep(seconds)


def _json_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object that ends a text; Flower may print notes before it."""
    decoder = json.JSONDecoder()
    for start, char in enumerate(text):
        if char == "{" and (start == 0 or text[start - 1] == "\n"):
            with contextlib.suppress(json.JSONDecodeError):
                found, _ = decoder.raw_decode(text[start:])
                if isinstance(found, Mapping):
                    return dict(found)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python -m experiments.submit`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.submit",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("app", nargs="?", default=".", help="the app's folder (.)")
    parser.add_argument("superlink", nargs="?", help="a connection's name in Flower's config.toml")
    parser.add_argument(
        "-c", "--run-config", action="append", default=[], metavar="KEYS", help="""e.g. 'overrides="seed=1"'"""
    )
    parser.add_argument("--federation-config", action="append", default=[], metavar="KEYS", help="as for `flwr run`")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the run after so many seconds")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # Flower's log has characters that not every terminal knows
        sys.stdout.reconfigure(errors="replace")
    if options.superlink is None and (name := shadowed(Path(options.app).expanduser(), Path.cwd())):
        sys.stderr.write(
            f"{Path.cwd() / name} would hide the app's package {name!r} from its clients; call this in another folder, "
            "or in the app's own.\n"
        )
        return NOT_SUBMITTED
    try:
        with ProcessTree() as tree, contextlib.ExitStack() as opened:
            try:
                if options.superlink is None:
                    flower = opened.enter_context(own_superlink(tree))
                else:
                    flower = Flower(tree, options.superlink)
            except FlowerError as error:
                sys.stderr.write(f"{error}\n")
                return NOT_SUBMITTED
            return submit(flower, options.app, options.run_config, options.federation_config, timeout=options.timeout)
    except Ended as ended:
        sys.stderr.write(f"ended by {ended}\n")
        return SIGNALLED + ended.number
    except BrokenPipeError:  # nobody reads on, as with `| head`: as for the signal that others get then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
        return SIGNALLED + signal.SIGPIPE


def seconds(text: str) -> float:
    """Read a number of seconds above 0 from the command line."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(main())
