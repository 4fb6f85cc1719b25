"""Checkpoints on disk: a folder for each, written whole or not at all, checked before it is used.

    round-000012/
        model.safetensors      the global model's tensors by name
        strategy.safetensors   what the strategy remembers: its state's `memory`
        state.json             everything else: format, round, names, dtypes and shapes, the rest of the state
        SHA256SUMS             of all files but the next, as `sha256sum -c` reads it
        score.json             what the model scored, where it was evaluated

A caller may add files of its own. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
from flwr.common import Parameters, ndarray_to_bytes
from safetensors import SafetensorError
from torch import Tensor

from .layers import Layer, LayerMap
from .options import is_count, is_integer, is_real, require
from .updates import Array, UnusableTensor, decode_all

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, MEMORY, STATE, SUMS, SCORE = (
    "model.safetensors",
    "strategy.safetensors",
    "state.json",
    "SHA256SUMS",
    "score.json",
)
_NAME = re.compile(r"round-(\d{6,})")
_LEFTOVER = re.compile(r"\.round-\d{6,}\.(tmp|old)")
_LOCK = ".lock"
_CHUNK = 2**20

# What may differ when a run goes on: where and how patiently it runs, and what does not change the model.
_FREE = {
    "self", "layers", "initial_parameters", "device", "wait_timeout", "max_failed_rounds", "min_available_clients",
    "fraction_evaluate", "min_evaluate_clients", "inplace", "partition_order",
}  # fmt: skip

Files = Callable[[Path], None]
"""Writes a caller's own files into the folder it is given."""


class DamagedCheckpoint(ValueError):
    """A checkpoint cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there and as they were written.

    Attributes
    ----------
    path : Path
        Its folder.
    content : mapping
        What its state.json holds.
    """

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Check a checkpoint, and read its state.json.

        Raises
        ------
        DamagedCheckpoint
            If a file is missing or not as it was written, or the format is another one.
        """
        try:
            _check_sums(path)
            content = json.loads((path / STATE).read_text(encoding="utf-8"))
        except DamagedCheckpoint:
            raise
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} is damaged: it lacks {Path(str(error.filename)).name}.") from error
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {STATE} is not JSON.") from error
        number = content.get("format") if isinstance(content, dict) else None
        if number != FORMAT:
            raise DamagedCheckpoint(
                f"{path} has format {number!r}, this version reads format {FORMAT}; resume with the version that "
                "wrote it."
            )
        lost = [
            key for key in ("round", "model", "layers", "class", "strategy", "options", "config") if key not in content
        ]
        if lost:
            raise DamagedCheckpoint(f"{path} is damaged: {STATE} lacks {lost[0]}.")
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) != content["round"]:
            raise DamagedCheckpoint(f"{path} holds round {content['round']}, so somebody has renamed it; name it so.")
        return cls(path, content)

    @property
    def round(self) -> int:
        """The round after which it was taken."""
        return int(self.content["round"])

    @property
    def strategy(self) -> str:
        """The class of the strategy that was saved."""
        return str(self.content["class"])

    @property
    def layers(self) -> LayerMap | None:
        """The `LayerMap` of the strategy that was saved; None where it had none."""
        saved = self.content["layers"]
        if saved is None:
            return None
        return LayerMap(
            tuple(saved["names"]),
            tuple(tuple(shape) for shape in saved["shapes"]),
            tuple(saved["kinds"]),
            tuple(Layer(name, tuple(tensors), size) for name, tensors, size in saved["layers"]),
        )

    def parameters(self) -> Parameters:
        """Return the global model, its tensors in the order and the dtypes in which they were exchanged."""
        try:
            tensors = safetensors.numpy.load_file(self.path / MODEL)
            arrays = [tensors[name].astype(np.dtype(dtype), copy=False) for name, dtype, _ in self.content["model"]]
        except (SafetensorError, KeyError, OSError) as error:
            raise DamagedCheckpoint(f"{self.path} is damaged: {MODEL} cannot be read ({error}).") from error
        return Parameters([ndarray_to_bytes(array) for array in arrays], "numpy.ndarray")

    def state(self) -> dict[str, Any]:
        """Return the strategy's state, as its `load_state_dict` takes it."""
        try:
            memory = safetensors.torch.load_file(self.path / MEMORY)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{self.path} is damaged: {MEMORY} cannot be read ({error}).") from error
        return {**self.content["strategy"], "memory": memory}

    def score(self, metric: str) -> float | None:
        """Return what the model scored in a metric, where that is known."""
        try:
            found = json.loads((self.path / SCORE).read_text(encoding="utf-8"))
            value = found["value"] if found["metric"] == metric else None
        except (OSError, ValueError, LookupError, TypeError):  # it only decides what is kept
            return None
        return float(value) if is_real(value) else None


class CheckpointFolder:
    """The checkpoints of one run.

    Parameters
    ----------
    path : Path
        Created where missing.
    keep : int
        How many of the newest are kept; the best is kept besides.
    metric : str
        What the best is the best in; see `lower_is_better`.

    Raises
    ------
    OSError
        If the folder cannot be made or written, or another process is at work in it; one sentence.
    """

    def __init__(self, path: Path, *, keep: int, metric: str) -> None:
        self.path = Path(path)
        self.metric = metric
        self._keep = keep
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OSError(
                f"checkpoints cannot be written to {self.path} ({error.strerror or error}); choose another folder, or "
                "make this one writable."
            ) from error
        self.close = weakref.finalize(self, _let_go, _hold(lock, self.path))
        """Let go of the folder; done, too, when this object is."""
        for entry in list(self.path.iterdir()):
            if _LEFTOVER.fullmatch(entry.name):  # of a writer that was killed
                shutil.rmtree(entry, ignore_errors=True)

    def save(
        self,
        number: int,
        parameters: Parameters,
        strategy: Any,
        *,
        config: Mapping[str, Any] | None = None,
        files: Files | None = None,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint, then let go of those that are not to be kept.

        Parameters
        ----------
        number : int
            The round it is taken after.
        parameters : Parameters
            The global model.
        strategy : object
            With `state_dict()`; its `layers`, where it has any, name the tensors.
        config : mapping, optional
            What has to agree when the run goes on, JSON.
        files : callable, optional
            Writes files of the caller's own into the folder it is given.
        score : float, optional
            What the model scored in `metric`.

        Raises
        ------
        OSError
            If it cannot be written: one sentence. Older ones are as they were.
        ValueError
            If the model or the state holds what cannot be saved.
        """
        final = self.path / f"round-{number:06d}"
        temporary = self.path / f".{final.name}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            _write(temporary, number, parameters, strategy, config)
            if files is not None:
                files(temporary)
            _seal(temporary)
            if score is not None:
                _write_json(temporary / SCORE, {"metric": self.metric, "value": score})
                _sync(temporary / SCORE)
            self._put(temporary, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise OSError(
                f"the checkpoint of round {number} cannot be written to {self.path} ({reason}); older ones are "
                "untouched: make room or the folder writable, and resume from there."
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()
        return final

    def note(self, number: int, score: float) -> None:
        """Say what the model of a round scored, where that has a checkpoint; what is known already stays."""
        path = self.path / f"round-{number:06d}"
        if not path.is_dir() or Checkpoint(path, {}).score(self.metric) is not None:
            return
        temporary = path / f".{SCORE}.tmp"
        try:
            _write_json(temporary, {"metric": self.metric, "value": score})
            _sync(temporary)
            temporary.replace(path / SCORE)
        except OSError as error:
            logger.warning("%s: its score cannot be noted (%s), so it may not be kept as the best", path, error)
            return
        self._prune()

    def adopt(self, checkpoint: Checkpoint) -> Checkpoint:
        """Copy a checkpoint of another folder into this one, with its older siblings, as far as they are good."""
        for number, path in reversed(list_checkpoints(checkpoint.path.parent)):
            try:
                if number <= checkpoint.round:
                    self._copy(checkpoint if path == checkpoint.path else Checkpoint.open(path))
            except DamagedCheckpoint as error:
                logger.warning("not copied: %s", error)
        if not (copied := self.path / f"round-{checkpoint.round:06d}").exists():
            self._copy(checkpoint)  # in a folder of another name
        self._prune()
        return Checkpoint.open(copied)

    def set_aside_after(self, number: int) -> None:
        """Rename every checkpoint of a later round: a run that goes on from this one will write its own."""
        for later, path in list_checkpoints(self.path):
            if later > number:
                _set_aside(path)

    def _copy(self, checkpoint: Checkpoint) -> None:
        final = self.path / f"round-{checkpoint.round:06d}"
        temporary = self.path / f".{final.name}.tmp"
        if final.exists():  # by a copy that was cut short
            return
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(checkpoint.path, temporary)
            for entry in temporary.iterdir():
                _sync(entry)
            self._put(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"{checkpoint.path} cannot be copied to {self.path}: {error.strerror or error}.") from error

    def _put(self, temporary: Path, final: Path) -> None:
        _sync(temporary)
        if final.exists():
            _set_aside(final)
        temporary.replace(final)
        _sync(self.path)

    def _prune(self) -> None:
        """Remove all but the newest and the best."""
        found = list_checkpoints(self.path)
        scores = [(number, Checkpoint(path, {}).score(self.metric)) for number, path in found]
        sign = -1 if lower_is_better(self.metric) else 1
        scored = [(sign * value, number) for number, value in scores if value is not None]
        kept = {number for number, _ in found[: self._keep]} | {number for _, number in sorted(scored)[-1:]}
        for number, path in found:
            if number not in kept:
                # Renamed first: one that is removed by half must not look like one that is damaged.
                doomed = path.with_name(f".{path.name}.old")
                try:
                    path.replace(doomed)
                    shutil.rmtree(doomed)
                except OSError as error:
                    logger.warning("%s, which is not needed any more, cannot be removed (%s)", path, error)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder and their rounds, newest first, unchecked."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    found = [(int(name[1]), entry) for entry in entries if (name := _NAME.fullmatch(entry.name)) and entry.is_dir()]
    return sorted(found, reverse=True)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint in a folder that can be used, None if there is none; log those that cannot."""
    for _, path in list_checkpoints(folder):
        try:
            return Checkpoint.open(path)
        except DamagedCheckpoint as error:
            logger.warning("passed over: %s", error)
    return None


def find(path: Path) -> Checkpoint:
    """Return the checkpoint that a path names: itself, or the newest usable one in that folder.

    Raises
    ------
    ValueError
        If there is none, or none that can be used; one sentence.
    """
    if (path / STATE).exists() or (_NAME.fullmatch(path.name) and path.is_dir()):
        return Checkpoint.open(path)
    found = newest(path)
    if found is not None:
        return found
    damaged = list_checkpoints(path)
    if damaged:
        raise ValueError(f"none of the {len(damaged)} checkpoints in {path} can be used; {_why(damaged[0][1])}")
    raise ValueError(f"there is no checkpoint in {path}: no folder round-NNNNNN, and no {STATE}.")


def _why(path: Path) -> str:
    try:
        Checkpoint.open(path)
    except DamagedCheckpoint as error:
        return str(error)
    return ""


def require_in_line(checkpoint: Checkpoint) -> None:
    """Raise ValueError, in one sentence, if a run cannot go on in place from a checkpoint that was set aside."""
    if not _NAME.fullmatch(checkpoint.path.name):
        raise ValueError(
            f"{checkpoint.path} was set aside, and others took its place: go on from it in another folder, or move "
            f"those away and rename it to round-{checkpoint.round:06d}."
        )


def require_unused(folder: Path) -> None:
    """Raise OSError, in one sentence, if another process is at work in a folder of checkpoints."""
    if _holds(folder):
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:  # nobody has ever been
        return
    try:
        _claim(lock, folder)
    finally:
        os.close(lock)


def lower_is_better(metric: str) -> bool:
    """Say of a metric whether less of it is better: losses, errors and distances; else more is."""
    return any(word in metric for word in ("loss", "error", "hd95"))


def require_same_model(checkpoint: Checkpoint, layers: LayerMap | None, parameters: Parameters | None) -> None:
    """Raise ValueError unless a model has the saved one's tensors, naming the first that differs.

    Parameters
    ----------
    layers : LayerMap, optional
        The tensors' names, shapes and layers.
    parameters : Parameters, optional
        Their shapes and dtypes. With neither there is nothing to compare.
    """
    saved = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in checkpoint.content["model"]]
    where, advice = checkpoint.path, "resume with the model that was saved."
    arrays: Sequence[Array] | None = None if parameters is None else _decoded(parameters)
    if layers is None and arrays is None:
        return
    names = layers.names if layers is not None else tuple(f"tensor{i}" for i in range(len(arrays or ())))
    shapes = [a.shape for a in arrays] if arrays is not None else list(layers.shapes if layers else ())
    dtypes = [a.dtype for a in arrays] if arrays is not None else [dtype for _, dtype, _ in saved]
    for (name, dtype, shape), its, other, its_dtype in zip(saved, names, shapes, dtypes, strict=False):
        if name != its:
            raise ValueError(f"{where} holds a tensor {name!r} where this model has {its!r}; {advice}")
        if shape != tuple(other):
            raise ValueError(f"{where} holds {name!r} in shape {shape}, this model has {tuple(other)}; {advice}")
        if dtype != its_dtype:
            raise ValueError(f"{where} holds {name!r} as {dtype}, this model as {its_dtype}; {advice}")
    if len(saved) != len(names):
        raise ValueError(f"{where} holds {len(saved)} tensors, this model has {len(names)}; {advice}")
    theirs = checkpoint.layers
    if layers is not None and theirs is not None:
        for one, two in zip(theirs.layers, layers.layers, strict=False):
            if one != two:
                raise ValueError(f"{where} has a layer {one.name!r} that this LayerMap groups otherwise; {advice}")


def options_of(strategy: Any) -> dict[str, Any]:
    """Return the options that make a strategy what it is, as JSON holds them: what has to agree when a run goes on.

    They are the keywords of its constructor whose values are numbers, strings, booleans, None or lists of these,
    `seed` and `fraction_fit` among them. Left out is what does not change the model: device, wait_timeout,
    max_failed_rounds, min_available_clients, fraction_evaluate, min_evaluate_clients, and all functions.
    """
    names = {
        name
        for base in type(strategy).__mro__
        if "__init__" in vars(base) and base is not object
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    sampler = getattr(strategy, "sampler", None)
    found = {}
    for name in sorted(names - _FREE):
        usable, value = _plain(getattr(strategy, name, getattr(sampler, name, None)))
        if usable:
            found[name] = value
    return found


def first_difference(saved: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key, by its dotted name, in which two nested mappings differ, with both values.

    A key that only one of them has counts as None.
    """
    one, other = flat(saved), flat(given)
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            return key, one.get(key), other.get(key)
    return None


def as_json(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it will be read back: tuples as lists, and what is not finite as text.

    Raises
    ------
    ValueError
        If it holds what JSON does not.
    """
    found: dict[str, Any] = json.loads(json.dumps(_finite(tree), allow_nan=False))
    return found


def _finite(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    usable, value = _plain(tree)
    if not usable:
        raise ValueError(f"a configuration cannot hold {tree!r}: use numbers, texts, true or false, None, and lists.")
    return value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` of a nested mapping."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


# ---- writing and checking files ------------------------------------------------------------------------------------


def _write(folder: Path, number: int, parameters: Parameters, strategy: Any, config: Mapping[str, Any] | None) -> None:
    arrays = _decoded(parameters)
    layers = getattr(strategy, "layers", None)
    layers = layers if isinstance(layers, LayerMap) else None
    names = layers.names if layers is not None else [f"tensor{i}" for i in range(len(arrays))]
    require("the global model", len(arrays), f"of {len(names)} tensors, as its LayerMap", len(arrays) == len(names))
    state = dict(strategy.state_dict())
    memory: Mapping[str, Tensor] = state.pop("memory", {})
    content = {
        "format": FORMAT,
        "round": number,
        "model": [[name, array.dtype.str, list(array.shape)] for name, array in zip(names, arrays, strict=True)],
        "layers": None if layers is None else _layers(layers),
        "class": type(strategy).__name__,
        "strategy": state,
        "options": options_of(strategy),
        "config": None if config is None else dict(config),
    }
    # As safetensors takes them: it would write the columns of others for their rows.
    tensors = {name: np.asarray(array, order="C") for name, array in zip(names, arrays, strict=True)}
    if "__metadata__" in tensors:
        raise ValueError("a tensor called '__metadata__' cannot be saved, as safetensors means something else by it.")
    safetensors.numpy.save_file(tensors, folder / MODEL)
    safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in memory.items()}, folder / MEMORY)
    try:
        _write_json(folder / STATE, content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of {type(strategy).__name__} cannot be saved: {error}.") from error


def _layers(layers: LayerMap) -> dict[str, Any]:
    return {
        "names": layers.names,
        "shapes": layers.shapes,
        "kinds": layers.kinds,
        "layers": [[layer.name, layer.tensors, layer.size] for layer in layers.layers],
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    # The order of keys is part of some strategies' state.
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def _seal(folder: Path) -> None:
    """Note the checksums of all files, and see all of it to the disk."""
    names = sorted(entry.name for entry in folder.iterdir())
    mode = (folder / STATE).stat().st_mode
    for name in names:
        (folder / name).chmod(mode)  # safetensors makes files that only their owner can read
        _sync(folder / name)
    (folder / SUMS).write_text("".join(f"{_digest(folder / name)}  {name}\n" for name in names), encoding="utf-8")
    _sync(folder / SUMS)


def _check_sums(folder: Path) -> None:
    sums = {}
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if not name or Path(name).name != name:
            raise DamagedCheckpoint(f"{folder} is damaged: {SUMS} cannot be read.")
        sums[name] = digest
    for name in (MODEL, MEMORY, STATE):
        if name not in sums:
            raise DamagedCheckpoint(f"{folder} is damaged: {SUMS} lacks {name}.")
    for name, digest in sums.items():
        if _digest(folder / name) != digest:
            raise DamagedCheckpoint(f"{folder} is damaged: {name} is not as it was written (its checksum differs).")


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _sync(path: Path) -> None:
    """See a file, or a folder's entries, to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.aside{number}")).exists():
        number += 1
    path.replace(aside)
    logger.warning("%s was moved to %s", path, aside.name)
    return aside


_held: dict[Path, list[int]] = {}
"""The folders that this process keeps others out of: the lock file's descriptor, for how many, and the process."""


def _holds(folder: Path) -> bool:
    held = _held.get(folder.resolve())
    return held is not None and held[2] == os.getpid()  # not in a fork of it


def _hold(lock: int, folder: Path) -> Path:
    """Keep other processes out of a folder, until `_let_go` has been called as often; take over its lock file."""
    key = folder.resolve()
    if _holds(folder):
        os.close(lock)
        _held[key][1] += 1
        return key
    try:
        _claim(lock, folder)
    except OSError:
        os.close(lock)
        raise
    _held[key] = [lock, 1, os.getpid()]
    return key


def _let_go(key: Path) -> None:
    held = _held[key]
    held[1] -= 1
    if not held[1]:
        del _held[key]
        os.close(held[0])


def _claim(lock: int, folder: Path) -> None:
    """Keep other processes out of a folder for as long as its lock file is open; kill -9 ends that, too."""
    try:
        import fcntl
    except ImportError:  # no POSIX: nobody is kept out
        return
    try:
        # Not lockf, whose locks end with the first of the process's descriptors of the file that is closed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise OSError(f"another process is at work in {folder}; wait for it, or choose another folder.") from error
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): see that no other process writes there", folder, error)


def _decoded(parameters: Parameters) -> list[Array]:
    try:
        return decode_all(parameters)
    except UnusableTensor as error:
        raise ValueError(f"the global model cannot be read: {error}.") from error


def _plain(value: Any) -> tuple[bool, Any]:
    """Return whether JSON can hold an option's value, and how it does."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return True, str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return True, value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return all(usable for usable, _ in items), [item for _, item in items]
    return False, None


def check_counts(every: object, keep: object, num_rounds: object) -> None:
    """Raise ValueError unless these say when to save, and how many to keep."""
    require("every", every, "an integer of at least 1", is_count(every))
    require("keep", keep, "an integer of at least 1", is_count(keep))
    wanted = "the number of all rounds, an integer of at least 1, or None"
    require("num_rounds", num_rounds, wanted, num_rounds is None or (is_integer(num_rounds) and num_rounds >= 1))
