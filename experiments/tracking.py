"""What a run leaves behind: its configuration, one record per round, per-client results, the final model."""

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from safetensors.torch import save_file
from torch import Tensor

from client_apps.tasks.base import Example

from .examples import FILE, save_examples
from .headline import HEADLINES

# A Parquet file cannot be appended to, so it is rewritten whole: rarely enough to cost nothing, often enough
# that a killed process loses little.
_REWRITE_SECONDS = 30.0
# Without a terminal: about this many lines a run, and a sign of life in between.
_PLAIN_LINES = 20
_PLAIN_SECONDS = 60.0
_EVALUATION = {
    **{known.name: f"  {known.title} {{:.1%}}" for known in HEADLINES},
    **{known.personal: "  personal {:.1%}" for known in HEADLINES},
    "worst10": "  worst10 {:.1%}",
    "hd95": "  HD95 {:.1f} mm",
    "loss": "  loss {:.3f}",
}
_SOLVE = {
    "conflict_share_before": "  conflict {:.0%}",
    "conflict_share_after": " → {:.0%}",
    "clients_accepted": "  clients {}",
    "clients_sampled": "/{}",
}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` in one step, so that no crash leaves half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def one_line(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _plain(name: str, value: Any) -> bool | int | float | str | None:
    """Return ``value`` as strict JSON can hold it: NumPy and torch scalars unwrapped, NaN and Inf as None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(
        f"Metric {name!r} is a {type(value).__name__}, but a round holds numbers, strings, booleans and None."
    )


class _Display:
    """A live progress bar in a terminal, now and then a line elsewhere."""

    def __init__(self, num_rounds: int, console: Console) -> None:
        self.num_rounds = num_rounds
        self.console = console
        self.printed = time.monotonic()
        self.evaluated = (0, "")  # the latest evaluation's round and text
        self.bar = Progress(
            TextColumn("round", table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            # In a narrow terminal the metrics give way, the last ones first, not the round.
            TextColumn("{task.fields[summary]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=num_rounds, summary="")

    def update(self, record: Mapping[str, Any]) -> None:
        done = record["round"]
        if record.get("error"):
            return  # the error itself is on its way to the person
        if evaluation := _texts(record, _EVALUATION):
            self.evaluated = (done, evaluation)
        measured, summary = self.evaluated
        if summary and measured != done:
            summary += f" (round {measured})"
        summary += _texts(record, _SOLVE)
        if self.console.is_terminal:
            self.bar.update(self.task, completed=done, summary=summary.strip())
            return
        due = done % max(1, self.num_rounds // _PLAIN_LINES) == 0 or done == self.num_rounds
        if due or time.monotonic() - self.printed > _PLAIN_SECONDS:
            self.printed = time.monotonic()
            line = f"round {done:>{len(str(self.num_rounds))}}/{self.num_rounds} {record['seconds']:7.1f} s"
            self.console.print(line + summary, highlight=False, markup=False, soft_wrap=True)

    def go_on(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Show where a run goes on, given the records of before."""
        for record in records:
            if evaluation := _texts(record, _EVALUATION):
                self.evaluated = (record["round"], evaluation)
        if records and self.console.is_terminal:
            self.bar.update(self.task, completed=records[-1]["round"])

    def close(self, status: str, folder: Path) -> None:
        # On a line of its own, so that it can be copied.
        text = f"{status}{self.evaluated[1]}; results in\n{folder}"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _texts(record: Mapping[str, Any], forms: Mapping[str, str]) -> str:
    return "".join(form.format(record[name]) for name, form in forms.items() if record.get(name) is not None)


class RunTracker:
    """Write a run's folder while the run goes on; use it as a context manager.

    ========================  ========================================================================
    ``config.yaml``           the composed configuration
    ``metrics.jsonl``         one line of strict JSON per round, complete and flushed
    ``clients.parquet``       one row per evaluated client and round, see `log_clients`
    ``model.safetensors``     the final model, see `save_model`
    ``examples.safetensors``  what it makes of some test subjects, see `save_examples`
    ``events.out.*``          TensorBoard scalars
    ``status.json``           on leaving the context: status ("finished" or "failed"), error (one line or
                              null), seconds, and rounds, the last one logged
    ========================  ========================================================================

    Parameters
    ----------
    output_dir : Path
        The run's folder, created where missing; it must not hold another run.
    config : mapping
        The composed configuration as plain containers.
    num_rounds : int
        Rounds the run is going to take.
    tensorboard : bool
        Also write TensorBoard events, one scalar per numeric metric.
    progress : bool
        Show a progress bar, or where the console is no terminal, about twenty lines per run.
    metric : str
        Name of the headline metric, of which `log_clients` gets the clients' values.
    goes_on : bool
        Whether the folder holds the records of the rounds before, to be continued: rounds, clients and seconds.
    console : rich.console.Console, optional
        Where progress goes; standard output by default.

    Raises
    ------
    FileExistsError
        On entering the context, if the folder already holds a run, and this one is not to go on with it. Nothing is
        overwritten.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        config: Mapping[str, Any],
        num_rounds: int,
        tensorboard: bool,
        progress: bool,
        metric: str = "accuracy",
        goes_on: bool = False,
        console: Console | None = None,
    ) -> None:
        self.output_dir = Path(output_dir)
        self._config = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        self._writer: Any = None
        self._tensorboard = tensorboard
        self._display = _Display(num_rounds, console or Console()) if progress else None
        self._last_round = 0
        self._goes_on = goes_on
        whole, real = pa.int32(), pa.float32()
        self._schema = pa.schema(
            {"round": whole, "client": whole, "num_examples": whole, metric: real, "loss": real}.items()
        )
        self._clients: list[pa.Table] = []

    def __enter__(self) -> Self:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / "metrics.jsonl"
        with ExitStack() as opened:
            before = self._records_before(path) if self._goes_on else []
            try:
                self._lines = opened.enter_context(path.open("a" if self._goes_on else "x", encoding="utf-8"))
            except FileExistsError:
                raise FileExistsError(
                    f"{path} holds an earlier run: choose another output_dir, or move that run away."
                ) from None
            with _replacing(self.output_dir / "config.yaml") as temporary:
                temporary.write_text(self._config, encoding="utf-8")
            if self._tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import, and not every run wants it

                # Of earlier events, some may be of rounds that are run again, and the last ones may be lost: all of
                # them are struck out, and written anew.
                again = 0 if before else None
                self._writer = opened.enter_context(SummaryWriter(str(self.output_dir), purge_step=again))
                for row in before:
                    self._add_scalars(row)
            if self._display:
                opened.enter_context(self._display.bar)
                self._display.go_on(before)
            self._opened = opened.pop_all()
        self._round_start = self._rewritten = time.monotonic()
        self._start = self._round_start
        if before:
            self._start -= float(before[-1].get("seconds") or 0.0)
            self._last_round = before[-1]["round"]
        return self

    def _records_before(self, path: Path) -> list[dict[str, Any]]:
        """Read what the rounds before have left."""
        rows = self.output_dir / "clients.parquet"
        if rows.exists():
            self._clients = [pq.read_table(rows)]
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:  # closed whatever happens to the last writes
            self._write_clients()
            status = {
                "status": "finished" if error is None else "failed",
                "error": None if error is None else one_line(error),
                "seconds": time.monotonic() - self._start,
                "rounds": self._last_round,
            }
            with _replacing(self.output_dir / "status.json") as temporary:
                temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
        if self._display:
            self._display.close(str(status["status"]), self.output_dir.resolve())

    def log_round(self, record: Mapping[str, Any]) -> None:
        """Write one round; ``seconds`` since the start and ``round_seconds`` are added.

        Parameters
        ----------
        record : mapping of str to bool, int, float, str or None
            ``round`` (0 for the initial model) and the metrics; NaN and Inf are written as null.

        Raises
        ------
        KeyError
            If ``round`` is missing.
        TypeError
            If a value is of another type.
        """
        now = time.monotonic()
        timing = {"seconds": now - self._start, "round_seconds": now - self._round_start}
        row = {"round": record["round"], **record, **timing}
        row = {name: _plain(name, value) for name, value in row.items()}
        self._lines.write(json.dumps(row, allow_nan=False) + "\n")
        self._lines.flush()
        self._round_start = now
        self._last_round = row["round"]
        if self._writer:
            self._add_scalars(row)
        if self._display:
            self._display.update(row)

    def _add_scalars(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "round" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["round"])

    def log_clients(
        self,
        round: int,
        client_ids: ArrayLike,
        num_examples: ArrayLike,
        scores: ArrayLike,
        loss: ArrayLike,
        details: Mapping[str, ArrayLike] = MappingProxyType({}),
    ) -> None:
        """Add one row per client to ``clients.parquet``.

        Its columns are round, client, num_examples (int32), the headline metric by its name, loss, and the details
        (float32). It is complete once the context is left, with or without an exception, and in between as of the last
        half minute.

        Parameters
        ----------
        round : int
            The round these results belong to.
        client_ids, num_examples, scores, loss : array_like, shape (n,)
            One entry per client; NaN where a client has no test data.
        details : mapping of str to array_like, each of shape (n,)
            Further columns of the same kind, of the same names in every call.

        Raises
        ------
        ValueError
            If the names of the details are not those of the first call, or one is that of another column.
        """
        ids = np.asarray(client_ids)
        columns = (np.full(len(ids), round), ids, num_examples, scores, loss)
        names = [*self._schema.names, *details]
        expected = self._clients[0].column_names if self._clients else list(dict.fromkeys(names))
        if names != expected:
            raise ValueError(
                f"clients.parquet has the columns {', '.join(expected)}, but round {round} brings {', '.join(names)}: "
                "the task's details must have the same names in every round, each one its own."
            )
        arrays = [np.asarray(column) for column in (*columns, *details.values())]
        schema = pa.schema([*self._schema, *((name, pa.float32()) for name in details)])
        self._clients.append(pa.table(dict(zip(names, arrays, strict=True)), schema=schema))
        if time.monotonic() - self._rewritten > _REWRITE_SECONDS:
            self._write_clients()

    def _write_clients(self) -> None:
        if self._clients:
            with _replacing(self.output_dir / "clients.parquet") as temporary:
                pq.write_table(pa.concat_tables(self._clients), temporary)
        self._rewritten = time.monotonic()

    def copy_records(self, rounds: Path, clients: Path) -> None:
        """Write what ``metrics.jsonl`` and ``clients.parquet`` hold so far to other files; no rows, no second file."""
        shutil.copyfile(self.output_dir / "metrics.jsonl", rounds)
        if self._clients:
            pq.write_table(pa.concat_tables(self._clients), clients)

    def save_examples(self, examples: Sequence[Example]) -> None:
        """Write what the final model makes of some test subjects to ``examples.safetensors``."""
        with self._replacing_tensors(FILE) as temporary:
            save_examples(temporary, examples)

    def save_model(self, state: Mapping[str, Tensor]) -> None:
        """Write the final model, e.g. a ``state_dict()``, to ``model.safetensors``."""
        # clone: safetensors refuses tied weights and views of one storage
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
        with self._replacing_tensors("model.safetensors") as temporary:
            save_file(tensors, temporary)

    @contextmanager
    def _replacing_tensors(self, name: str) -> Iterator[Path]:
        with _replacing(self.output_dir / name) as temporary:
            yield temporary
            temporary.chmod((self.output_dir / "config.yaml").stat().st_mode)  # as readable as the other files
