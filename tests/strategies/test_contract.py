"""Every strategy keeps the contract of `strategies.testing`, and what does not keep it is caught by the right check."""

import copy
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from flwr.common import ndarrays_to_parameters

import conf
import strategies
from strategies import FedAvg, FedAvgM, SpanStrategy, UpdateStrategy
from strategies.testing import CHECKS, check_strategy

from .helpers import ALL, arrays_of, every_strategy

every_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


@every_check
@every_strategy
def test_contract(make, check, device):
    check(make, device=device)


def test_every_strategy_is_checked():
    bases = {UpdateStrategy, SpanStrategy}
    exported = {x for x in vars(strategies).values() if inspect.isclass(x) and issubclass(x, UpdateStrategy)} - bases
    checked = {type(make()) for make in ALL.values()}
    assert exported <= checked
    configured = {
        yaml.safe_load(path.read_text())["_target_"]
        for path in (Path(conf.__file__).parent / "strategy").glob("*.yaml")
    }
    assert configured <= {f"strategies.{cls.__name__}" for cls in checked}


# ---- the suite itself: what is broken on purpose is caught ---------------------------------------------------


class FirstComeFirstServed(FedAvg):
    """Follows the first result to arrive."""

    def aggregate_fit(self, server_round, results, failures):
        self.first = results[0][0].cid if results else None
        return super().aggregate_fit(server_round, results, failures)

    def solve_layer(self, updates, layer):
        alpha = torch.tensor([float(cid == self.first) for cid in updates.clients], dtype=torch.float64)
        return updates.combine(layer, alpha.to(updates.device) + updates.weights)


class FavoursItsFirstClient(FedAvg):
    """Weights by the canonical order of the ids."""

    def solve_layer(self, updates, layer):
        return updates.combine(layer, torch.arange(1.0, len(updates) + 1, dtype=torch.float64, device=updates.device))


class ClipsItsInput(FedAvg):
    """Repairs numbers of any size."""

    def aggregate_fit(self, server_round, results, failures):
        for _, res in results:
            arrays = [np.clip(a, -10, 10) if a.dtype == np.float64 else a for a in arrays_of(res.parameters)]
            res.parameters = ndarrays_to_parameters(arrays)
        return super().aggregate_fit(server_round, results, failures)


class CountsTwice(FedAvg):
    """Hides that a client has sent twice."""

    def aggregate_fit(self, server_round, results, failures):
        for i, (proxy, _) in enumerate(results):
            if proxy.cid in [p.cid for p, _ in results[:i]]:
                results[i] = (copy.copy(proxy), results[i][1])
                results[i][0].cid += "-again"
        return super().aggregate_fit(server_round, results, failures)


class TakesAnything(FedAvg):
    """Repairs what it should reject."""

    def aggregate_fit(self, server_round, results, failures):
        for _, res in results:
            res.num_examples = max(1, int(res.num_examples))
        return super().aggregate_fit(server_round, results, failures)


class ScalesItsInput(FedAvg):
    """Writes to what it received."""

    def aggregate_fit(self, server_round, results, failures):
        done = super().aggregate_fit(server_round, results, failures)
        for _, res in results:
            res.metrics["weight"] = 1.0
        return done


class KeepsViews(FedAvg):
    """Keeps the clients' memory beyond the round."""

    def conclude(self, updates):
        self.kept = updates.tensors(0)


class ReusesItsOutput(FedAvg):
    """Returns one object each round, with other content."""

    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        self.returned = getattr(self, "returned", parameters)
        self.returned.tensors = parameters.tensors
        return self.returned, metrics


class ReadsOldViews(FedAvg):
    """Follows the previous round's results, by then overwritten."""

    def conclude(self, updates):
        self.old = updates.tensors(0)[0]

    def solve_layer(self, updates, layer):
        direction = super().solve_layer(updates, layer)
        return direction.scaled(torch.tensor(1 + float(np.abs(getattr(self, "old", np.zeros(1))).sum())))


class GoesToFloat64(FedAvg):
    """Loses the dtypes."""

    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        return ndarrays_to_parameters([a.astype(np.float64) for a in arrays_of(parameters)]), metrics


class StepsItsBuffers(FedAvgM):
    """Takes running statistics for weights."""

    def __init__(self, *, layers=None, **common):
        super().__init__(**common)


class DividesByTheMean(FedAvg):
    """Has no direction where the mean is zero."""

    def solve_layer(self, updates, layer):
        mean = updates.combine(layer, updates.weights)
        return mean.scaled(1 / torch.linalg.vector_norm(mean.vector))


class Extrapolates(FedAvg):
    """Goes the further the less the clients agree."""

    def solve_layer(self, updates, layer):
        mean = updates.combine(layer, updates.weights + 1e-9 * updates.reported("train_loss"))
        return mean.scaled(mean.squared_norms.mean() / (mean.vector @ mean.vector).clamp(min=1e-300))


class SharesInFloat16(FedAvg):
    """Rounds small shares to zero."""

    def solve_layer(self, updates, layer):
        return updates.combine(layer, 1 / updates.weights.half().double())


class SquaresInFloat32(FedAvg):
    """Overflows early."""

    def solve_layer(self, updates, layer):
        mean = updates.combine(layer, updates.weights)
        return mean.scaled(
            (mean.vector.float().square().sum() > 0).double() * mean.squared_norms.float().square().sum()
        )


class NeedsWideLayers(FedAvg):
    """Inverts a matrix that is singular where clients outnumber parameters."""

    def solve_layer(self, updates, layer):
        gram = updates.gram(layer).matrix
        return updates.combine(layer, torch.linalg.solve(gram, torch.ones_like(updates.weights)))


class AsksForTwo(FedAvg):
    """Compares the first client with the others."""

    def solve_layer(self, updates, layer):
        return updates.combine(layer, updates.weights).scaled(updates.weights.mean() / (1 - updates.weights[0]))


class OneOfManyAlike(FedAvg):
    """Turns away from clients that agree."""

    def solve_layer(self, updates, layer):
        mean = updates.combine(layer, updates.weights)
        return updates.measure(layer, mean.vector.roll(1)) if len(updates) > 1 else mean


class ForgetsItsMomentum(FedAvg):
    """Keeps state where it is not saved."""

    def solve_layer(self, updates, layer):
        self.velocity = getattr(self, "velocity", {})
        direction = updates.combine(layer, updates.weights, self.velocity.get(layer.name), 0.9)
        self.velocity[layer.name] = direction.vector
        return direction


class RemembersWithoutSaying(FedAvg):
    """Keeps memory of a kind that it does not declare."""

    def solve_layer(self, updates, layer):
        direction = super().solve_layer(updates, layer)
        return direction.remembering(direction=direction.vector)


class RecordsASet(FedAvg):
    """Keeps records that JSON does not give back."""

    def conclude(self, updates):
        self.records["seen"] = set(updates.clients)

    def check_state(self, records, memory):
        pass


class LoadsAnything(FedAvg):
    """Trusts whatever records it is given."""

    def conclude(self, updates):
        self.records["rounds"] = self.records.get("rounds", 0) + 1

    def check_state(self, records, memory):
        pass


class RemembersTooEarly(FedAvg):
    """Changes its memory before the round has succeeded."""

    remembers = ("velocity",)

    def solve_layer(self, updates, layer):
        direction = super().solve_layer(updates, layer)
        self.memory[f"velocity/{layer.name}"] = direction.vector
        return direction


class SharesItsRecords(FedAvg):
    """All instances have one list."""

    shared = {"rounds": 0}  # noqa: RUF012  the mistake on purpose

    def __init__(self, **common):
        super().__init__(**common)
        self.records = self.shared

    def conclude(self, updates):
        self.records["rounds"] += 1

    def check_state(self, records, memory):
        pass


class NeverRaises(FedAvg):
    """Fails for ever."""

    def __init__(self, *, max_failed_rounds=5, **common):
        super().__init__(max_failed_rounds=10**9, **common)


class OneSeed(FedAvg):
    """Takes no notice of the seed."""

    def __init__(self, *, seed=0, **common):
        super().__init__(**common)


class IgnoresLayers(FedAvg):
    """Takes any model, whatever the LayerMap says."""

    def __init__(self, *, layers=None, **common):
        super().__init__(**common)


class ReportsAList(FedAvg):
    """Reports what Flower cannot carry."""

    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        return parameters, {**metrics, "sizes": [1, 2]}


class TellsNothing(FedAvg):
    """Requires a loss that it does not ask for."""

    requires = ("initial_loss",)

    def fit_config(self):
        return {}


class EvaluatesInFloat64(FedAvg):
    """Deploys another kind of model than it trains."""

    def evaluated(self, parameters):
        return ndarrays_to_parameters([a.astype(np.float64) for a in arrays_of(parameters)])


class NeverRepeats(FedAvg):
    """Draws from a generator without a seed."""

    def solve_layer(self, updates, layer):
        return updates.combine(layer, updates.weights * (1 + torch.rand(len(updates), device=updates.device)))


class TakesMissingForZero(FedAvg):
    """Reads a loss that it does not require."""

    requires = ("gain",)

    def aggregate_fit(self, server_round, results, failures):
        for _, res in results:
            res.metrics.setdefault("gain", 0.0)
        return super().aggregate_fit(server_round, results, failures)


class CountsExamples(FedAvg):
    """Weights by what clients claim."""

    def solve_layer(self, updates, layer):
        counts = torch.tensor(updates.num_examples, dtype=torch.float64, device=updates.device)
        return updates.combine(layer, counts / counts.sum())


class TakesAnyLength(FedAvg):
    """Forgets an option."""

    def __init__(self, *, clip_to_median=None, **common):
        super().__init__(**common)


BROKEN = [
    (TakesAnything, "unusable_clients_are_left_out", "accepted"),
    (ClipsItsInput, "huge_numbers_are_rejected", "1e170"),
    (CountsTwice, "duplicates_count_once", "second of two results"),
    (CountsExamples, "an_inflated_count_has_the_largest_share", "10\\^15 examples"),
    (TakesAnyLength, "a_long_update_is_cut_to_length", "3 times"),
    (FirstComeFirstServed, "the_order_of_arrival_changes_no_bit", "same bits in any order"),
    (FavoursItsFirstClient, "client_ids_do_not_matter", "under other client ids"),
    (OneOfManyAlike, "identical_clients_go_where_one_goes", "a cosine of"),
    (AsksForTwo, "one_client_is_enough", "not finite"),
    (NeverRepeats, "clients_come_and_go", "played twice"),
    (DividesByTheMean, "zero_updates_leave_the_model", "not finite"),
    (DividesByTheMean, "a_tensor_that_nobody_changed_does_no_harm", "not finite"),
    (Extrapolates, "updates_that_cancel_do_no_harm", "of the updates' size"),
    (SquaresInFloat32, "scales_from_tiny_to_huge", "1e-12"),
    (SharesInFloat16, "very_unequal_shares", "not finite"),
    (GoesToFloat64, "dtypes_shapes_buffers_and_counters", "float16"),
    (StepsItsBuffers, "dtypes_shapes_buffers_and_counters", "between the clients' values"),
    (NeedsWideLayers, "more_clients_than_numbers", "singular"),
    (IgnoresLayers, "layers_given_or_not", "does not fit the LayerMap"),
    (ScalesItsInput, "what_is_received_and_returned_is_left_alone", "leaves as they are"),
    (ReadsOldViews, "what_is_received_and_returned_is_left_alone", "used for something else"),
    (ReusesItsOutput, "returned_models_stay", "as it was returned"),
    (KeepsViews, "lent_memory_is_given_back", "views of it"),
    (SharesItsRecords, "instances_and_copies_share_nothing", "rounds"),
    (RemembersWithoutSaying, "the_state_is_json_and_tensors", "not one this strategy keeps|of the kinds"),
    (RecordsASet, "the_state_is_json_and_tensors", "not JSON serializable"),
    (ForgetsItsMomentum, "a_resumed_run_continues_bit_for_bit", "uninterrupted run"),
    (LoadsAnything, "unfit_states_are_refused", "record"),
    (RemembersTooEarly, "failed_rounds_change_nothing", "state as it was"),
    (NeverRaises, "failures_in_a_row_end_the_run", "RoundsFailed"),
    (OneSeed, "seeds_choose_the_clients", "another seed"),
    (ReportsAList, "metrics_are_scalars", "'sizes' of list"),
    (TellsNothing, "clients_are_told_what_they_need", "initial_loss"),
    (EvaluatesInFloat64, "the_evaluated_model_is_a_model", "float64"),
]


@pytest.mark.parametrize(("cls", "check", "words"), BROKEN, ids=[f"{cls.__name__}-{check}" for cls, check, _ in BROKEN])
def test_a_broken_strategy_is_caught(cls, check, words):
    with pytest.raises(AssertionError, match=f"^{check}: (?s:.)*(?:{words})"):
        CHECKS[check](cls)
    CHECKS[check](FedAvg)


def test_a_metric_that_is_made_up_is_caught():
    def reports(i):
        return {"gain": 1.0 + i}

    with pytest.raises(AssertionError, match=r"^required_metrics_are_required: .*gain"):
        CHECKS["required_metrics_are_required"](TakesMissingForZero, metrics=reports)


class Weighted(FedAvg):
    """Sound, with a metric of its own."""

    requires = ("gain",)

    def solve_layer(self, updates, layer):
        gain = updates.reported("gain")
        return updates.combine(layer, gain / gain.sum())


def test_a_sound_strategy_with_a_metric_of_its_own_passes():
    check_strategy(Weighted, metrics=lambda i: {"gain": 1.0 + i % 3})
    with pytest.raises(AssertionError, match=r"gain=None, but this strategy needs a number there"):
        check_strategy(Weighted)


def test_the_first_broken_check_ends_the_suite():
    with pytest.raises(AssertionError, match=r"^the_state_is_json_and_tensors: expected"):
        check_strategy(RemembersWithoutSaying, devices=["cpu"])


def test_every_check_catches_something():
    assert {check for _, check, _ in BROKEN} | {"required_metrics_are_required"} == set(CHECKS)
