"""Checkpoints: a run that was killed goes on bit for bit, whatever was killed, and what does not belong is refused."""

import errno
import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from flwr.common import Parameters, ndarrays_to_parameters

import strategies.checkpoint
from strategies import CRAFT, FedAvg, FedFV, FedRef, LayerMap
from strategies.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    find,
    list_checkpoints,
    newest,
    options_of,
)
from strategies.checkpointed import Checkpointed

from .helpers import ALL, arrays_of, every_strategy, initial, manager, model, result, results, trained

CIDS = "abcdef"


def drive(strategy, rounds, parameters, first=1):
    """Rounds by hand, as a server calls a strategy: the models after each."""
    models = []
    clients = manager(CIDS)
    for number in range(first, first + rounds):
        asked = strategy.configure_fit(number, parameters, clients)
        seen = int(asked[0][1].config["server_round"])
        sent = [
            result(client.cid, trained(arrays_of(ins.parameters), 1, seed=[seen, ord(client.cid)])[0], 10 + seen)
            for client, ins in asked
        ]
        parameters, _ = strategy.aggregate_fit(number, sent, [])
        models.append(parameters)
    return models


def bits(parameters):
    return [bytes(tensor) for tensor in parameters.tensors]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def rounds_in(folder):
    return [number for number, _ in reversed(list_checkpoints(folder))]


class Plain:
    """The least that can be saved."""

    layers = None

    def __init__(self, memory=None, **more):
        self.state = {"round": 1, "memory": memory or {}, **more}

    def state_dict(self):
        return dict(self.state)


@every_strategy
def test_a_killed_run_goes_on_bit_for_bit(make, tmp_path):
    options = {"seed": 3, "fraction_fit": 0.7, "min_available_clients": 6}
    whole = drive(make(initial_parameters=initial(), **options), 7, initial())
    killed = Checkpointed(make(initial_parameters=initial(), **options), tmp_path, every=2)
    drive(killed, 5, initial())
    del killed
    # Another start of the process: nothing but the folder is left.
    resumed = Checkpointed(make(initial_parameters=initial(), **options), tmp_path, every=2, resume="auto")
    assert resumed.rounds_done == 4
    start = resumed.initialize_parameters(manager(CIDS))
    assert bits(start) == bits(whole[3])
    assert start is resumed.resumed
    rest = drive(resumed, 3, start)  # Flower counts from 1 again
    assert [bits(p) for p in rest] == [bits(p) for p in whole[4:]]
    assert resumed.rounds_done == 7
    assert rounds_in(tmp_path) == [4, 6]


def test_the_sampling_goes_on(tmp_path):
    def sampled(strategy, rounds, first):
        numbers = range(first, first + rounds)
        start, clients = getattr(strategy, "resumed", None) or initial(), manager(CIDS)
        found = []
        for number in numbers:
            found.append([client.cid for client, _ in strategy.configure_fit(number, start, clients)])
            start, _ = strategy.aggregate_fit(number, results(model()), [])
        return found

    def make():
        return FedAvg(fraction_fit=0.5, min_available_clients=6, seed=5, initial_parameters=initial())

    whole = sampled(make(), 6, 1)
    sampled(Checkpointed(make(), tmp_path, every=3), 4, 1)
    assert sampled(Checkpointed(make(), tmp_path, every=3, resume=tmp_path), 3, 1) == whole[3:]
    assert len(set(map(tuple, whole))) > 1


@pytest.mark.parametrize("layers", [False, True], ids=["tensors", "layers"])
def test_a_resume_elsewhere_leaves_its_source_and_can_be_resumed_itself(layers, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    start = ndarrays_to_parameters([t.numpy() for t in net.state_dict().values()])

    def make():
        return CRAFT(initial_parameters=start, layers=LayerMap.from_module(net) if layers else None)

    whole = drive(make(), 6, start)
    first, second = tmp_path / "first", tmp_path / "second"
    drive(Checkpointed(make(), first, every=2, keep=3), 5, start)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    Checkpointed(make(), second, every=2, keep=3, resume=first)  # killed at once
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert rounds_in(second) == [2, 4]
    with pytest.raises(FileExistsError, match="holds checkpoints of an earlier run"):
        Checkpointed(make(), second, resume=first)
    resumed = Checkpointed(make(), second, every=2, resume="auto")
    assert bits(drive(resumed, 2, resumed.resumed)[-1]) == bits(whole[-1])


def test_a_caller_may_go_on_counting(tmp_path):
    whole = drive(CRAFT(), 4, initial())
    drive(Checkpointed(CRAFT(), tmp_path, every=2), 3, initial())
    resumed = Checkpointed(CRAFT(), tmp_path, every=2, resume="auto")
    assert bits(drive(resumed, 2, resumed.resumed, first=3)[-1]) == bits(whole[-1])
    assert (resumed.rounds_done, rounds_in(tmp_path)) == (4, [2, 4])


def test_of_one_checkpoint_named_what_is_later_is_kept_aside(tmp_path):
    whole = drive(Checkpointed(FedAvg(), tmp_path, every=1, keep=9), 4, initial())
    resumed = Checkpointed(FedAvg(), tmp_path, every=1, keep=9, resume=tmp_path / "round-000002")
    assert resumed.rounds_done == 2
    assert rounds_in(tmp_path) == [1, 2]
    assert (tmp_path / "round-000004.aside1" / "model.safetensors").exists()
    assert bits(drive(resumed, 2, resumed.resumed)[-1]) == bits(whole[-1])


def test_what_has_no_state_to_save_is_refused(tmp_path):
    import flwr.server.strategy

    with pytest.raises(ValueError, match="FedAdam has no state_dict"):
        Checkpointed(flwr.server.strategy.FedAdam(initial_parameters=initial()), tmp_path)


@pytest.mark.parametrize("option", [{"every": 0}, {"keep": 0}, {"num_rounds": 1.5}, {"metric": ""}])
def test_options_out_of_range_are_named(option, tmp_path):
    with pytest.raises(ValueError, match=next(iter(option))):
        Checkpointed(FedAvg(), tmp_path, **option)


# ---- what is saved ---------------------------------------------------------------------------------------------


def test_dtypes_and_shapes_survive_bit_for_bit(tmp_path):
    arrays = [
        np.array(1.5, np.float32), np.array([[1, 2], [3, 4]], np.int64), np.array([True, False]), np.array(False),
        np.arange(3, dtype=np.float16), np.arange(6, dtype=np.float64).reshape(2, 3).T, np.zeros((0, 2), np.float32),
        np.arange(3, dtype=">f4"), np.array(7, np.uint8),
    ]  # fmt: skip
    memory = {
        "a/b": torch.tensor([1.0, float("nan"), float("inf"), -0.0], dtype=torch.bfloat16),
        "c": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
        "d": torch.tensor(2.5, dtype=torch.float16),
        "e": torch.zeros(0),
    }
    records = {"b": 1, "a": [0.1, 1e-300, 5e-324, 2**60], "none": None, "text": "ϑ"}
    saved = CheckpointFolder(tmp_path, keep=1, metric="loss").save(
        7, ndarrays_to_parameters(arrays), Plain(memory, records=records)
    )
    found = Checkpoint.open(saved)
    assert found.round == 7
    for old, new in zip(arrays, arrays_of(found.parameters()), strict=True):
        assert (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes())
    state = found.state()
    assert list(state["records"].items()) == list(records.items())  # the order, too
    assert state["memory"].keys() == memory.keys()
    for name, old in memory.items():
        new = state["memory"][name]
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert (
            old.contiguous()
            .view(torch.uint8 if old.ndim else old.dtype)
            .equal(new.view(torch.uint8 if new.ndim else new.dtype))
        )


def test_tensors_go_by_their_names(tmp_path):
    net = torch.nn.Linear(3, 2)
    start = ndarrays_to_parameters([t.numpy() for t in net.state_dict().values()])
    drive(Checkpointed(CRAFT(layers=LayerMap.from_module(net)), tmp_path, every=1), 1, start)
    saved = safetensors.numpy.load_file(tmp_path / "round-000001" / "model.safetensors")
    assert sorted(saved) == ["bias", "weight"]
    assert json.loads((tmp_path / "round-000001" / "state.json").read_text())["format"] == 1


def test_a_model_that_cannot_be_saved_is_named(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, metric="loss")
    with pytest.raises(ValueError, match="the global model cannot be read: tensor 0: dtype complex64"):
        folder.save(1, ndarrays_to_parameters([np.ones(2, np.complex64)]), Plain())
    with pytest.raises(ValueError, match="the state of Plain cannot be saved"):
        folder.save(1, initial(), Plain(records={1, 2}))
    assert names_in(tmp_path) == [".lock"]


def test_every_option_of_every_strategy_counts_unless_it_is_free():
    free = {"layers", "device", "wait_timeout", "max_failed_rounds", "min_available_clients", "inplace"}
    for make in ALL.values():
        found = options_of(make())
        assert found["seed"] == 0
        assert found["fraction_fit"] == 1.0
        assert not free & set(found)
    assert options_of(FedRef(window=3))["window"] == 3
    assert options_of(CRAFT(constraint="inequality"))["constraint"] == "inequality"
    assert options_of(FedFV(tau=4))["tau"] == 4


# ---- what is kept ----------------------------------------------------------------------------------------------


def scored(folder, scores, metric="accuracy", keep=2, **options):
    """A run whose rounds are evaluated on the server with these scores."""

    def evaluated(number, arrays, config):
        return -scores[number], {"accuracy": scores[number]}

    strategy = FedAvg(initial_parameters=initial(), evaluate_fn=evaluated)
    strategy = Checkpointed(strategy, folder, metric=metric, keep=keep, **options)
    parameters = initial()
    for number in range(1, len(scores)):
        (parameters,) = drive(strategy, 1, parameters, first=number)
        strategy.evaluate(number, parameters)
    return strategy


@pytest.mark.parametrize("metric", ["accuracy", None])  # None: the loss, of which less is better
@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0, 0.1, 0.9, 0.2, 0.3, 0.4], [2, 4, 5]),
        ([0, 0.1, 0.2, 0.3, 0.4, 0.9], [4, 5]),  # the last round is the best
        ([0, 0.9, 0.1, 0.9, 0.3, 0.4], [3, 4, 5]),  # of equals the newest
        ([0, 0.9, float("nan"), 0.1, 0.3, float("nan")], [1, 4, 5]),
    ],
)
def test_the_newest_and_the_best_are_kept(scores, kept, metric, tmp_path):
    scored(tmp_path, scores, metric, every=1)
    assert rounds_in(tmp_path) == kept


def test_the_last_round_is_saved_and_counts(tmp_path):
    scored(tmp_path, [0, 0.1, 0.2, 0.9, 0.3, 0.95], every=3, keep=1, num_rounds=5)
    assert rounds_in(tmp_path) == [5]
    scored(tmp_path / "b", [0, 0.1, 0.2, 0.9, 0.3, 0.4], every=3, keep=1, num_rounds=5)
    assert rounds_in(tmp_path / "b") == [3, 5]


def test_clients_evaluations_and_what_is_observed_count(tmp_path):
    strategy = Checkpointed(FedAvg(initial_parameters=initial()), tmp_path, every=1, keep=1, metric="accuracy")
    parameters = initial()
    for number, accuracy in ((1, 0.9), (2, 0.5), (3, 0.6)):
        (parameters,) = drive(strategy, 1, parameters, first=number)
        strategy.aggregate_evaluate(number, [], [])  # of nobody
        strategy.observe(number, {"accuracy": accuracy})
        strategy.observe(number, {"accuracy": 1.0})  # the first one counts
    assert rounds_in(tmp_path) == [1, 3]
    assert Checkpoint.open(tmp_path / "round-000003").score("accuracy") == 0.6


def test_the_model_resumed_from_is_scored_at_the_start(tmp_path):
    def evaluated(number, arrays, config):
        return 1.0, {"accuracy": {2: 0.9, 3: 0.1, 4: 0.2}[number]}

    drive(Checkpointed(FedAvg(initial_parameters=initial()), tmp_path, every=1, keep=1), 2, initial())  # killed
    strategy = Checkpointed(FedAvg(evaluate_fn=evaluated), tmp_path, every=1, keep=1, metric="accuracy", resume="auto")
    strategy.evaluate(0, strategy.resumed)  # as Flower's server begins
    parameters = strategy.resumed
    for number in (1, 2):
        (parameters,) = drive(strategy, 1, parameters, first=number)
        strategy.evaluate(number, parameters)
    assert rounds_in(tmp_path) == [2, 4]


# ---- what is refused -------------------------------------------------------------------------------------------


def other_model(change):
    arrays = model()
    change(arrays)
    return ndarrays_to_parameters(arrays)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.__setitem__(0, np.zeros((4, 4), np.float32)), r"'tensor0' in shape \(4, 3\), this model has"),
        (lambda a: a.__setitem__(1, np.zeros(3, np.float64)), "'tensor1' as float32, this model as float64"),
        (lambda a: a.append(np.zeros(1)), "holds 4 tensors, this model has 5"),
    ],
)  # fmt: skip
def test_another_model_is_refused_and_the_first_difference_named(change, words, tmp_path):
    drive(Checkpointed(CRAFT(), tmp_path, every=1), 1, initial())
    with pytest.raises(ValueError, match=words):
        Checkpointed(CRAFT(initial_parameters=other_model(change)), tmp_path, resume=tmp_path)
    named = LayerMap.from_names(["w", "b", "s", "n"], [(4, 3), (3,), (), ()])
    with pytest.raises(ValueError, match="a tensor 'tensor0' where this model has 'w'"):
        Checkpointed(CRAFT(layers=named), tmp_path, resume=tmp_path)


def test_layers_grouped_otherwise_are_refused(tmp_path):
    shapes = [(4, 3), (3,)]
    start = ndarrays_to_parameters([np.ones(shape, np.float32) for shape in shapes])
    drive(Checkpointed(CRAFT(layers=LayerMap.from_names(["m.w", "m.b"], shapes)), tmp_path, every=1), 1, start)
    apart = LayerMap.from_arrays(arrays_of(start), ["m.w", "m.b"])
    with pytest.raises(ValueError, match="a layer 'm' that this LayerMap groups otherwise"):
        Checkpointed(CRAFT(layers=apart), tmp_path, resume=tmp_path)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: FedAvg(), {}, "was saved by CRAFT, this is FedAvg"),
        (lambda: CRAFT(server_lr=0.2), {}, r"server_lr=0.1, this is server_lr=0.2"),
        (lambda: CRAFT(constraint="inequality"), {}, "constraint='equality', this is constraint='inequality'"),
        (lambda: CRAFT(seed=1), {}, "seed=0, this is seed=1"),
        (lambda: CRAFT(fraction_fit=0.5), {}, "fraction_fit=1.0, this is fraction_fit=0.5"),
        (lambda: CRAFT(), {"config": {"data": {"alpha": 0.5}, "lr": [1, 2]}}, "config data.alpha=0.1, this is config"),
        (lambda: CRAFT(), {"config": {"data": {"alpha": 0.1}}}, r"config lr=\[1, 2\], this is config lr=None"),
        (lambda: CRAFT(), {"num_rounds": 1}, "that of round 2, beyond num_rounds=1"),
    ],
)
def test_another_strategy_option_or_config_is_refused_and_nothing_is_changed(make, options, words, tmp_path):
    config = {"data": {"alpha": 0.1}, "lr": (1, 2)}
    drive(Checkpointed(CRAFT(), tmp_path, every=1, config=config), 2, initial())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=words):
        Checkpointed(make(), tmp_path, **{"config": config, **options}, resume="auto")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    free = CRAFT(device="cpu", max_failed_rounds=9, wait_timeout=1.0)
    assert Checkpointed(free, tmp_path, config=config, resume="auto").rounds_done == 2


def test_a_folder_in_use_or_without_a_checkpoint_is_said_so(tmp_path):
    drive(Checkpointed(CRAFT(), tmp_path / "a", every=1), 1, initial())
    with pytest.raises(FileExistsError, match="holds checkpoints of an earlier run, up to round 1: resume='auto'"):
        Checkpointed(CRAFT(), tmp_path / "a")
    for wrong in (tmp_path / "none", tmp_path, tmp_path / "none" / "round-000001"):
        with pytest.raises(ValueError, match="there is no checkpoint in"):
            Checkpointed(CRAFT(), tmp_path / "b", resume=wrong)
    assert Checkpointed(CRAFT(), tmp_path / "c", resume="auto").resumed is None  # a start, not a resume
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"checkpoints cannot be written to .*Not a directory"):
        Checkpointed(CRAFT(), tmp_path / "file" / "d")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_do_not_share_a_folder(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, metric="loss")

    def other():
        try:
            CheckpointFolder(tmp_path, keep=1, metric="loss")
        except OSError as error:
            os._exit(0 if "another process is at work" in str(error) else 2)
        os._exit(1)

    assert in_a_child(other) == 0
    again = CheckpointFolder(tmp_path, keep=1, metric="loss")  # in one process, one after the other in a notebook
    again.close()
    assert in_a_child(other) == 0
    strategies.checkpoint.require_unused(tmp_path)
    assert in_a_child(other) == 0
    folder.close()
    assert in_a_child(other) == 1


def test_one_serves_one_run_and_begins_where_it_was_saved(tmp_path):
    whole = Checkpointed(FedAvg(), tmp_path, every=1)
    models = drive(whole, 3, initial())
    with pytest.raises(ValueError, match=r"round 1 has been run, 3 is the last one"):
        whole.configure_fit(1, initial(), manager(CIDS))
    with pytest.raises(ValueError, match=r"round 4 begins with another model than the one saved"):
        whole.configure_fit(4, initial(), manager(CIDS))
    resumed = Checkpointed(FedAvg(), tmp_path, every=1, resume="auto")
    with pytest.raises(ValueError, match=r"round 4 begins with another model than the one resumed from"):
        resumed.configure_fit(1, initial(), manager(CIDS))
    assert bits(drive(resumed, 1, models[-1])[-1]) == bits(drive(whole, 1, models[-1], first=4)[-1])


def test_what_was_set_aside_or_renamed_is_not_gone_on_with_in_place(tmp_path):
    drive(Checkpointed(FedAvg(), tmp_path, every=1, keep=9), 3, initial())
    Checkpointed(FedAvg(), tmp_path, every=1, keep=9, resume=tmp_path / "round-000002")
    with pytest.raises(ValueError, match=r"round-000003.aside1 was set aside, and others took its place"):
        Checkpointed(FedAvg(), tmp_path, resume=tmp_path / "round-000003.aside1")
    assert Checkpointed(FedAvg(), tmp_path / "new", resume=tmp_path / "round-000003.aside1").rounds_done == 3
    shutil.copytree(tmp_path / "round-000001", tmp_path / "round-000009")
    assert Checkpointed(FedAvg(), tmp_path, every=1, keep=9, resume="auto").rounds_done == 2


def test_a_name_that_safetensors_keeps_for_itself_is_refused(tmp_path):
    layers = LayerMap.from_names(["__metadata__"], [(3,)])
    strategy = Checkpointed(FedAvg(layers=layers), tmp_path, every=1)
    with pytest.raises(ValueError, match="a tensor called '__metadata__' cannot be saved"):
        strategy._folder.save(1, ndarrays_to_parameters([np.zeros(3, np.float32)]), strategy.strategy)


# ---- damage ----------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def reseal(folder):
    """Give a changed checkpoint checksums that agree."""
    names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{strategies.checkpoint._digest(folder / name)}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def other_version(folder):
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**content, "format": 2}))
    reseal(folder)


def no_json(folder):
    (folder / "state.json").write_text('{"format": 1, ')
    reseal(folder)


DAMAGE = {
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 40), "model.safetensors is not as it was written"),
    "flipped": (lambda f: flip(f / "strategy.safetensors"), "strategy.safetensors is not as it was written"),
    "flipped-state": (lambda f: flip(f / "state.json"), "state.json is not as it was written"),
    "missing": (lambda f: (f / "strategy.safetensors").unlink(), "it lacks strategy.safetensors"),
    "missing-sums": (lambda f: (f / "SHA256SUMS").unlink(), "it lacks SHA256SUMS"),
    "bad-sums": (lambda f: (f / "SHA256SUMS").write_text("x\n"), "SHA256SUMS cannot be read"),
    "short-sums": (lambda f: (f / "SHA256SUMS").write_text(""), "SHA256SUMS lacks model.safetensors"),
    "bad-json": (no_json, "state.json is not JSON"),
    "other-version": (other_version, "has format 2, this version reads format 1"),
    "empty": (lambda f: [p.unlink() for p in f.iterdir()], "it lacks SHA256SUMS"),
}


@pytest.mark.parametrize(("harm", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_named_and_the_next_older_taken(harm, words, tmp_path, caplog):
    whole = drive(Checkpointed(CRAFT(), tmp_path, every=1, keep=3), 4, initial())
    harm(tmp_path / "round-000004")
    with pytest.raises(DamagedCheckpoint, match=words):
        find(tmp_path / "round-000004")
    with caplog.at_level(logging.WARNING):
        resumed = Checkpointed(CRAFT(), tmp_path, every=1, keep=3, resume="auto")
    assert words in caplog.text
    assert resumed.rounds_done == 3
    assert bits(drive(resumed, 1, resumed.resumed)[-1]) == bits(whole[-1])
    assert (tmp_path / "round-000004.aside1").is_dir()  # what was damaged is kept, too
    assert Checkpoint.open(tmp_path / "round-000004").round == 4


def test_if_all_are_damaged_nothing_starts_anew(tmp_path):
    drive(Checkpointed(CRAFT(), tmp_path, every=1), 2, initial())
    for number in (1, 2):
        flip(tmp_path / f"round-{number:06d}" / "model.safetensors")
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints in .* can be used; .*round-000002 is damaged"):
        Checkpointed(CRAFT(), tmp_path, resume="auto")


def test_a_damaged_score_only_costs_the_score(tmp_path):
    scored(tmp_path, [0, 0.9, 0.2, 0.3], every=1, keep=2)
    assert rounds_in(tmp_path) == [1, 2, 3]
    (tmp_path / "round-000001" / "score.json").write_text("{")
    assert Checkpointed(FedAvg(), tmp_path, metric="accuracy", resume="auto").rounds_done == 3


# ---- faults ----------------------------------------------------------------------------------------------------


def in_a_child(action):
    """Run an action in a forked process; its exit status, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException:  # noqa: BLE001  a child must not go on as the test
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Fault:
    """Lets the n-th step of writing fail; a write leaves half of what it should have written."""

    def __init__(self, monkeypatch, number, happen):
        self.left, self.happen, self.happened = number, happen, False
        for owner, name in (
            (os, "fsync"), (Path, "replace"), (Path, "mkdir"), (Path, "chmod"), (shutil, "rmtree"),
            (Path, "write_text"), (safetensors.numpy, "save_file"), (safetensors.torch, "save_file"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self.instead(getattr(owner, name), name))

    def instead(self, original, name):
        def call(*args, **kwargs):
            self.left -= 1
            if not self.left:
                self.happened = True
                original(*args, **kwargs)
                if name == "write_text":
                    os.truncate(args[0], args[0].stat().st_size // 2)
                elif name == "save_file":
                    os.truncate(args[1], Path(args[1]).stat().st_size // 2)
                self.happen()
            return original(*args, **kwargs)

        return call


def fail():
    raise OSError(errno.ENOSPC, "No space left on device")


def run_into(monkeypatch, folder, number, happen):
    """Save round 2, of a folder with round 1 in it, with a fault at the n-th step; whether there was one."""
    checkpoints = CheckpointFolder(folder, keep=1, metric="loss")
    with monkeypatch.context() as patched:
        fault = Fault(patched, number, happen)
        checkpoints.save(2, initial(2), Plain({"m": torch.ones(3)}), score=0.5)
    checkpoints.close()
    return fault.happened


def prepared(folder):
    first = CheckpointFolder(folder, keep=1, metric="loss")
    first.save(1, initial(1), Plain({"m": torch.zeros(3)}), score=1.0)
    first.close()


def as_before_or_after(folder):
    """The newest checkpoint is the whole first or the whole second one, and a new start finds no litter."""
    found = newest(folder)
    assert found is not None
    assert bits(found.parameters()) == bits(initial(found.round))
    assert found.state()["memory"]["m"].tolist() == [found.round - 1.0] * 3
    again = CheckpointFolder(folder, keep=1, metric="loss")
    assert {path.name for path in folder.iterdir()} <= {".lock", "round-000001", "round-000002"}
    again.save(2, initial(2), Plain({"m": torch.ones(3)}), score=0.5)
    assert rounds_in(folder) == [2]
    again.close()
    return found.round


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_a_whole_checkpoint_is_there(tmp_path, monkeypatch):
    found = []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        prepared(folder)
        ended = in_a_child(
            lambda at=folder, n=number: run_into(monkeypatch, at, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
        )
        if ended == 0:  # there are no more steps
            break
        assert ended == -signal.SIGKILL
        found.append(as_before_or_after(folder))
    assert len(found) > 15
    assert found == sorted(found)  # from some step on it is the new one
    assert set(found) == {1, 2}


def test_a_write_that_fails_at_any_step_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    said = []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        prepared(folder)
        try:
            if not run_into(monkeypatch, folder, number, fail):
                break
        except OSError as error:
            said.append(str(error))
        as_before_or_after(folder)
    assert len(said) > 10
    for sentence in said:
        assert re.fullmatch(
            r"the checkpoint of round 2 cannot be written to \S+ \(No space left on device\); older ones .*", sentence
        )


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_becomes_unwritable_is_one_sentence(tmp_path):
    strategy = Checkpointed(CRAFT(), tmp_path, every=1)
    models = drive(strategy, 1, initial())
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OSError, match=r"the checkpoint of round 2 cannot be written to .*Permission denied"):
            drive(strategy, 1, models[-1], first=2)
    finally:
        tmp_path.chmod(0o755)
    assert newest(tmp_path).round == 1


def test_leftovers_of_a_killed_writer_are_cleaned(tmp_path):
    drive(Checkpointed(CRAFT(), tmp_path, every=1), 1, initial())
    for name in (".round-000002.tmp", ".round-000000.old"):
        shutil.copytree(tmp_path / "round-000001", tmp_path / name)
    (tmp_path / ".mine").mkdir()
    Checkpointed(CRAFT(), tmp_path, resume="auto")
    assert names_in(tmp_path) == [".lock", ".mine", "round-000001"]


def test_parameters_is_what_flower_exchanges(tmp_path):
    saved = CheckpointFolder(tmp_path, keep=1, metric="loss").save(1, initial(), Plain())
    found = Checkpoint.open(saved).parameters()
    assert isinstance(found, Parameters)
    assert found.tensor_type == initial().tensor_type
    assert bits(found) == bits(initial())
