"""What a run leaves behind, also when it fails."""

import io
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from flwr.common import FitIns, Parameters
from flwr.server.strategy import Strategy
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.tracked_strategy import TrackedStrategy
from experiments.tracking import RunTracker

CONFIG = {"seed": 3, "strategy": {"_target_": "strategies.CRAFT", "server_lr": 0.1}, "dataset": {"name": "digits"}}


def tracker(folder, *, num_rounds=2, tensorboard=False, progress=False, console=None):
    return RunTracker(
        folder,
        config=CONFIG,
        num_rounds=num_rounds,
        tensorboard=tensorboard,
        progress=progress,
        console=console,
    )


def records(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def status(folder):
    return json.loads((folder / "status.json").read_text(encoding="utf-8"))


def test_a_finished_run(tmp_path):
    with tracker(tmp_path / "run") as run:
        run.log_round({"round": 0, "accuracy": 0.1})
        run.log_round({"round": 1, "accuracy": np.float64(0.5), "failed_round": False, "reasons": "[]"})
    folder = tmp_path / "run"
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == CONFIG
    first, second = records(folder)
    assert (first["round"], second["round"]) == (0, 1)
    assert second["accuracy"] == 0.5
    assert second["failed_round"] is False
    assert second["reasons"] == "[]"
    assert second["seconds"] == pytest.approx(first["round_seconds"] + second["round_seconds"])
    assert status(folder) == {"status": "finished", "error": None, "seconds": pytest.approx(0, abs=60), "rounds": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "status.json"]


def test_each_line_is_complete_while_the_run_goes_on(tmp_path):
    with tracker(tmp_path) as run:
        for number in range(3):
            run.log_round({"round": number})
            assert [record["round"] for record in records(tmp_path)] == list(range(number + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_values_that_json_lacks_become_null(tmp_path, value):
    with tracker(tmp_path) as run:
        run.log_round({"round": 1, "loss": value})
    assert records(tmp_path)[0]["loss"] is None


def test_a_metric_of_another_type_is_named(tmp_path):
    with tracker(tmp_path) as run, pytest.raises(TypeError, match="'blob' is a bytes"):
        run.log_round({"round": 1, "blob": b""})


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    with tracker(tmp_path) as run:
        run.log_round({"round": 1, "accuracy": 0.5})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="choose another output_dir"), tracker(tmp_path):
        pass
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_exception_leaves_a_failed_status_and_the_results_so_far(tmp_path):
    def fail():
        with tracker(tmp_path) as run:
            run.log_clients(1, [4, 2], [10, 20], [0.5, math.nan], [1.0, math.nan])
            run.log_round({"round": 1})
            raise RuntimeError("the solver\ndiverged")

    with pytest.raises(RuntimeError, match="diverged"):
        fail()
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["error"] == "RuntimeError: the solver diverged"
    assert status(tmp_path)["rounds"] == 1
    assert pq.read_table(tmp_path / "clients.parquet")["client"].to_pylist() == [4, 2]


def test_clients_parquet(tmp_path):
    with tracker(tmp_path) as run:
        run.log_clients(1, [0, 1], [10, 20], [0.5, 0.25], [1.0, 2.0])
        run.log_clients(2, np.array([1, 2]), np.array([20, 30]), torch.tensor([0.75, 1.0]), np.array([0.5, 0.0]))
    table = pq.read_table(tmp_path / "clients.parquet")
    assert {field.name: str(field.type) for field in table.schema} == {
        "round": "int32",
        "client": "int32",
        "num_examples": "int32",
        "accuracy": "float",
        "loss": "float",
    }
    assert table.to_pydict() == {
        "round": [1, 1, 2, 2],
        "client": [0, 1, 1, 2],
        "num_examples": [10, 20, 20, 30],
        "accuracy": [0.5, 0.25, 0.75, 1.0],
        "loss": [1.0, 2.0, 0.5, 0.0],
    }


def test_the_clients_column_is_named_after_the_metric(tmp_path):
    with RunTracker(tmp_path, config=CONFIG, num_rounds=1, tensorboard=False, progress=False, metric="dice") as run:
        run.log_clients(1, [0], [10], [0.5], [1.0])
    table = pq.read_table(tmp_path / "clients.parquet")
    assert table.to_pydict() == {"round": [1], "client": [0], "num_examples": [10], "dice": [0.5], "loss": [1.0]}


def test_details_are_further_columns(tmp_path):
    with RunTracker(tmp_path, config=CONFIG, num_rounds=2, tensorboard=False, progress=False, metric="dice") as run:
        for number in (1, 2):
            details = {"dice_wt": np.array([0.75, math.nan]), "hd95_wt": [number, 2.5]}
            run.log_clients(number, [0, 1], [10, 20], [0.5, 0.25], [1.0, 2.0], details)
    table = pq.read_table(tmp_path / "clients.parquet")
    assert table.column_names == ["round", "client", "num_examples", "dice", "loss", "dice_wt", "hd95_wt"]
    assert [str(table.schema.field(name).type) for name in ("dice_wt", "hd95_wt")] == ["float", "float"]
    np.testing.assert_array_equal(table["dice_wt"].to_numpy(), [0.75, math.nan] * 2)
    assert table["hd95_wt"].to_pylist() == [1, 2.5, 2, 2.5]


@pytest.mark.parametrize("details", [{}, {"b": [0.5]}, {"a": [0.5], "b": [0.5]}])
def test_the_columns_of_a_run_stay_the_same(tmp_path, details):
    with tracker(tmp_path) as run:
        run.log_clients(1, [0], [10], [0.5], [1.0], {"a": [0.5]})
        with pytest.raises(ValueError, match="columns round, client, num_examples, accuracy, loss, a, but round 2 bri"):
            run.log_clients(2, [0], [10], [0.5], [1.0], details)
    assert pq.read_table(tmp_path / "clients.parquet").num_rows == 1


def test_a_detail_does_not_take_the_name_of_another_column(tmp_path):
    with tracker(tmp_path) as run, pytest.raises(ValueError, match="each one its own"):
        run.log_clients(1, [0], [10], [0.5], [1.0], {"loss": [0.5]})


def test_clients_parquet_is_complete_at_every_rewrite(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.tracking._REWRITE_SECONDS", -1.0)  # always due
    with tracker(tmp_path) as run:
        for number in (1, 2, 3):
            run.log_clients(number, [0, 1], [10, 20], [0.5, 0.25], [1.0, 2.0])
            assert pq.read_table(tmp_path / "clients.parquet").num_rows == 2 * number


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    def interrupted(tensors, path):
        path.write_bytes(b"half a mod")
        raise OSError("No space left on device")

    with tracker(tmp_path) as run:
        run.save_model({"weight": torch.ones(2)})
        monkeypatch.setattr("experiments.tracking.save_file", interrupted)
        with pytest.raises(OSError, match="No space"):
            run.save_model({"weight": torch.zeros(2)})
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [1, 1]
    assert not list(tmp_path.glob(".*"))


def test_the_model_survives_tied_and_transposed_tensors(tmp_path):
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {"embed": weight, "head": weight, "transposed": weight.T, "count": torch.tensor(7)}
    with tracker(tmp_path) as run:
        run.save_model(state)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())


def test_tensorboard_gets_every_numeric_metric(tmp_path):
    with tracker(tmp_path, tensorboard=True) as run:
        run.log_round({"round": 0, "accuracy": 0.25, "failed_round": True, "reasons": "[]", "loss": math.nan})
        run.log_round({"round": 1, "accuracy": 0.5})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"accuracy", "failed_round", "seconds", "round_seconds"}
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(0, 0.25), (1, 0.5)]


def test_progress_without_a_terminal_is_about_twenty_lines(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with tracker(tmp_path, num_rounds=100, progress=True, console=console) as run:
        for number in range(101):
            evaluation = {"accuracy": number / 100, "worst10": 0.125, "loss": 0.5} if number % 10 == 0 else {}
            solve = {"conflict_share_before": 0.2, "conflict_share_after": 0.0}
            solve |= {"clients_accepted": 9, "clients_sampled": 10}
            run.log_round({"round": number, **evaluation, **solve})
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 23
    assert lines[-3].startswith("round 100/100 ")
    assert lines[-3].endswith("accuracy 100.0%  worst10 12.5%  loss 0.500  conflict 20% → 0%  clients 9/10")
    assert "accuracy 90.0%  worst10 12.5%  loss 0.500 (round 90)" in lines[-4]
    assert lines[-2] == "finished  accuracy 100.0%  worst10 12.5%  loss 0.500; results in"
    assert lines[-1] == str(tmp_path.resolve())


def test_progress_of_segmentation_shows_dice(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False)
    with tracker(tmp_path, num_rounds=1, progress=True, console=console) as run:
        run.log_round({"round": 1, "dice": 0.5, "worst10": 0.25, "hd95": 12.34})
    assert "  Dice 50.0%  worst10 25.0%  HD95 12.3 mm" in console.file.getvalue()


def test_in_a_narrow_terminal_the_round_stays(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with tracker(tmp_path, num_rounds=100, progress=True, console=console) as run:
        run.log_round({"round": 42, "accuracy": 0.5, "worst10": 0.125, "loss": 0.5, "clients_accepted": 9})
    assert "42/100" in console.file.getvalue()
    assert "accuracy 50.0%" in console.file.getvalue()


def test_progress_in_a_terminal_is_one_bar(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with tracker(tmp_path, num_rounds=2, progress=True, console=console) as run:
        run.log_round({"round": 1, "accuracy": 0.5})
        run.log_round({"round": 2, "accuracy": 0.75})
    assert "2/2" in console.file.getvalue()
    assert "accuracy 75.0%" in console.file.getvalue()


def test_no_progress_is_silent(tmp_path, capfd):
    with tracker(tmp_path) as run:
        run.log_round({"round": 1, "accuracy": 0.5})
    assert capfd.readouterr() == ("", "")


class Scripted(Strategy):
    """Returns what it is told to, and raises it if it is an exception."""

    def __init__(self, **answers):
        self.answers = answers
        self.server_lr = 0.1

    def answer(self, method, default):
        result = self.answers.get(method, default)
        if isinstance(result, Exception):
            raise result
        return result

    def initialize_parameters(self, client_manager):
        return self.answer("initialize_parameters", None)

    def configure_fit(self, server_round, parameters, client_manager):
        return self.answer("configure_fit", [(None, FitIns(parameters, {}))])

    def aggregate_fit(self, server_round, results, failures):
        return self.answer("aggregate_fit", (None, {}))

    def evaluate(self, server_round, parameters):
        return self.answer("evaluate", None)

    def configure_evaluate(self, server_round, parameters, client_manager):
        return self.answer("configure_evaluate", [])

    def aggregate_evaluate(self, server_round, results, failures):
        return self.answer("aggregate_evaluate", (None, {}))


def parameters(value):
    return Parameters([bytes([value])], "numpy.ndarray")


def serve(strategy, num_rounds):
    """Call the strategy as flwr.server.Server.fit does in Flower 1.42."""
    current = strategy.initialize_parameters(None) or parameters(0)
    strategy.evaluate(0, current)
    for number in range(1, num_rounds + 1):
        if strategy.configure_fit(number, current, None):
            aggregated, _ = strategy.aggregate_fit(number, [], [])
            current = aggregated or current
        strategy.evaluate(number, current)
        if strategy.configure_evaluate(number, current, None):
            strategy.aggregate_evaluate(number, [], [])


def tracked_run(folder, num_rounds=2, **answers):
    with tracker(folder) as run:
        strategy = TrackedStrategy(Scripted(**answers), run)
        serve(strategy, num_rounds)
    return strategy, [
        {name: value for name, value in record.items() if not name.endswith("seconds")} for record in records(folder)
    ]


def test_server_evaluation(tmp_path):
    _, rows = tracked_run(tmp_path, aggregate_fit=(None, {"rank": 3}), evaluate=(0.5, {"accuracy": 0.75}), num_rounds=2)
    evaluated = {"loss": 0.5, "accuracy": 0.75}
    assert rows == [{"round": 0, **evaluated}, *({"round": r, "rank": 3, **evaluated} for r in (1, 2))]


def test_federated_evaluation(tmp_path):
    _, rows = tracked_run(
        tmp_path,
        aggregate_fit=(None, {"rank": 3}),
        configure_evaluate=["a client"],
        aggregate_evaluate=(0.5, {"accuracy": 0.75}),
    )
    assert rows == [{"round": r, "rank": 3, "loss": 0.5, "accuracy": 0.75} for r in (1, 2)]


def test_rounds_are_logged_without_any_evaluation_or_client(tmp_path):
    _, rows = tracked_run(tmp_path, configure_fit=[])
    assert rows == [{"round": 1}, {"round": 2}]


def test_shared_names_are_all_kept(tmp_path):
    _, rows = tracked_run(
        tmp_path,
        num_rounds=1,
        aggregate_fit=(None, {"accuracy": 0.1, "round": 7}),
        evaluate=(0.5, {"accuracy": 0.2}),
        configure_evaluate=["a client"],
        aggregate_evaluate=(0.25, {"accuracy": 0.3}),
    )
    assert rows[1] == {
        "round": 1,
        "loss": 0.5,
        "accuracy": 0.2,
        "federated_loss": 0.25,
        "federated_accuracy": 0.3,
        "fit_accuracy": 0.1,
        "fit_round": 7,
    }


@pytest.mark.parametrize("method", ["aggregate_fit", "evaluate", "configure_evaluate", "aggregate_evaluate"])
def test_an_exception_is_recorded_and_raised(tmp_path, method):
    answers = {"configure_evaluate": ["a client"], method: ValueError("no such layer")}
    with tracker(tmp_path) as run:
        strategy = TrackedStrategy(Scripted(**answers), run)
        strategy.configure_fit(1, parameters(0), None)
        with pytest.raises(ValueError, match="no such layer"):
            serve(strategy, 1)
    errors = [record["error"] for record in records(tmp_path) if "error" in record]
    assert errors == ["ValueError: no such layer"]


def test_what_a_failing_round_has_reported_is_kept(tmp_path):
    with pytest.raises(ValueError, match="no such layer"):
        tracked_run(tmp_path, aggregate_fit=(None, {"rank": 3}), configure_evaluate=ValueError("no such layer"))
    record = records(tmp_path)[-1]
    assert (record["round"], record["rank"], record["error"]) == (1, 3, "ValueError: no such layer")
    assert status(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"initialize_parameters": parameters(1)}, parameters(1)),  # every round failed: the initial ones
        ({}, parameters(0)),  # supplied by a client
        ({"aggregate_fit": (parameters(2), {})}, parameters(2)),
    ],
)
def test_the_current_parameters_are_kept(tmp_path, answers, expected):
    strategy, _ = tracked_run(tmp_path, **answers)
    assert strategy.parameters == expected


def test_everything_else_is_the_wrapped_strategy(tmp_path):
    strategy, _ = tracked_run(tmp_path)
    assert strategy.server_lr == 0.1
    with pytest.raises(AttributeError, match="no_such_thing"):
        strategy.no_such_thing  # noqa: B018
