"""Faults of resuming: a run killed, checkpoints that are damaged or of another run, a disk that is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message

from client_apps.app import make_client_app
from client_apps.errors import ConfigError
from experiments import server_app
from experiments.checkpoint import find_start
from experiments.config import check
from experiments.engine import SerialGrid, serve_on

from .stage import Stage, fault

SAVING = ("checkpoint.every=1", "checkpoint.keep=3", "num_rounds=4")


class Power(BaseException):
    """The power fails: nothing in the run expects this."""


class Failing(SerialGrid):
    """A grid on which the power fails when so many rounds have been sent."""

    rounds = 3

    def collect(self, messages: Iterable[Message], *, own: bool) -> Iterable[Message]:
        self.rounds -= 1
        if self.rounds < 0:
            raise Power
        return super().collect(messages, own=own)


def killed(stage: Stage, *overrides: str) -> Path:
    """A run of four rounds that ended in the fourth without a word."""
    cfg = stage.config(*SAVING, *overrides)
    with pytest.raises(Power):
        serve_on(Failing(make_client_app(cfg), cfg["num_clients"]), server_app.make_server_app(cfg, check(cfg)))
    folder = Path(cfg["output_dir"])
    for name in ("status.json", "model.safetensors"):  # written where a run ends in order, though it fails
        (folder / name).unlink()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir() if p.is_dir())[-1] == "round-000003"
    return folder


def whole(stage: Stage) -> bytes:
    """The model of the same run when nothing happens to it."""
    return Stage(stage.folder / "whole").run(*SAVING).bits


def refused(stage: Stage, *overrides: str) -> str:
    """What a resume with other overrides is told; the checkpoints stay as they are."""
    folder = killed(stage)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    cfg = stage.config(*SAVING, "resume=auto", *overrides)
    with pytest.raises(ConfigError) as found:
        find_start(cfg, check(cfg))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return f"ConfigError: {found.value}"


@fault("a run is killed, and resumed")
def resumed(stage: Stage) -> str:
    killed(stage)
    run = stage.run(*SAVING, "resume=auto")
    assert run.bits == whole(stage)
    assert [r["round"] for r in run.records] == [1, 2, 3, 4]
    return run.text()


@fault("the newest checkpoint is damaged")
def damaged(stage: Stage) -> str:
    folder = killed(stage)
    model = folder / "checkpoints" / "round-000003" / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    run = stage.run(*SAVING, "resume=auto")
    assert run.bits == whole(stage)
    return run.text()


@fault("every checkpoint is damaged")
def all_damaged(stage: Stage) -> str:
    folder = killed(stage)
    for state in folder.glob("checkpoints/round-*/state.json"):
        state.write_text("{")
    cfg = stage.config(*SAVING, f"resume={folder}", f"output_dir={stage.folder / 'new'}")
    with pytest.raises(ConfigError) as found:
        find_start(cfg, check(cfg))
    assert not (stage.folder / "new").exists()
    before = sorted(folder.parent.rglob("*"))
    cfg = stage.config(*SAVING, "resume=auto", f"output_dir={folder}")
    with pytest.raises(ConfigError, match=r"none of the .* checkpoints in .* can be used"):
        find_start(cfg, check(cfg))
    assert sorted(folder.parent.rglob("*")) == before
    return f"ConfigError: {found.value}"


@fault("a checkpoint of another model")
def another_model(stage: Stage) -> str:
    return refused(stage, "model.hidden=[100]")


@fault("a checkpoint of another strategy")
def another_strategy(stage: Stage) -> str:
    return refused(stage, "strategy=fedavg")


@fault("a checkpoint of another configuration")
def another_configuration(stage: Stage) -> str:
    return refused(stage, "client.lr=0.2")


@fault("`resume` names a folder without a checkpoint")
def no_checkpoint(stage: Stage) -> str:
    cfg = stage.config(f"resume={stage.folder}")
    with pytest.raises(ConfigError) as found:
        find_start(cfg, check(cfg))
    return f"ConfigError: {found.value}"


@fault("the disk is full when a checkpoint is written")
def disk_full(stage: Stage) -> str:
    true_sync, syncs = os.fsync, [0]

    def full(descriptor: int) -> None:
        syncs[0] += 1
        if syncs[0] == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run = stage.run(*SAVING, fails=OSError)
    text = run.text()
    again = stage.run(*SAVING, "resume=auto")  # what was saved before is whole
    assert again.bits == whole(stage)
    return text
