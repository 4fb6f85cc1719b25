"""Checkpoints of a run: all that goes on from round to round, saved every few rounds, and taken up again by `resume=`.

Besides what `strategies.checkpoint` saves, a run's checkpoint holds

    records.jsonl           metrics.jsonl up to its round
    clients.parquet         its rows up to its round
    stability.safetensors   what `experiments.stability` counts with
    clients.json            what clients keep between rounds (Ditto's personal models, stale models), where the engine
    clients.safetensors     can reach it: simulation=ray and simulation=serial

so that it needs nothing else of the run it was taken from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import safetensors.numpy
from flwr.common import ndarrays_to_parameters
from flwr.serverapp import Grid

from client_apps.arrays import get_arrays
from client_apps.errors import ConfigError
from client_apps.tasks import Task
from strategies import LayerMap, UpdateStrategy
from strategies.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    as_json,
    find,
    first_difference,
    list_checkpoints,
    newest,
    require_in_line,
    require_same_model,
    require_unused,
)
from strategies.options import is_real

from .engine import VirtualGrid
from .engine.wire import PackedRecord
from .resume import comparable, is_finished, settle
from .stability import Stability
from .tracking import RunTracker

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
AUTO = "auto"
RECORDS, ROWS, STABILITY, STATES = "records.jsonl", "clients.parquet", "stability.safetensors", "clients"
# What may differ where a run goes on, besides what never counts; `num_rounds` may be raised.
_FREE = {"num_rounds", "round_timeout", "min_available"}
# What a run leaves when it ends, and the one that goes on leaves anew.
_ENDS = ("status.json", "model.safetensors", "examples.safetensors")


class NothingToDo(Exception):
    """The run that is to go on has finished; the message says so."""


@dataclass(frozen=True)
class Start:
    """Where a run starts: after a checkpoint, or, without one, from the beginning."""

    checkpoint: Checkpoint | None = None
    in_place: bool = False
    """Whether the run goes on in the folder that the checkpoint was taken in."""

    @property
    def round(self) -> int:
        """The last round done."""
        return 0 if self.checkpoint is None else self.checkpoint.round


def find_start(cfg: Mapping[str, Any], task: Task) -> Start:
    """Say where a checked configuration's run starts, and see to it that it can; nothing of a run is changed.

    With `resume=auto`, though, a run in `output_dir` that was cut short before its first checkpoint is moved aside.

    Raises
    ------
    ConfigError
        If `resume` names no checkpoint that can be used, or one of another configuration or model; the sentence names
        the first difference.
    NothingToDo
        If the run that it names has finished.
    OSError
        If another process is at work in the run that would be moved aside.
    """
    resume, own = cfg.get("resume"), Path(cfg["output_dir"])
    if resume is None:
        return Start()
    if resume == AUTO:
        checkpoint = newest(own / FOLDER)
        if checkpoint is None and list_checkpoints(own / FOLDER):
            checkpoint = _named(own)  # which says what is wrong with them
        if checkpoint is None:
            require_unused(own / FOLDER)
            reason = settle(own.resolve(), cfg, retry=True)
            if reason is not None:
                raise NothingToDo(f"Nothing to do in {own}: {reason}.")
            return Start()
    else:
        checkpoint = _named(Path(resume))
    _require_same(checkpoint, cfg, task)
    run = checkpoint.path.parent.parent
    whole = resume == AUTO or Path(resume).resolve() != checkpoint.path.resolve()
    if whole and checkpoint.path.parent.name == FOLDER and is_finished(run, cfg["num_rounds"]):
        raise NothingToDo(f"Nothing to do: the run in {run} has finished its {cfg['num_rounds']} rounds.")
    in_place = checkpoint.path.resolve().parent == (own / FOLDER).resolve()
    if in_place:
        try:
            require_in_line(checkpoint)
        except ValueError as error:
            raise ConfigError(f"resume={resume}: {error}") from error
    return Start(checkpoint, in_place=in_place)


def _named(path: Path) -> Checkpoint:
    """Return the checkpoint that `resume=path` names: the newest of a run's folder, or the folder of one itself."""
    try:
        if (path / FOLDER).is_dir():
            return find(path / FOLDER)
        return find(path)
    except DamagedCheckpoint as error:
        raise ConfigError(f"resume={path}: {error}") from error
    except ValueError as error:
        what = f"no {FOLDER}/round-NNNNNN in it, and it is no checkpoint itself" if path.is_dir() else "no such folder"
        damaged = list_checkpoints(path / FOLDER) or list_checkpoints(path)
        raise ConfigError(
            f"resume={path}: {error if damaged else f'there is no checkpoint ({what}); name the folder of a run.'}"
        ) from error


def same_configuration(checkpoint: Checkpoint, cfg: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key in which a checkpoint's configuration differs where it must not, and both values."""
    saved, given = (
        {key: value for key, value in comparable(tree).items() if key not in _FREE}
        for tree in (checkpoint.content["config"] or {}, as_json(cfg))
    )
    return first_difference(saved, given)


def resumable(folder: Path, cfg: Mapping[str, Any]) -> bool:
    """Say whether a run's folder holds a checkpoint that this configuration can go on from."""
    found = newest(folder / FOLDER)
    if found is None or same_configuration(found, cfg) is not None or found.round > cfg["num_rounds"]:
        return False
    client = cfg["client"]
    return not (client.get("ditto_lambda") or client.get("stale_update")) or _reaches(cfg, found)


def _reaches(cfg: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    return cfg["simulation"]["engine"] != "flower" and (checkpoint.path / f"{STATES}.json").exists()


def _require_same(checkpoint: Checkpoint, cfg: Mapping[str, Any], task: Task) -> None:
    found = same_configuration(checkpoint, cfg)
    if found is not None:
        key, saved, given = found
        raise ConfigError(
            f"the checkpoint {checkpoint.path} was taken with {key}={saved}, not {given}; resume with {key}={saved}, "
            "or start a new run."
        )
    if cfg["num_rounds"] < checkpoint.round:
        raise ConfigError(
            f"num_rounds={cfg['num_rounds']} is below the round of the checkpoint {checkpoint.path}; raise it to "
            f"{checkpoint.round} or more."
        )
    if not (checkpoint.path / RECORDS).exists():
        raise ConfigError(f"the checkpoint {checkpoint.path} is not that of a run of experiments.run.")
    model = task.new_model()
    try:
        require_same_model(checkpoint, LayerMap.from_module(model), ndarrays_to_parameters(get_arrays(model)))
    except ValueError as error:
        raise ConfigError(str(error)) from error


class RunCheckpoints:
    """Prepares a run's folder to go on from where it starts, and saves its checkpoints.

    Parameters
    ----------
    cfg : mapping
        The composed configuration.
    start : Start
    task : Task
    grid : Grid

    Raises
    ------
    ConfigError
        If the run goes on, and its clients' states cannot be restored on this grid.
    FileExistsError
        If the run starts from the beginning or from elsewhere, and the folder holds another one.
    OSError
        If the folder cannot be written, or another process is at work in it.
    """

    def __init__(self, cfg: Mapping[str, Any], start: Start, task: Task, grid: Grid) -> None:
        self._cfg = cfg
        self._start = start
        self._grid = grid if isinstance(grid, VirtualGrid) else None
        self._every = (cfg.get("checkpoint") or {}).get("every")
        self._output_dir = Path(cfg["output_dir"])
        self._metric = task.metric
        self._keeps_states = bool(task.personal or task.client.stale_update)
        self._folder: CheckpointFolder | None = None
        self._require_states()

    def __enter__(self) -> Self:
        """Make the run's folder what it was after the round to go on from, and claim its checkpoints' folder."""
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.close()

    def _prepare(self) -> None:
        start, path = self._start, self._output_dir / FOLDER
        if not start.in_place:
            self._require_free(path)
        if self._every is not None or start.in_place:
            keep = (self._cfg.get("checkpoint") or {}).get("keep", 1)
            self._folder = CheckpointFolder(path, keep=keep, metric=self._metric)
        if start.checkpoint is None:
            return
        if start.in_place:
            assert self._folder is not None
            self._folder.set_aside_after(start.round)
            _restore_in_place(self._output_dir, start.checkpoint)
        else:
            if self._folder is not None:  # so that this run, too, can be gone on with at once
                self._folder.adopt(start.checkpoint)
            self._output_dir.mkdir(parents=True, exist_ok=True)
            _copy(start.checkpoint.path / ROWS, self._output_dir / "clients.parquet")
            _copy(start.checkpoint.path / RECORDS, self._output_dir / "metrics.jsonl")
        logger.info("resuming from %s: round %d is done", start.checkpoint.path, start.round)

    def load(self, strategy: UpdateStrategy, stability: Stability) -> None:
        """Put back what was saved, but for the records."""
        checkpoint = self._start.checkpoint
        if checkpoint is None:
            return
        strategy.initial_parameters = checkpoint.parameters()
        try:
            strategy.load_state_dict(checkpoint.state())
        except ValueError as error:
            raise ConfigError(f"the checkpoint {checkpoint.path} does not fit this strategy: {error}") from error
        saved = safetensors.numpy.load_file(checkpoint.path / STABILITY)
        stability.load_state(saved, strategy.initial_parameters)
        if self._grid is not None and (checkpoint.path / f"{STATES}.json").exists():
            self._grid.restore_client_states(load_states(checkpoint.path))

    def saver(self, strategy: UpdateStrategy, stability: Stability, tracker: RunTracker) -> Callable[..., None] | None:
        """Return what saves a round that is due, given its number, the global model and the record; None: nothing."""
        every, folder = self._every, self._folder
        if every is None or folder is None:
            return None

        def save(number: int, parameters: Any, record: Mapping[str, Any]) -> None:
            if number % every and number != self._cfg["num_rounds"]:
                return

            def files(path: Path) -> None:
                tracker.copy_records(path / RECORDS, path / ROWS)
                safetensors.numpy.save_file(dict(stability.state()), path / STABILITY)
                states = {} if self._grid is None else self._grid.client_states()
                if states or (self._keeps_states and self._grid is not None):
                    save_states(path, states)

            value = record.get(self._metric)
            score = float(value) if is_real(value) else None
            folder.save(number, parameters, strategy, config=as_json(self._cfg), files=files, score=score)

        return save

    def _require_free(self, path: Path) -> None:
        """Refuse a folder that holds another run, or what is left of one."""
        there = list_checkpoints(path)
        ours = self._start.checkpoint is not None  # copies that were cut short before
        if (self._output_dir / "metrics.jsonl").exists() or (there and not ours):
            go_on = f", go on with that run by resume={AUTO}" if there else ""
            raise FileExistsError(
                f"{self._output_dir} holds an earlier run: choose another output_dir{go_on}, or move that run away."
            )

    def _require_states(self) -> None:
        if not self._keeps_states:
            return
        kept = "personal models (client.ditto_lambda)" if self._cfg["client"].get("ditto_lambda") else "stale models"
        checkpoint = self._start.checkpoint
        if self._grid is None and checkpoint is not None:
            raise ConfigError(
                f"clients keep {kept} from round to round, which cannot be restored on this engine; resume with "
                "simulation=ray or simulation=serial, or start a new run."
            )
        if checkpoint is not None and not (checkpoint.path / f"{STATES}.json").exists():
            raise ConfigError(
                f"the checkpoint {checkpoint.path} lacks the clients' {kept}, as its engine could not reach them; "
                "start a new run, with simulation=ray or simulation=serial if it is to be resumed."
            )
        if self._grid is None and self._every is not None:
            logger.warning(
                "clients keep %s from round to round, which this engine's checkpoints cannot hold: this run cannot be "
                "resumed",
                kept,
            )


# ---- a run's records ---------------------------------------------------------------------------------------------


def _restore_in_place(folder: Path, checkpoint: Checkpoint) -> None:
    """Take a run's records back to the checkpoint's; what is later is kept aside. Can be cut short and done again."""
    number = 1
    while list(folder.glob(f"*.aside{number}")):
        number += 1
    for name in _ENDS:  # status.json first: a run that goes on has not ended
        if (folder / name).exists():
            (folder / name).replace(folder / f"{name}.aside{number}")
    rows = folder / "clients.parquet"
    if rows.exists() and _goes_beyond(rows, checkpoint.round):
        rows.replace(folder / f"clients.parquet.aside{number}")
    _copy(checkpoint.path / ROWS, rows)
    records, kept = folder / "metrics.jsonl", (checkpoint.path / RECORDS).read_bytes()
    there = records.read_bytes() if records.exists() else b""
    beyond = there[len(kept) :] if there.startswith(kept) else there
    if beyond:
        _replace(folder / f"metrics.jsonl.aside{number}", beyond)
    _replace(records, kept)


def _goes_beyond(rows: Path, number: int) -> bool:
    try:
        last = pc.max(pq.read_table(rows, columns=["round"])["round"]).as_py()
    except (OSError, ValueError):  # damaged: kept aside as it is
        return True
    return last is not None and last > number


def _copy(source: Path, target: Path) -> None:
    """Copy a file in one step, where there is one."""
    if source.exists():
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.copyfile(source, temporary)
        temporary.replace(target)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


# ---- clients' states ---------------------------------------------------------------------------------------------


def save_states(folder: Path, states: Mapping[int, Sequence[PackedRecord]]) -> None:
    """Write what clients keep: records in `clients.json`, their bytes in `clients.safetensors`, each content once."""
    blobs: dict[str, np.ndarray] = {}
    numbers: dict[bytes, int] = {}

    def blob(data: Any) -> int:
        buffer = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        digest = hashlib.blake2b(np.ascontiguousarray(buffer).data).digest()
        if digest not in numbers:
            numbers[digest] = len(numbers)
            blobs[str(numbers[digest])] = buffer
        return numbers[digest]

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"blob": blob(value)}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    def entry(name: str, kind: str, payload: Any) -> list[Any]:
        if kind == "a":
            return [name, kind, [[*array[:4], blob(array[4])] for array in payload]]
        return [name, kind, [[key, plain(value)] for key, value in payload.items()]]

    listed = {str(partition): [entry(*record) for record in records] for partition, records in states.items()}
    (folder / f"{STATES}.json").write_text(json.dumps(listed) + "\n", encoding="utf-8")
    safetensors.numpy.save_file(blobs, folder / f"{STATES}.safetensors")


def load_states(folder: Path) -> dict[int, list[PackedRecord]]:
    """Read what `save_states` has written."""
    blobs = safetensors.numpy.load_file(folder / f"{STATES}.safetensors")
    listed = json.loads((folder / f"{STATES}.json").read_text(encoding="utf-8"))

    def value(saved: Any) -> Any:
        if isinstance(saved, dict):
            return blobs[str(saved["blob"])].tobytes()
        return [value(item) for item in saved] if isinstance(saved, list) else saved

    def record(name: str, kind: str, payload: list[Any]) -> PackedRecord:
        if kind == "a":
            arrays = [(key, dtype, tuple(shape), stype, blobs[str(i)]) for key, dtype, shape, stype, i in payload]
            return name, kind, arrays
        return name, kind, {key: value(saved) for key, saved in payload}

    return {int(partition): [record(*entry) for entry in records] for partition, records in listed.items()}
