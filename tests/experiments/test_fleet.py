"""Fleets on loopback: docs/deploy.md as it stands, and the demo with its accident; nothing is left of either."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Context, RecordDict

from client_apps import make_client_app
from client_apps.errors import ConfigError
from experiments.config import check, compose
from experiments.engine import SerialGrid
from experiments.fleet.__main__ import main as fleet_main
from experiments.fleet.keys import make_keys
from experiments.processes import free_port, wait_for
from experiments.server_app import make_server_app

from ..faults.table import says
from .cli import ROOT, command, rounds, run
from .contained import LEFT
from .marked import processes_with

PAGE = (ROOT / "docs" / "deploy.md").read_text()
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SECONDS = 900  # two fleets at once on a slow machine

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes through /proc")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, running in the background: it mostly waits, and the page's commands run meanwhile."""
    base = tmp_path_factory.mktemp("demo")
    folder, out = base / "fleet", base / "out.txt"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.fleet", "--rounds", "3", "--keep", str(folder)],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
    try:
        yield SimpleNamespace(process=process, folder=folder, text=out.read_text)
    finally:
        process.terminate()
        process.wait()


def consecutive_ports(count: int) -> int:
    """The first of so many ports that are free now."""

    def found() -> int:
        first = free_port()
        if first + count > 65535:
            return 0
        for port in range(first + 1, first + count):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    return 0
        return first

    return wait_for(found, 10, "no free ports", interval=0)


@needs_proc
@pytest.mark.timeout(SECONDS)
def test_a_node_without_a_registered_key_gets_no_work(demo, tmp_path):
    folder = demo.folder
    wait_for(
        lambda: "SuperNodes online" in demo.text() or demo.process.poll() is not None, 300, "the demo is not online"
    )
    (port,) = re.findall(r"SuperLink on 127\.0\.0\.1:(\d+)", demo.text())
    make_keys(tmp_path, hosts=(), nodes=1)
    done = command(
        sys.executable, "-m", "tests.experiments.contained",
        "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates", str(folder / "keys" / "ca.pem"),
        "--auth-supernode-private-key", str(tmp_path / "node-0"), "--port", str(free_port()), "--max-retries", "0",
        PATH=PATH, FLWR_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode not in (0, LEFT), done.stdout
    says("a SuperNode without a registered key asks for work", done.stdout)


@needs_proc
@pytest.mark.timeout(SECONDS)
def test_every_command_of_the_page(demo, tmp_path):
    script = tmp_path / "page.sh"
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 12
    script.write_text("\n".join(blocks))
    fleet = tmp_path / "fleet"
    environment = {
        "FLEET": str(fleet), "FLWR_HOME": str(tmp_path / "flwr"), "HOST": "127.0.0.1", "LISTEN": "127.0.0.1",
        "PORT": str(free_port()), "NODE_PORT": str(consecutive_ports(2)), "NODES": "2", "ROUNDS": "1", "PATH": PATH,
    }  # fmt: skip
    done = command(
        sys.executable, "-m", "tests.experiments.contained", "bash", "-eux", "-o", "pipefail", str(script),
        timeout=SECONDS, **environment,
    )  # fmt: skip
    logs = "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(fleet.glob("*.log")))
    assert done.returncode != LEFT, done.stdout
    assert done.returncode == 0, done.stdout + logs
    assert processes_with(str(tmp_path)) == []
    assert len(re.findall(r"^run \d+ finished:completed$", done.stdout, re.MULTILINE)) == 2
    assert json.loads((fleet / "run-0" / "status.json").read_text())["status"] == "finished"
    records = rounds(fleet / "run-1")
    assert [r["round"] for r in records] == [0, 1, 2]
    assert [r["clients_accepted"] for r in records[1:]] == [2, 2]
    assert json.loads((fleet / "run-1" / "status.json").read_text())["status"] == "finished"

    # Two nodes, interrupted in between, and the same bits as in one process.
    (words,) = re.findall(r'overrides=\\"([^"]*?)resume=auto\\"', PAGE)
    words = words.replace("\\\n", " ").replace("$NODES", "2").replace("$((ROUNDS + 1))", "2").split()
    direct = tmp_path / "direct"
    done = run(*words, "simulation=serial", f"output_dir={direct}")
    assert done.returncode == 0, done.stdout
    assert (direct / "model.safetensors").read_bytes() == (fleet / "run-1" / "model.safetensors").read_bytes()


@needs_proc
@pytest.mark.timeout(SECONDS)
def test_a_node_is_killed_in_the_middle_of_a_round_and_comes_back(demo):
    assert demo.process.wait(SECONDS) == 0, demo.text()
    assert processes_with(str(demo.folder)) == []
    text = demo.text()
    assert "SuperNode 2 killed (kill -9) while it trains in round 2" in text
    assert re.search(r"round 2 ended without it, \d+ s after its death; starting it again", text)
    assert "SuperNode 2 is back, " in text
    _, first, second, third = rounds(demo.folder / "run")
    assert [r["clients_accepted"] for r in (first, second, third)] == [3, 2, 3]
    assert [r["clients_failed"] for r in (first, second, third)] == [0, 1, 0]
    assert "failed to report a heartbeat" in second["failure_reasons"]
    assert not any(r["failed_round"] for r in (first, second, third))
    assert text.rstrip().endswith(str(demo.folder / "run"))
    assert re.search(r"│ 2 +│[^│]*│ 2 +│ 1 +│.*Node Unavailable", text)  # the table at the end
    says("a SuperNode is killed in a round, and started again", text)


def test_make_fleet_is_the_demo():
    assert re.search(
        r"^fleet: .*## .*\n\t\$\(BIN\)/python -m experiments\.fleet ", (ROOT / "Makefile").read_text(), re.M
    )


def test_a_demo_that_is_ended_leaves_nothing(tmp_path):
    folder = tmp_path / "fleet"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.fleet", "--keep", str(folder)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for((folder / "superlink.log").exists, 120, "the SuperLink was not started")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGINT
        assert f"ended by SIGINT; what there is lies in {folder}" in out
        assert processes_with(str(folder)) == []
    finally:
        process.terminate()
        process.communicate()


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    done = command(sys.executable, "-m", "experiments.fleet", "--keep", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == f"{tmp_path} is not empty; name a new folder.\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--overrides", "it's"], 2, "cannot be split into words"),
        (["--keep", "{file}"], 2, "cannot be made a folder"),
        (["--keep", "{folder}", "--overrides", "num_round=3"], 2, "Could not override 'num_round'"),
        (["--keep", "{folder}", "--overrides", "client.lr=-1"], 2, "client.lr must be a number above 0, not -1."),
        (["--keep", "{folder}", "--overrides", "dataset=femnist data_dir=no/where"], 2, "{here}/no/where/femnist"),
        (["--keep", "{folder}", "--rounds", "0"], 2, "num_rounds=0 must be an integer of at least 1"),
        (["keys", "{folder}", "--days", "99999999"], 1, "no keys made: "),
        (["keys", "{folder}", "--host", "http://x:90"], 1, "leave out scheme, port and path"),
    ],
)
def test_odd_arguments_are_one_sentence(words, status, said, tmp_path, capsys):
    (tmp_path / "file").touch()
    there = {"file": tmp_path / "file", "folder": tmp_path / "keys", "here": Path.cwd()}
    assert fleet_main([word.format(**there) for word in words]) == status
    err = capsys.readouterr().err
    assert said.format(**there) in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_ends_with_the_failure_of_what_it_runs(tmp_path):
    prefix = Path(sys.prefix)
    options = f"--keep {tmp_path / 'new'} --overrides num_rounds=none"
    done = command("make", "-o", f"{prefix}/.installed", f"VENV={prefix}", "fleet", f"FLEET_OPTIONS={options}")
    assert done.returncode == 2
    assert "num_rounds='none' must be an integer of at least 1." in done.stdout


def serve(folder: Path, nodes: int, *overrides: str) -> list[dict]:
    """The records of a run over so many nodes, in this process."""
    cfg = compose(["num_clients=4", "num_rounds=1", "tracking.progress=false", f"output_dir={folder}", *overrides])
    grid = SerialGrid(make_client_app(cfg), nodes)
    context = Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config={})
    make_server_app(cfg, check(cfg))(grid, context)
    return rounds(folder)


def test_a_run_goes_on_with_fewer_nodes_where_min_available_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.server_app._JOIN_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"the federation has 3 nodes but num_clients=4; make them equal"):
        serve(tmp_path / "a", 3, "clients_per_round=4")
    with pytest.raises(ConfigError, match=r"the federation has 1 nodes but num_clients=4 and min_available=2; "):
        serve(tmp_path / "b", 1, "clients_per_round=4", "min_available=2")
    assert serve(tmp_path / "c", 3, "clients_per_round=4", "min_available=2")[1]["clients_accepted"] == 3
    assert serve(tmp_path / "d", 4, "clients_per_round=4", "min_available=2")[1]["clients_accepted"] == 4
    assert serve(tmp_path / "e", 3, "clients_per_round=2", "min_available=3")[1]["clients_accepted"] == 2


@pytest.mark.parametrize("value", ["0", "5", "2.5", "true"])
def test_min_available_out_of_range_is_refused(value):
    with pytest.raises(ConfigError, match=r"min_available=.* must be an integer from 1 to num_clients=4, or null"):
        check(compose(["num_clients=4", "clients_per_round=4", f"min_available={value}", "output_dir=x"]))


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    made = make_keys(folder, hosts=["superlink.example.org", "10.1.2.3"], nodes=2)
    assert sorted(made) == sorted(p.name for p in folder.iterdir())
    return folder


@pytest.mark.parametrize(
    ("name", "good"),
    [("superlink.example.org", True), ("10.1.2.3", True), ("localhost", True), ("127.0.0.1", True),
     ("other.example.org", False), ("10.1.2.4", False)],
)  # fmt: skip
def test_the_certificate_holds_for_the_names_asked_for_and_no_other(keys, name, good):
    ours, theirs = socket.socketpair()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(keys / "superlink.pem", keys / "superlink.key")
    client = ssl.create_default_context(cafile=str(keys / "ca.pem"))

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        if good:
            client.wrap_socket(ours, server_hostname=name).close()
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                client.wrap_socket(ours, server_hostname=name)
    finally:
        ours.close()
        thread.join()


def test_keys_are_pairs_that_only_their_owner_can_read(keys):
    for number in range(2):
        private = load_ssh_private_key((keys / f"node-{number}").read_bytes(), None)
        public = load_ssh_public_key((keys / f"node-{number}.pub").read_bytes())
        assert private.public_key().public_numbers() == public.public_numbers()
    assert (keys / "node-0.pub").read_text() != (keys / "node-1.pub").read_text()
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


def test_more_nodes_leave_the_others_alone(tmp_path):
    make_keys(tmp_path, hosts=["a.example.org"], nodes=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_keys(tmp_path, hosts=["a.example.org"], nodes=2) == ["node-1", "node-1.pub"]
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with pytest.raises(ValueError, match=r"superlink\.pem does not name b\.example\.org; make all keys anew"):
        make_keys(tmp_path, hosts=["b.example.org"], nodes=1)


def test_a_fleet_of_no_nodes_is_refused_before_anything_is_written(tmp_path):
    done = command(sys.executable, "-m", "experiments.fleet", "keys", str(tmp_path / "keys"), "--nodes", "0")
    assert done.returncode == 1
    assert done.stdout == "no keys made: there must be at least one node and one day, not nodes=0 and days=365.\n"
    assert not (tmp_path / "keys").exists()
