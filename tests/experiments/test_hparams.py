"""Tuned settings: every grid fits its strategy, a point's values reach the run, and the command line wins."""

from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import conf
from client_apps.errors import ConfigError
from experiments.config import build_strategy, compose
from experiments.hparams import points

CONF = Path(conf.__file__).parent
OUT = "output_dir=unused"
TABLE = ("experiment=craft_table", "benchmark=femnist_mlp", OUT)


def options(group):
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def read(name):
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))


def at(cfg, key):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def test_points_are_the_product_of_the_grid():
    assert points({"a.b": [1, 2], "c": ["x", "y"]}) == [
        {"a.b": 1, "c": "x"}, {"a.b": 1, "c": "y"}, {"a.b": 2, "c": "x"}, {"a.b": 2, "c": "y"},
    ]  # fmt: skip


@pytest.mark.parametrize("name", options("hparams"))
def test_a_grid_has_nine_points_and_reaches_the_strategy(name):
    file = read(f"hparams/{name}")
    choices = points(file["grid"])
    for grid in (file["grid"], *file.get("grids", {}).values()):
        assert len(points(grid)) == len({str(choice) for choice in points(grid)}) == 9
    assert set(file.get("grids", {})) <= set(options("benchmark")) == set(file["best"])
    assert all(best is None or best in range(9) for best in file["best"].values())
    cfg = compose([*TABLE, f"strategy={name}", "hparams.point=8"])
    assert cfg["strategy"]["name"] == name  # files, folders and reports go by it
    assert {key: at(cfg, key) for key in file["grid"]} == choices[8]
    build_strategy(cfg)


@pytest.mark.parametrize("experiment", ["craft_table", "craft_tune"])
def test_the_sweeps_take_every_strategy_that_has_a_grid(experiment):
    swept = read(f"experiment/{experiment}")["hydra"]["sweeper"]["params"]["strategy"]
    (word,) = OverridesParser.create().parse_overrides([f"strategy={swept}"])
    assert sorted(word.sweep_string_iterator()) == options("hparams")


@pytest.mark.parametrize("benchmark", options("benchmark"))
def test_benchmarks_compose_and_are_tuned_with_fewer_rounds_and_another_seed(benchmark):
    table = compose(["experiment=craft_table", f"benchmark={benchmark}", "hparams.point=0", OUT])
    tune = compose(["experiment=craft_tune", f"benchmark={benchmark}", "hparams.point=0", OUT])
    assert table["benchmark_name"] == benchmark
    assert tune["num_rounds"] <= table["num_rounds"] / 2
    assert tune["seed"] not in (0, 1, 2)
    for cfg in (table, tune):
        assert cfg["simulation"]["engine"] == "serial"
        assert cfg["skip_finished"] is True
        assert not {"hparams", "tuned", "tuning_rounds", "benchmark"} & set(cfg)
    assert compose([*TABLE, "hparams.point=0", "simulation=ray"])["simulation"]["engine"] == "ray"


def test_elsewhere_nothing_changes():
    cfg = compose([OUT])
    assert not {"hparams", "benchmark_name"} & set(cfg)
    assert cfg["skip_finished"] is False


def test_what_refers_to_a_tuned_key_follows_it():
    cfg = compose([*TABLE, "strategy=qfedavg", "hparams.point=8"])
    assert cfg["client"]["lr"] == cfg["strategy"]["client_lr"] == read("hparams/qfedavg")["grid"]["client.lr"][-1]


def test_the_command_line_wins_over_the_point():
    point = compose([*TABLE, "hparams.point=8"])
    cfg = compose([*TABLE, "hparams.point=8", "client.lr=0.7"])
    assert cfg == point | {"client": point["client"] | {"lr": 0.7}}
    assert compose([*TABLE, "hparams.point=8", "strategy=craft", "client=sgd"]) == point  # groups, not the keys


def test_a_benchmark_may_have_a_grid_of_its_own():
    own = read("hparams/craft")["grids"]["cifar10_cnn"]
    cfg = compose(["experiment=craft_table", "benchmark=cifar10_cnn", "hparams.point=2", OUT])
    assert {key: at(cfg, key) for key in own} == points(own)[2] != points(read("hparams/craft")["grid"])[2]


def test_the_best_point_is_that_of_the_benchmark(tmp_path):
    assert compose([*TABLE, "hparams.best.femnist_mlp=4"]) == compose([*TABLE, "hparams.point=4"])
    best = tmp_path / "best.yaml"
    best.write_text("femnist_mlp: {craft: {point: 1, accuracy: 0.5}}\ncifar10_cnn: {craft: {point: 2}}\n")
    tuned = compose([*TABLE, "hparams.best.femnist_mlp=4", f"tuned={best}"])
    assert tuned == compose([*TABLE, "hparams.point=1"])


def test_a_best_point_that_means_something_else_by_now_is_refused(tmp_path):
    best = tmp_path / "best.yaml"
    point = points(read("hparams/craft")["grid"])[1]
    for lr, words in ((point["client.lr"], None), (9.0, "was tuned with client.lr=9.0 at point 1")):
        best.write_text(yaml.safe_dump({"femnist_mlp": {"craft": {"point": 1, "settings": {"client.lr": lr}}}}))
        if words is None:
            assert compose([*TABLE, f"tuned={best}"]) == compose([*TABLE, "hparams.point=1"])
        else:
            with pytest.raises(ConfigError, match=words):
                compose([*TABLE, f"tuned={best}"])


def test_settings_of_another_strategy_are_refused():
    with pytest.raises(ConfigError, match="hparams=fedavg are the settings of that strategy, not of craft"):
        compose(["strategy=craft", "hparams=fedavg", "hparams.point=0", OUT])
    cfg = compose(["strategy=fedavg", "hparams=fedavg", "hparams.point=0", OUT])  # without either experiment
    assert cfg["client"]["lr"] == 0.03


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hparams.point=9"], r"hparams\.point=9: conf/hparams/craft\.yaml has the points 0 to 8"),
        (["hparams.point=-1"], "has the points 0 to 8"),
        (["hparams.point=first"], "has the points 0 to 8"),
        (["hparams.best.femnist_mlp=null"], "names no best point for benchmark femnist_mlp; tune it with .*craft_tune"),
        (["hparams.best.femnist_mlp=null"], r"give hparams\.point=K"),
        (["tuned=nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["tuned={best}", "strategy=fedavg"], "names no point of fedavg for benchmark femnist_mlp"),
        (["tuned={best}", "benchmark=cifar10_cnn"], "names no point of craft for benchmark cifar10_cnn"),
        (["hparams.point=0", "+hparams.grid.speed=[1]"], r"conf/hparams/craft\.yaml: the grid sets speed"),
        (["hparams.point=0", "hparams.grid=3"], "needs a grid"),
        (["benchmark=???"], "You must specify 'benchmark'"),
        (["strategy=krum"], "hparams/krum"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_sentence(overrides, words, tmp_path):
    best = tmp_path / "best.yaml"
    best.write_text("femnist_mlp: {craft: {point: 1}}\n")
    with pytest.raises(ConfigError, match=words) as error:
        compose([*TABLE, *(word.format(best=best) for word in overrides)])
    assert "\n" not in str(error.value)
