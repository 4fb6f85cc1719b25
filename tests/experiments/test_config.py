"""Composing and checking configurations: every option composes, every impossible one fails before a client starts."""

from pathlib import Path

import pytest

import conf
from client_apps.errors import ConfigError
from experiments.config import build_strategy, check, compose, from_run_config
from strategies import CRAFT, UpdateStrategy

CONF = Path(conf.__file__).parent
OUT = "output_dir=unused"


def options(group):
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


TUNED = {"craft_table", "craft_tune"}  # for strategies with a grid, see test_hparams.py


@pytest.mark.parametrize("name", sorted({*options("experiment")} - TUNED))
@pytest.mark.parametrize("strategy", options("strategy"))
def test_every_experiment_composes_with_every_strategy(name, strategy):
    cfg = compose([f"experiment={name}", f"strategy={strategy}", OUT])
    assert cfg["strategy"]["name"] == strategy
    assert isinstance(build_strategy(cfg), UpdateStrategy)


# The variants of a method are what they change; q-FedAvg's estimate comes from the clients' learning rate.
CHANGED = {
    "craft_mean_norm": {"scale", "server_lr"},
    "craft_inequality": {"constraint"},
    "craft_inequality_mean_norm": {"constraint", "scale", "server_lr"},
    "qfedavg": {"client_lr"},
}


@pytest.mark.parametrize("name", options("strategy"))
def test_a_strategys_defaults_are_its_class_defaults(name):
    """What a YAML leaves out cannot change a method, and what it states is the documented default."""
    cfg = compose([f"strategy={name}", OUT])
    made, bare = build_strategy(cfg), type(build_strategy(cfg))()
    stated = set(cfg["strategy"]) - {"_target_", "name", "device"}
    assert {key for key in stated if getattr(made, key) != getattr(bare, key)} == CHANGED.get(name, set())


def test_the_authors_protocol():
    # METHODS of CRAFT, arXiv 2605.21317: m=1000, 100 a round, T=500, E=1, batch 20, lr decay .999, Dirichlet(.1), ≥ 20.
    for name, lr, server_lr, augment in [
        ("craft_cifar10", 0.005, 0.1, "crop_flip"),
        ("craft_cifar100", 0.05, 1.0, "none"),
    ]:
        cfg = compose([f"experiment={name}", OUT])
        assert (cfg["num_clients"], cfg["clients_per_round"], cfg["num_rounds"]) == (1000, 100, 500)
        client = {
            "lr": lr,
            "lr_decay": 0.999,
            "batch_size": 20,
            "local_epochs": 1,
            "momentum": 0.0,
            "weight_decay": 0.0,
        }
        assert {k: cfg["client"][k] for k in client} == client
        assert cfg["strategy"]["server_lr"] == server_lr
        assert cfg["dataset"]["augment"] == augment
        partition = cfg["dataset"]["partition"]
        assert (partition["kind"], partition["alpha"], partition["min_samples"]) == ("dirichlet", 0.1, 20)
        assert compose([f"experiment={name}", "num_clients=50", OUT])["num_clients"] == 50


def test_the_demo_can_run():
    task = check(compose(["experiment=demo_digits", OUT]))
    assert task.num_clients == 100


def test_a_run_config_composes_the_same():
    direct = compose(["strategy=fedavgm", "dataset.partition.alpha=0.5", "output_dir='a folder'"])
    words = "strategy=fedavgm dataset.partition.alpha=0.5 \"output_dir='a folder'\""
    assert from_run_config({"overrides": words}) == direct
    assert from_run_config({})["output_dir"].startswith("outputs/")
    with pytest.raises(ConfigError, match="cannot be split"):
        from_run_config({"overrides": "output_dir='a"})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategi=craft"], "strategi"),
        (["strategy=crafty"], "crafty"),
        (["strategy.server_rate=1"], "server_rate"),
        (["num_rounds=[1"], "num_rounds"),
        (["strategy=null"], "strategy"),
        (["client.lr=???"], "lr"),
    ],
)
def test_overrides_hydra_cannot_compose_are_one_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words) as error:
        compose([*overrides, OUT])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+speed=9"], "speed"),
        (["+strategy.speed=9"], "speed"),
        (["+strategy.seed=9"], "strategy.seed is set by the suite"),
        (["+client.speed=9"], "speed"),
        (["+model.speed=9"], "speed"),
        (["+dataset.speed=9"], "speed"),
        (["+dataset.partition.speed=9"], "speed"),
        (["+simulation.speed=9"], "speed"),
        (["+evaluation.speed=9"], "speed"),
        (["strategy._target_=strategies.Nothing"], "strategies.Nothing"),
        (["strategy._target_=pathlib.Path"], "not an UpdateStrategy"),
        (["strategy.server_lr=-1"], "server_lr"),
        (["strategy.server_lr=fast"], "server_lr"),
        (["strategy.scale=big"], "scale"),
        (["strategy.device=warp"], "warp"),
        (["num_rounds=0"], "num_rounds"),
        (["num_clients=many"], "num_clients"),
        (["seed=-1"], "seed"),
        (["clients_per_round=101"], "clients_per_round=101 exceeds num_clients=100"),
        (["client.lr=0"], "client.lr"),
        (["client.batch_size=0"], "batch_size"),
        (["evaluation.mode=psychic"], "psychic"),
        (["evaluation.every=0"], "every"),
        (["simulation.engine=warp"], "warp"),
        (["simulation.client_cpus=3"], "client_cpus=3"),
        (["skip_finished=maybe"], "skip_finished"),
        (["+benchmark_name=5"], "benchmark_name"),
        (["target_accuracy=90"], "target_accuracy"),
        (["target_accuracy=high"], "target_accuracy"),
        (["target_accuracy=true"], "target_accuracy"),
        (["~strategy"], "lacks strategy"),
        (["~seed"], "lacks seed"),
        (["~client.lr"], "client.lr"),
        (["output_dir=null"], "output_dir"),
        (["data_dir=5"], "data_dir"),
        (["seed=18446744073709551616"], "seed"),
        (["tracking.progress=maybe"], "tracking.progress"),
        (["tracking.tensorboard=null"], "tracking.tensorboard"),
        (["tracking.udp_loss_delta=-1"], "tracking.udp_loss_delta"),
        (["tracking.udp_norm_delta=much"], "tracking.udp_norm_delta"),
        (["tracking.examples=-1"], "tracking.examples"),
        (["tracking.examples=1.5"], "tracking.examples"),
        (["simulation.num_cpus=abc"], "simulation.num_cpus"),
        (["simulation.client_cpus=null"], "simulation.client_cpus"),
        (["simulation.client_gpus=abc"], "simulation.client_gpus"),
        (["simulation.object_store_mb=-5"], "simulation.object_store_mb"),
        (["strategy.server_lr=true"], "server_lr"),
        (["strategy.ridge=null"], "ridge"),
        (["strategy.rtol=abc"], "rtol"),
        (["strategy.min_completed=abc"], "min_completed"),
        (["strategy.min_completed=21"], "min_completed=21 can never be reached"),
        (["strategy.max_failed_rounds=1.5"], "max_failed_rounds"),
        (["strategy=fedavgm", "strategy.server_momentum=null"], "server_momentum"),
        (["+strategy.wait_timeout=abc"], "wait_timeout"),
        (["+strategy.accept_failures=maybe"], "accept_failures"),
        (["+strategy.on_fit_config_fn=abc"], "on_fit_config_fn is set by the suite"),
        (["strategy._target_=null"], "_target_"),
        (["model.hidden=[1000000000000]"], "cannot be made here"),
        (["dataset.test_fraction=0"], "no client has a sample to test on"),
        (["dataset.max_samples=1"], "no client has a sample to test on"),
        (["client.device=cuda:99"], "cuda:99"),
        (["model=resnet20"], "resnet"),
        (["model=cnn"], "cnn"),
        (["num_clients=5000"], "5000"),
        (["dataset.partition.kind=natural"], "natural"),
        (["dataset.partition.min_samples=100"], "min_samples"),
        (["dataset=cifar10", "data_dir=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words) as error:
        check(compose([OUT, *overrides]))
    assert "\n" not in str(error.value)


LINEAR = ["dataset=linear", "task=regression", "model=linear", "evaluation=federated", "num_clients=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=clair", "strategy.matrices=foo"], r"clair: matrices='foo' is no trainable 2-D tensor"),
        (["strategy=clair", "strategy.noise=1e200"], r"noise=1e\+200 must be"),
        (["strategy=fedprox"], "task.solver=ols is exact"),
    ],
)
def test_a_strategy_that_does_not_fit_the_task_is_refused_before_it_starts(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(compose([*LINEAR, "clients_per_round=4", *overrides]))


def test_more_clients_than_writers_is_refused(data_dir):
    overrides = ["experiment=craft_femnist", f"data_dir={data_dir}", OUT]
    assert check(compose(overrides)).num_clients == 100
    with pytest.raises(ConfigError, match=r"101.*100|100.*101"):
        check(compose([*overrides, "num_clients=101"]))


@pytest.mark.parametrize(("words", "kind"), [([], "dirichlet"), (["dataset.partition.kind=iid"], "iid")])
def test_cinic10_is_dealt_by_label_unless_told_otherwise(data_dir, words, kind):
    cfg = compose(["dataset=cinic10", "model=cnn", "num_clients=20", f"data_dir={data_dir}", OUT, *words])
    assert (cfg["dataset"]["partition"]["kind"], cfg["dataset"]["augment"]) == (kind, "crop_flip")
    task = check(cfg)
    assert sum(task.train_size(cid) + task.test_size(cid) for cid in range(20)) == 2000


def test_a_strategy_of_ones_own_is_taken_by_name():
    assert isinstance(build_strategy(compose(["strategy._target_=strategies.craft.CRAFT", OUT])), CRAFT)


def test_an_experiments_own_steps_yield_to_the_command_line():
    steps = {
        name: compose(["experiment=demo_digits", f"strategy={name}", OUT])["strategy"]["server_lr"]
        for name in ("craft", "fedavg", "fedavgm")
    }
    assert steps == {"craft": 1.0, "fedavg": 1.0, "fedavgm": 0.3}
    cfg = compose(["experiment=demo_digits", "strategy.server_lr=0.7", OUT])
    assert cfg["strategy"]["server_lr"] == 0.7
    assert "tuned" not in cfg
