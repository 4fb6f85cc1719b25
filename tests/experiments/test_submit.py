"""`python -m experiments.submit` returns how a run ended, shows all of its log, and leaves nothing running."""

import io
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from experiments import submit
from experiments.processes import ProcessTree, free_port, wait_for

from ..faults.table import says
from .cli import ROOT, command, rounds
from .marked import processes_with

pytestmark = pytest.mark.ray

SMALL = "num_clients=4 clients_per_round=2 num_rounds=2"
SIMULATION = "num-supernodes=4 client-resources-num-cpus=1"


def words(overrides: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "experiments.submit", *more,
        "-c", f'overrides="{overrides}"', "--federation-config", SIMULATION,
    ]  # fmt: skip


@pytest.fixture
def places(tmp_path):
    """A folder to be in and one for temporary files; afterwards nothing that was started here may be left."""
    with tempfile.TemporaryDirectory() as temporary:  # not below tmp_path: Ray's sockets need a short name
        yield tmp_path, {"TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
        assert processes_with(temporary) == []
        assert list(Path(temporary).glob("flwr-*")) == []


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes through /proc")


@needs_proc
def test_a_completed_run_returns_0_and_its_results_are_where_it_was_submitted(places):
    here, environment = places
    done = command(*words(f"{SMALL} output_dir=results", str(ROOT)), cwd=here, **environment)
    assert done.returncode == 0, done.stdout
    assert [r["round"] for r in rounds(here / "results")] == [0, 1, 2]
    lines = done.stdout.splitlines()
    for number in range(3):
        assert sum(line.startswith(f"round {number}/2 ") for line in lines) == 1
    assert lines[-1].endswith("finished:completed")
    assert str(here / "results") in lines  # the last line but Flower's that the run wrote


@needs_proc
def test_a_failed_run_returns_1_and_says_why(places):
    here, environment = places
    done = command(*words(f"{SMALL} model=resnet20", str(ROOT)), cwd=here, **environment)
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "finished:failed: " in last
    says("the run of `experiments.submit` fails", done.stdout)
    assert "resnet" in last
    assert "ConfigError" in done.stdout
    assert list(here.iterdir()) == []


@needs_proc
def test_sigterm_in_the_middle_ends_everything(places):
    here, environment = places
    process = subprocess.Popen(
        words("num_clients=4 clients_per_round=2 num_rounds=100000", str(ROOT)),
        cwd=here, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if re.match(r"round +0/", line):
                break
        assert processes_with(environment["TMPDIR"]), seen
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(120) == 128 + signal.SIGTERM
        assert "ended by SIGTERM" in rest
        says("`experiments.submit` is told to end", rest)
    finally:
        process.terminate()
        process.communicate()


def test_a_superlink_out_of_reach_is_one_sentence(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "config.toml").write_text(f'[superlink.away]\naddress = "{address}"\ninsecure = true\n')
    done = command(*words(SMALL, ".", "away"), FLWR_HOME=str(tmp_path))
    assert done.returncode == 2
    wanted = f"the app could not be submitted: away ({address}): Connection to the SuperLink is unavailable."
    assert done.stdout.startswith(wanted)
    says("the SuperLink is out of reach", done.stdout)
    assert len(done.stdout.splitlines()) == 1
    done = command(*words(SMALL, ".", "nowhere"), FLWR_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "'nowhere' not found" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_folder_whose_packages_would_hide_the_apps_is_refused(tmp_path):
    (tmp_path / "strategies.py").touch()
    done = command(*words(SMALL, str(ROOT)), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert f"{tmp_path / 'strategies'} would hide the app's package 'strategies'" in done.stdout
    assert submit.shadowed(ROOT, ROOT) is None


FAKE = """\
#!{python}
# Flower's command line as far as `follow` calls it: the log stream breaks once, and the last lines come late.
import json, pathlib, sys, time
state = pathlib.Path({folder!r})
log = ["first\\n", "\\n", "second\\n", "third\\n", "last\\n"]
if sys.argv[1] == "log":
    print("Using SuperLink: fake (nowhere)")
    if "--show" in sys.argv:
        print("".join(log))
    elif (state / "broken").exists():
        print("".join(log[:4]), end="", flush=True)
        (state / "ended").touch()
    else:
        (state / "broken").touch()
        print("".join(log[:2]), end="", flush=True)
        sys.exit(1)
elif sys.argv[1] == "ls":
    status = "finished:completed" if (state / "ended").exists() and {ends} else "running"
    print("Listing...")
    print(json.dumps({{"success": True, "runs": [{{"status": status, "status-details": "N/A"}}]}}))
elif sys.argv[1] == "stop":
    (state / "stopped").write_text(" ".join(sys.argv[2:]))
    print(json.dumps({{"success": True}}))
else:
    print(json.dumps({{"success": True, "run-id": "17"}}))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that puts a `flwr` in place of Flower's."""

    def install(*, ends: bool) -> Path:
        path = tmp_path / "flwr"
        path.write_text(textwrap.dedent(FAKE).format(python=sys.executable, folder=str(tmp_path), ends=ends))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(submit, "program", lambda name: str(tmp_path / name))
        return tmp_path

    return install


def test_a_log_stream_that_breaks_is_taken_up_again_and_no_line_is_lost_or_shown_twice(fake):
    fake(ends=True)
    out = io.StringIO()
    with ProcessTree() as tree:
        status = submit.submit(submit.Flower(tree, "fake"), ".", out=out)
    assert status == submit.COMPLETED
    assert out.getvalue() == (
        "run 17 submitted\nfirst\n\nsecond\nthird\nlast\nrun 17 finished:completed\n"
    )  # fmt: skip


def test_a_run_that_does_not_end_in_time_is_stopped(fake):
    folder = fake(ends=False)
    out = io.StringIO()
    with ProcessTree() as tree:
        status = submit.submit(submit.Flower(tree, "fake"), ".", timeout=0.5, out=out)
    assert status == submit.TIMEOUT
    assert (folder / "stopped").read_text().startswith("17 fake")
    assert out.getvalue().splitlines()[-1] == "run 17 was stopped: it had not ended after 0.5 s"


def test_ctrl_c_leaves_a_run_on_a_named_superlink_and_says_how_to_go_on(fake):
    fake(ends=False)
    code = textwrap.dedent("""
        import os, signal, sys
        from experiments import submit
        submit.program = lambda name: sys.argv[1]
        submit.Flower.status, status = (
            lambda *a: (os.kill(os.getpid(), signal.SIGINT), status(*a))[1], submit.Flower.status)
        sys.exit(submit.main([".", "fake"]))
    """)
    done = command(sys.executable, "-c", code, submit.program("flwr"))
    assert done.returncode == 128 + signal.SIGINT
    assert "run 17 goes on; `flwr log 17 fake` shows it, `flwr stop 17 fake` ends it" in done.stdout
    assert done.stdout.splitlines()[-1] == "ended by SIGINT"


def test_wait_for_gives_up():
    with pytest.raises(TimeoutError, match=r"nothing came within 0\.1 s"):
        wait_for(lambda: None, 0.1, "nothing came", interval=0.01)


def test_a_reader_that_goes_away_is_told_apart_from_a_run_that_failed(monkeypatch):
    def nobody_reads(*_, **__):
        raise BrokenPipeError

    closed = []
    monkeypatch.setattr("experiments.submit.submit", nobody_reads)
    monkeypatch.setattr("os.dup2", lambda source, target: closed.append(source))
    assert submit.main([".", "fleet"]) == 128 + signal.SIGPIPE
    os.close(*closed)
