"""Privacy: every strategy under Flower's differential privacy and secure aggregation, and what docs/deploy.md says."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import flwr.client.mod
import flwr.clientapp.mod
import flwr.server.strategy
import flwr.serverapp.strategy
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerAppComponents, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid
from flwr.supercore.privacy_accounting import SamplingMethod

import strategies
from client_apps.app import TaskClientApp
from client_apps.arrays import get_arrays
from experiments.config import check, compose
from experiments.engine import SerialGrid, serve_on
from strategies import CRAFT, FedAvg, MessageStrategy, NormalisedMomentum, OracleFedAvg

from .helpers import ALL, arrays_of, every_strategy, initial, manager, model, result, trained

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
CLIENTS, ROUNDS = 4, 3
NORM = 0.5
"""To which updates are clipped; those of these clients are longer."""
SENSITIVITY, EPSILON, DELTA = 0.02, 1.0, 1e-3
LOCAL_SIGMA = SENSITIVITY * math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
MULTIPLIER = 0.4
START = model()[:2]  # a matrix and a vector in float32

every_api = pytest.mark.parametrize("api", ["message", "legacy"])


@pytest.fixture(autouse=True)
def _seeded():
    """Flower draws noise from NumPy's global generator."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(20)  # noqa: NPY002
    yield
    np.random.set_state(state)  # noqa: NPY002


# ---- clients, servers, and what is seen of them -------------------------------------------------------------------


def update_of(cid, shapes):
    """What a client adds to the model it receives, in every round."""
    rng = np.random.default_rng(100 + cid)
    return [rng.normal(size=shape) for shape in shapes]


def add_update(cid, arrays):
    """Train: floating-point arrays move by the client's update, counters count ten batches."""
    moved = update_of(cid, [a.shape for a in arrays])
    return [
        np.asarray(a + u.astype(a.dtype) if a.dtype.kind == "f" else a + 10) for a, u in zip(arrays, moved, strict=True)
    ]


def told(cid):
    return {"initial_loss": 1.0 + cid, "train_loss": 0.5 + cid, "step_weight": 2.0 + cid}


class Trains(NumPyClient):
    def __init__(self, cid, train):
        self.cid, self.train = cid, train

    def fit(self, parameters, config):
        return self.train(self.cid, parameters), 10 * (self.cid + 1), told(self.cid)


def client_app(api, mods=(), *, everywhere=False, train=add_update):
    """A ClientApp of one of Flower's APIs, with mods on training or, `everywhere`, on the whole app."""
    if api == "legacy":
        return ClientApp(
            client_fn=lambda context: Trains(int(context.node_config["partition-id"]), train).to_client(),
            mods=list(mods),
        )
    app = ClientApp(mods=list(mods) if everywhere else [])

    @app.train(mods=[] if everywhere else list(mods))
    def fit(message: Message, context: Context) -> Message:
        cid = int(context.node_config["partition-id"])
        received = message.content["arrays"]
        arrays = ArrayRecord(train(cid, received.to_numpy_ndarrays()))
        record = ArrayRecord(dict(zip(received, arrays.values(), strict=True)))
        metrics = MetricRecord({"num-examples": 10 * (cid + 1), **told(cid)})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 5, "loss": 1.0})}), reply_to=message)

    return app


class Watch:
    """What passes between a strategy and its clients, by round; the strategy itself is left as it is."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.models, self.sent, self.configs, self.received, self.returned, self.metrics = [], [], [], [], [], []
        configure, aggregate = strategy.configure_fit, strategy.aggregate_fit

        def configure_fit(server_round, parameters, client_manager):
            asked = configure(server_round, parameters, client_manager)
            self.models.append(arrays_of(parameters))
            self.sent.append({proxy.cid: arrays_of(ins.parameters) for proxy, ins in asked})
            self.configs.append([ins.config for _, ins in asked])
            return asked

        def aggregate_fit(server_round, results, failures):
            self.received.append({proxy.cid: arrays_of(res.parameters) for proxy, res in results})
            parameters, metrics = aggregate(server_round, results, failures)
            self.returned.append(arrays_of(parameters))
            self.metrics.append(metrics)
            return parameters, metrics

        self.evaluated, evaluate = [], strategy.aggregate_evaluate

        def aggregate_evaluate(server_round, results, failures):
            self.evaluated.append((len(results), len(failures)))
            return evaluate(server_round, results, failures)

        strategy.configure_fit, strategy.aggregate_fit = configure_fit, aggregate_fit
        strategy.aggregate_evaluate = aggregate_evaluate

    def updates(self):
        """(cid, what the client's update was before the mods, what the server saw of it), flat, for every round."""
        for sent, received in zip(self.sent, self.received, strict=True):
            for number, cid in enumerate(sorted(sent, key=int)):
                seen = [b.astype(float) - a for a, b in zip(sent[cid], received[cid], strict=True)]
                yield number, flat(update_of(number, [a.shape for a in sent[cid]])), flat(seen)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def strategy_of(make, start=START, **more):
    return make(
        initial_parameters=ndarrays_to_parameters(start), fraction_fit=1.0, min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS, **{"fraction_evaluate": 0.0, **more},
    )  # fmt: skip


def serve(api, strategy, client, *, start=START, rounds=ROUNDS):
    """Run a strategy of either of Flower's interfaces."""
    if api == "legacy":
        parts = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))
        app = ServerApp(server_fn=lambda _: parts)
    else:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            strategy.start(grid, ArrayRecord(list(start)), num_rounds=rounds)

    serve_on(SerialGrid(client, CLIENTS), app)


def mods_of(api):
    return flwr.clientapp.mod if api == "message" else flwr.client.mod


def wrapper_of(api, kind):
    module = flwr.serverapp.strategy if api == "message" else flwr.server.strategy
    return getattr(module, f"DifferentialPrivacyClientSide{kind}Clipping")


def faced(api, strategy):
    return MessageStrategy(strategy) if api == "message" else strategy


def fixed(api, strategy, multiplier=MULTIPLIER):
    return wrapper_of(api, "Fixed")(faced(api, strategy), multiplier, NORM, CLIENTS)


def adaptive(api, strategy):
    return wrapper_of(api, "Adaptive")(
        faced(api, strategy), MULTIPLIER, CLIENTS, initial_clipping_norm=NORM, clipped_count_stddev=1.0
    )


def require_all_used(watch):
    """No client is rejected, none fails, and every round moves the model."""
    assert len(watch.metrics) == ROUNDS
    for metrics in watch.metrics:
        assert not metrics["failed_round"], metrics
        assert (metrics["clients_accepted"], metrics["clients_rejected"], metrics["clients_failed"]) == (CLIENTS, 0, 0)


# ---- differential privacy works with every strategy ---------------------------------------------------------------


@every_api
@every_strategy
def test_local_dp(make, api):
    watch = Watch(strategy_of(make))
    noisy = mods_of(api).LocalDpMod(NORM, SENSITIVITY, EPSILON, DELTA)
    serve(api, faced(api, watch.strategy), client_app(api, [noisy]))
    require_all_used(watch)
    noise = [seen - NORM * own / np.linalg.norm(own) for _, own, seen in watch.updates()]
    assert len(noise) == CLIENTS * ROUNDS
    assert np.std(noise) == pytest.approx(LOCAL_SIGMA, rel=0.15)
    assert np.mean(noise) == pytest.approx(0, abs=0.3 * LOCAL_SIGMA)


@every_api
@every_strategy
def test_fixed_clipping(make, api):
    watch = Watch(strategy_of(make))
    serve(api, fixed(api, watch.strategy), client_app(api, [mods_of(api).fixedclipping_mod]))
    require_all_used(watch)
    for _, own, seen in watch.updates():
        np.testing.assert_allclose(seen, NORM * own / np.linalg.norm(own), atol=1e-6)
    # The server's noise lies between what the strategy returned and what it is given as the next global model.
    noise = [flat(after) - flat(before) for before, after in zip(watch.returned[:-1], watch.models[1:], strict=True)]
    assert np.std(noise) == pytest.approx(MULTIPLIER * NORM / CLIENTS, rel=0.4)


@every_api
@every_strategy
def test_adaptive_clipping(make, api):
    watch = Watch(strategy_of(make))
    serve(api, adaptive(api, watch.strategy), client_app(api, [mods_of(api).adaptiveclipping_mod]))
    require_all_used(watch)
    lengths = np.reshape([np.linalg.norm(seen) for _, _, seen in watch.updates()], (ROUNDS, CLIENTS))
    np.testing.assert_allclose(lengths[0], NORM, rtol=1e-5)
    np.testing.assert_allclose(lengths, lengths[:, :1] * np.ones(CLIENTS), rtol=1e-4)  # one norm a round
    assert len(np.unique(lengths[:, 0])) == ROUNDS  # that is adapted
    for before, after in zip(watch.returned[:-1], watch.models[1:], strict=True):
        assert np.all(flat(after) != flat(before))


def train_only(mod):
    """Restrict one of Flower's mods for the message API, which act on evaluate messages too, to training."""

    def restricted(message, context, call_next):
        act = message.metadata.message_type == MessageType.TRAIN
        return mod(message, context, call_next) if act else call_next(message, context)

    return restricted


def small_config():
    sizes = [f"num_clients={CLIENTS}", f"clients_per_round={CLIENTS}", "model.hidden=[8]"]
    return compose(["dataset=digits", "dataset.partition.kind=iid", "client.lr=0.5", *sizes])


@every_api
def test_the_clients_of_this_suite_train_under_dp(api):
    cfg = small_config()
    start = get_arrays(check(cfg).new_model())
    watch = Watch(strategy_of(CRAFT, start, fraction_evaluate=1.0, min_evaluate_clients=CLIENTS))
    app = TaskClientApp(cfg, mods=[train_only(mods_of(api).fixedclipping_mod)])
    serve(api, wrapper_of(api, "Fixed")(faced(api, watch.strategy), 0.0, 0.01, CLIENTS), app, start=start)
    require_all_used(watch)
    for sent, received in zip(watch.sent, watch.received, strict=True):
        for cid in sent:
            assert np.linalg.norm(flat(received[cid]) - flat(sent[cid])) == pytest.approx(0.01, rel=1e-4)
    assert len(watch.evaluated) == ROUNDS
    assert all(found == (CLIENTS, 0) for found in watch.evaluated)


# ---- what Flower's mods do not do ---------------------------------------------------------------------------------

COUNTED = [*START, np.array(0.5, np.float32), np.array(3, np.int64)]  # as a BatchNorm's num_batches_tracked


@every_api
def test_0d_tensors_are_not_clipped_and_counters_use_up_the_norm(api):
    """In the message API 0-d tensors get no noise either: what they hold is sent as it is."""
    watch = Watch(strategy_of(FedAvg, COUNTED))
    noisy = mods_of(api).LocalDpMod(NORM, SENSITIVITY, EPSILON, DELTA)
    serve(api, faced(api, watch.strategy), client_app(api, [noisy]), start=COUNTED, rounds=1)
    for cid, (sent, received) in enumerate(zip(watch.sent[0].values(), watch.received[0].values(), strict=True)):
        own = update_of(cid, [a.shape for a in COUNTED])
        alone = abs(float(received[2] - sent[2] - own[2]))
        assert alone < 1e-6 if api == "message" else 1e-4 < alone < 5 * LOCAL_SIGMA
        assert received[3] - sent[3] == 10  # noise is cut to whole numbers, here to 0
        length = math.sqrt(sum(float(np.sum(u**2)) for u in own[:3]) + 10**2)
        noise = flat(received[:2]) - flat(sent[:2]) - flat(own[:2]) * NORM / length
        assert np.std(noise) == pytest.approx(LOCAL_SIGMA, rel=0.5)
    assert watch.returned[0][3] == 13


@every_api
def test_clipping_a_model_with_an_integer_vector_fails_on_the_client_with_the_reason(api, caplog):
    start = [*START, np.array([3, 4])]
    watch = Watch(strategy_of(FedAvg, start, max_failed_rounds=2))
    noisy = mods_of(api).LocalDpMod(NORM, SENSITIVITY, EPSILON, DELTA)
    with pytest.raises(strategies.RoundsFailed, match="2 rounds in a row failed, the last one: 0 usable results"):
        serve(api, faced(api, watch.strategy), client_app(api, [noisy]), start=start)
    assert "Cannot cast ufunc 'multiply' output" in caplog.text


@every_api
def test_a_client_that_has_not_moved_fails_to_be_clipped(api, caplog):
    still = client_app(
        api, [mods_of(api).LocalDpMod(NORM, SENSITIVITY, EPSILON, DELTA)], train=_all_but_the_first_train
    )
    watch = Watch(strategy_of(FedAvg))
    serve(api, faced(api, watch.strategy), still)
    assert [(m["clients_accepted"], m["clients_failed"]) for m in watch.metrics] == [(CLIENTS - 1, 1)] * ROUNDS
    assert "ZeroDivisionError" in watch.metrics[0]["failure_reasons"]


def _all_but_the_first_train(cid, arrays):
    return add_update(cid, arrays) if cid else arrays


@every_api
def test_one_failed_client_skips_the_round_under_the_wrappers(api, caplog):
    """They ask the strategy nothing then, so `max_failed_rounds` cannot count either."""
    watch = Watch(strategy_of(FedAvg, max_failed_rounds=1))
    broken = client_app(api, [mods_of(api).fixedclipping_mod], train=_the_first_raises)
    serve(api, fixed(api, watch.strategy), broken)
    assert len(watch.models) == ROUNDS
    assert watch.received == []
    for arrays in watch.models:
        np.testing.assert_array_equal(flat(arrays), flat(START))


def _the_first_raises(cid, arrays):
    if cid == 0:
        raise RuntimeError("the data is gone")
    return add_update(cid, arrays)


def test_clipping_mods_of_the_message_api_belong_to_train_only(caplog):
    """On the whole app they ask evaluate messages for a clipping norm, too, and find none."""
    evaluated = {}
    for everywhere in (False, True):
        watch = Watch(strategy_of(FedAvg, fraction_evaluate=1.0, min_evaluate_clients=CLIENTS))
        app = client_app("message", [flwr.clientapp.mod.fixedclipping_mod], everywhere=everywhere)
        serve("message", fixed("message", watch.strategy), app, rounds=1)
        evaluated[everywhere] = watch.evaluated
    assert evaluated == {False: [(CLIENTS, 0)], True: [(0, CLIENTS)]}
    assert "requires the key 'clipping_norm'" in caplog.text


@every_api
def test_flowers_adaptive_norm_runs_away_from_its_target(api):
    """All updates are clipped, so the norm is too small, and Flower lowers it. Fails once Flower has mended this."""
    wrapper = wrapper_of(api, "Adaptive")(faced(api, strategy_of(FedAvg)), 0.0, CLIENTS, initial_clipping_norm=NORM)
    serve(api, wrapper, client_app(api, [mods_of(api).adaptiveclipping_mod]))
    assert wrapper.clipping_norm == pytest.approx(NORM * math.exp(-0.2 * (1 - 0.5)) ** ROUNDS)


def test_flowers_accountant_takes_flowers_fedavg_only():
    accountant = SimpleNamespace(config=SimpleNamespace(sampling_method=SamplingMethod.NO_AMPLIFICATION))
    with pytest.raises(ValueError, match=r"requires a strategy using FedAvg\.aggregate_train"):
        wrapper_of("message", "Fixed")(MessageStrategy(FedAvg()), MULTIPLIER, NORM, CLIENTS, accountant=accountant)


# ---- what noise and clipping do to methods that look at conflict --------------------------------------------------


def test_clipping_makes_the_updates_equally_long():
    """So whoever trained longest no longer pulls hardest, and CRAFT's unit updates are a matter of course."""
    watch = Watch(strategy_of(CRAFT))
    serve(
        "message", fixed("message", watch.strategy, 0.0), client_app("message", [flwr.clientapp.mod.fixedclipping_mod])
    )
    own = [np.linalg.norm(u) for _, u, _ in watch.updates()]
    assert max(own) > 1.2 * min(own)
    np.testing.assert_allclose([np.linalg.norm(seen) for _, _, seen in watch.updates()], NORM, rtol=1e-5)


def test_noise_hides_conflict():
    """⟨g_i + z_i, Σ ρ_j (g_j + z_j)⟩ has the mean ⟨g_i, ḡ⟩ + ρ_i σ² d: enough noise, and nobody is in conflict."""
    d, sigma = 4000, 0.05
    rng = np.random.default_rng(3)
    start = [np.zeros(d)]
    shared = rng.normal(size=d)
    shared /= np.linalg.norm(shared)
    signs = (1.0, 1.0, 1.0, -1.0)
    clean = [result(i, [sign * shared]) for i, sign in enumerate(signs)]
    noisy = [result(i, [sign * shared + sigma * rng.normal(size=d)]) for i, sign in enumerate(signs)]
    found = []
    for sent in (clean, noisy):
        s = strategy_of(CRAFT, start, constraint="inequality", min_completed=1)
        found.append(s.aggregate_fit(1, sent, [])[1])
    assert found[0]["conflict_share_before"] == 0.25
    assert -1 * 0.5 + 0.25 * sigma**2 * d > 0  # ⟨g_4, ḡ⟩ = −½, and what noise adds
    assert found[1]["conflict_share_before"] == 0.0


# ---- secure aggregation: who needs more than the mean -------------------------------------------------------------

VARIANTS = {
    **ALL,
    "oracle-fedavg": lambda **k: OracleFedAvg(contaminated=[1], **k),  # with nobody to leave out it is FedAvg
    "normalised-momentum-mean-norm": lambda **k: NormalisedMomentum(scale="mean_norm", **k),
    "fedref-long": lambda **k: strategies.FedRef(window=2, **k),
}
every_variant = pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)


def shown_after(make, device, changes, sizes, rounds=3):
    """What clients receive and what is evaluated, after rounds in which client i's model is the one received + u_i."""
    cids = [str(i) for i in range(len(sizes))]
    s = make(
        initial_parameters=ndarrays_to_parameters(model(dtype=np.float64)), device=device, fraction_fit=1.0,
        min_available_clients=len(cids), min_fit_clients=len(cids),
    )  # fmt: skip
    clients, parameters, shown = manager(cids), s.initial_parameters, []
    for number in range(1, rounds + 1):
        asked = {proxy.cid: arrays_of(ins.parameters) for proxy, ins in s.configure_fit(number, parameters, clients)}
        sent = [
            result(cid, [np.asarray(a + u) for a, u in zip(asked[cid], changes[i], strict=True)], sizes[i])
            for i, cid in enumerate(cids)
        ]
        parameters, metrics = s.aggregate_fit(number, sent, [])
        assert not metrics["failed_round"], metrics
        shown.append(arrays_of(s.evaluated(parameters)))
        shown.extend(arrays_of(s.sent_to(cid, parameters)) for cid in cids)
    return s, flat(flat(arrays) for arrays in shown)


def with_the_mean_of(changes, others, sizes):
    """The others' updates, moved by the same amount each so that the weighted mean is that of `changes`."""
    shares = np.array(sizes) / sum(sizes)
    gaps = [sum(p * (u[t] - v[t]) for p, u, v in zip(shares, changes, others, strict=True)) for t in range(3)]
    return [[*(np.asarray(v[t] + gaps[t]) for t in range(3)), v[3]] for v in others]


def pairs_of_updates():
    """(sizes, updates, other updates with the same weighted mean and the same counters)."""
    rng = np.random.default_rng(5)
    shapes = [a.shape for a in model()[:3]]
    drawn = [[[*(rng.normal(size=shape) for shape in shapes), np.array(i)] for i in range(5)] for _ in range(3)]
    yield [10, 20, 30, 40, 50], drawn[0], drawn[1]
    # Matrices that differ by rank one, in one of the sets but for one client: what CLAIR votes on.
    row = rng.normal(size=(1, 3))
    aligned = [[rng.normal(size=(4, 1)) @ row, *u[1:]] for u in drawn[2]]
    stranger = [*aligned[:4], [5 * rng.normal(size=(4, 3)), *aligned[4][1:]]]
    yield [10] * 5, aligned, stranger


@every_variant
def test_a_strategy_says_it_needs_individual_updates_if_and_only_if_its_steps_depend_on_them(make, device):
    depends = False
    for sizes, one, other in pairs_of_updates():
        s, first = shown_after(make, device, one, sizes)
        _, second = shown_after(make, device, with_the_mean_of(one, other, sizes), sizes)
        depends = depends or not np.allclose(first, second, rtol=1e-9, atol=1e-9)
    assert s.individual == depends


def table_of(page):
    """The table of strategies in a page: by the first column, the other columns."""
    rows = [re.findall(r"[^|]+", line) for line in page.splitlines() if re.match(r"\| `\w+` ", line)]
    return {name.strip().strip("`"): [cell.strip() for cell in rest] for name, *rest in rows if len(rest) == 3}


def test_the_page_says_the_same_of_every_strategy():
    table = table_of(PAGE.read_text())
    for make in VARIANTS.values():
        s = make()
        name = type(s).__name__
        individual, secagg, dp = table[name]
        if isinstance(s, NormalisedMomentum) and s.scale == "mean_norm":
            assert "mean_norm" in individual
            continue
        assert individual.split(":")[0].split(",")[0] == ("yes" if s.individual else "no"), name
        assert secagg == ("no" if s.individual else "yes"), name
        assert dp == "yes", name
    assert set(table) == {type(make()).__name__ for make in VARIANTS.values()}


# ---- secure aggregation: Flower's SecAgg+ -------------------------------------------------------------------------

MAX_WEIGHT, RANGE, LEVELS = 100.0, 8.0, 2**22  # the workflow's defaults, but for the weight
EXAMPLES = [10 * (cid + 1) for cid in range(CLIENTS)]


def securely(strategy, client, rounds=ROUNDS):
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=rounds), strategy=strategy)
        secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=MAX_WEIGHT)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    serve_on(SerialGrid(client, CLIENTS), app)


def secagg_app(train=add_update):
    return client_app("legacy", [flwr.client.mod.secaggplus_mod], train=train)


def quantisation():
    """Most by which the mean can be off: each client rounds w·θ to a grid, w and the sum are of n/max_weight."""
    weight = sum(EXAMPLES) / MAX_WEIGHT
    grid = 2 * RANGE / LEVELS
    return CLIENTS * (grid + 4 / LEVELS) / weight  # and its weight to 1/LEVELS, of models within ±4


def test_fedavg_under_secagg_is_the_plain_mean_up_to_quantisation():
    secure, plain = Watch(strategy_of(FedAvg)), Watch(strategy_of(FedAvg))
    securely(secure.strategy, secagg_app(), rounds=1)
    serve("legacy", plain.strategy, client_app("legacy"), rounds=1)
    assert np.max(np.abs(flat(plain.received[0]["1000"]))) < 4
    np.testing.assert_allclose(flat(secure.returned[0]), flat(plain.returned[0]), atol=quantisation())
    assert not np.allclose(flat(plain.received[0]["1000"]), flat(plain.returned[0]), atol=0.1)


def test_the_server_sees_the_mean_only_but_every_clients_metrics_and_number_of_examples():
    strategy = strategy_of(FedAvg)
    seen, aggregate = [], strategy.aggregate_fit

    def aggregate_fit(server_round, results, failures):
        seen.extend(results)
        return aggregate(server_round, results, failures)

    strategy.aggregate_fit = aggregate_fit
    securely(strategy, secagg_app(), rounds=1)
    assert len({id(res.parameters) for _, res in seen}) == 1
    assert sorted(res.num_examples for _, res in seen) == EXAMPLES
    assert sorted(res.metrics["train_loss"] for _, res in seen) == [told(cid)["train_loss"] for cid in range(CLIENTS)]


def test_a_client_that_drops_out_is_left_out_of_the_mean():
    strategy = Watch(strategy_of(FedAvg))
    securely(strategy.strategy, secagg_app(_the_first_raises), rounds=1)
    mean = sum(n * flat(add_update(cid, START)) for cid, n in enumerate(EXAMPLES) if cid) / sum(EXAMPLES[1:])
    np.testing.assert_allclose(flat(strategy.returned[0]), mean, atol=2 * quantisation())


NEED_THE_MEAN = {name: make for name, make in VARIANTS.items() if not make().individual}
NEED_MORE = {name: make for name, make in VARIANTS.items() if make().individual}


@pytest.mark.parametrize("make", NEED_THE_MEAN.values(), ids=NEED_THE_MEAN)
def test_strategies_that_need_the_mean_run_under_secagg(make):
    secure, plain = Watch(strategy_of(make)), Watch(strategy_of(make))
    securely(secure.strategy, secagg_app())
    serve("legacy", plain.strategy, client_app("legacy"))
    require_all_used(secure)
    for one, other, before in zip(secure.returned, plain.returned, plain.models, strict=True):
        assert np.linalg.norm(flat(one) - flat(other)) < 0.01 * np.linalg.norm(flat(other) - flat(before))


@pytest.mark.parametrize("make", NEED_MORE.values(), ids=NEED_MORE)
def test_strategies_that_need_more_refuse_to_run_under_secagg(make):
    strategy = strategy_of(make)
    with pytest.raises(ValueError, match="needs each client's own update; run it without secure aggregation") as caught:
        securely(strategy, secagg_app(), rounds=1)
    assert str(caught.value).startswith(f"all {CLIENTS} results share one model")
    assert type(strategy).__name__ in str(caught.value)


@pytest.mark.parametrize("option", [{"max_weight_share": 0.5}, {"clip_to_median": 2.0}])
def test_options_that_look_at_individual_updates_need_them(option):
    assert all(make(**option).individual for make in VARIANTS.values())
    with pytest.raises(ValueError, match=f"FedAvg with {next(iter(option))} needs each client's own update"):
        securely(strategy_of(FedAvg, **option), secagg_app(), rounds=1)


def test_the_clients_of_this_suite_train_under_secagg():
    cfg = small_config()
    start = get_arrays(check(cfg).new_model())
    secure, plain = Watch(strategy_of(FedAvg, start)), Watch(strategy_of(FedAvg, start))
    securely(secure.strategy, TaskClientApp(cfg, mods=[flwr.client.mod.secaggplus_mod]), rounds=1)
    serve("legacy", plain.strategy, TaskClientApp(cfg), start=start, rounds=1)
    assert np.linalg.norm(flat(plain.returned[0]) - flat(start)) > 0.1
    np.testing.assert_allclose(flat(secure.returned[0]), flat(plain.returned[0]), atol=1e-4)


def test_a_model_with_integer_counters_does_not_survive_secagg():
    watch = Watch(strategy_of(FedAvg, COUNTED, max_failed_rounds=2))
    with pytest.raises(strategies.RoundsFailed, match="dtype float64, the model's is int64"):
        securely(watch.strategy, secagg_app())


def test_equal_models_are_not_taken_for_secure_aggregation():
    """Clients may well send equal models; what gives secure aggregation away is that it is one object."""
    s = CRAFT(initial_parameters=initial())
    same = trained(model(), 1)[0]
    assert not s.aggregate_fit(1, [result(i, same) for i in range(3)], [])[1]["failed_round"]
    one = ndarrays_to_parameters(same)
    with pytest.raises(ValueError, match="all 3 results share one model"):
        s.aggregate_fit(2, [result(i, one) for i in range(3)], [])
    assert not s.aggregate_fit(3, [result(0, one)], [])[1]["failed_round"]
