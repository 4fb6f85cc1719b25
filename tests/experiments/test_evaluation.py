"""What clients report of their evaluations: one wrong report is left out and named, and harms nothing else."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from flwr.common import EvaluateIns, Scalar, ndarrays_to_parameters

from client_apps.app import TaskClient
from client_apps.arrays import get_arrays
from client_apps.tasks import build
from experiments.config import compose
from experiments.evaluation import Evaluator

CLIENTS = 4
CLASSES = 10


def evaluator(seen: list[Any] | None = None, *overrides: str) -> Evaluator:
    cfg = compose(["dataset=digits", f"num_clients={CLIENTS}", "clients_per_round=2", *overrides])
    made = Evaluator(build(cfg), CLIENTS, lambda *found: None if seen is None else seen.append(found))
    made.start_round(3)
    return made


def report(cid: int, right: int, **changes: Scalar | None) -> tuple[int, dict[str, Scalar]]:
    """Of a client with four examples of class 0; None takes an entry away."""
    counts = [[row] + [0] * (CLASSES - 1) for row in (right, right, 4)]
    entries: dict[str, Scalar | None] = {
        "partition_id": cid, "correct": right, "loss_sum": 2.0, "class_counts": json.dumps(counts),
        "personal_correct": right, "personal_loss_sum": 1.0,
    }  # fmt: skip
    return 4, {key: value for key, value in (entries | changes).items() if value is not None}


GOOD = [report(0, 1), report(2, 3)]

WRONG = [
    ({"class_counts": "{"}, "class_counts='{' is not an array in JSON"),
    ({"class_counts": "[" * 100_000}, "is not an array in JSON"),
    ({"class_counts": "[[1], [1, 2]]"}, "is not an array in JSON"),
    ({"class_counts": "[[1]]"}, r"class_counts has the shape (1, 1), not (3, 10)"),
    ({"class_counts": "null"}, "class_counts='null' is not made of numbers"),
    ({"class_counts": json.dumps([[-1] * CLASSES] * 3)}, "is not made of numbers"),
    ({"class_counts": json.dumps([[10**30] * CLASSES] * 3)}, "is not made of numbers"),
    ({"class_counts": json.dumps([[float("nan")] * CLASSES] * 3)}, "is not made of numbers"),
    ({"correct": "x"}, "correct='x' is not an array in JSON"),
    ({"correct": b"1"}, "correct=b'1' is not made of numbers"),
    ({"correct": True}, "correct=True is not made of numbers"),
    ({"correct": None}, "it lacks correct"),
    ({"correct": 10**6}, "its accuracy would be 250000"),
    ({"correct": -1}, "correct=-1 is not made of numbers"),
    ({"loss_sum": float("nan")}, "loss_sum=nan is not a finite number"),
    ({"loss_sum": 1e308}, "loss_sum=1e+308 is not a finite number"),
    ({"loss_sum": None}, "loss_sum=None is not a finite number"),
    ({"partition_id": None}, "client None is not used: partition_id is not an integer from 0 to 3"),
    ({"partition_id": "x"}, "client 'x' is not used: partition_id is not an integer from 0 to 3"),
    ({"partition_id": 2**40}, "partition_id is not an integer from 0 to 3"),
    ({"partition_id": -1}, "partition_id is not an integer from 0 to 3"),
    ({"partition_id": 1.0}, "partition_id is not an integer from 0 to 3"),
    ({"partition_id": True}, "partition_id is not an integer from 0 to 3"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_a_wrong_report_is_left_out_and_named(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING):
        found = evaluator(seen).from_clients([GOOD[0], report(1, 4, **changes), GOOD[1]])
    assert reason in caplog.text
    assert "round 3: the evaluation of client " in caplog.text
    assert found == evaluator().from_clients(GOOD)
    assert (found["accuracy"], found["clients_evaluated"]) == (0.5, 2)
    assert [list(ids) for _, ids, *_ in seen] == [[0, 2]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"personal_correct": 10**6}, "its personal_accuracy would be 250000"),
        ({"personal_correct": None}, "it lacks personal_correct"),
        ({"personal_loss_sum": float("inf")}, "personal_loss_sum=inf is not a finite number"),
        ({"personal_class_counts": "[]"}, "personal_class_counts has the shape (0,), not (3, 10)"),
    ],
)
def test_a_wrong_report_of_a_personal_model_is_left_out_of_those_only(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = evaluator().from_clients([*GOOD, report(1, 4, **changes)])
    assert "round 3: the personal evaluation of client 1 is not used" in caplog.text
    assert reason in caplog.text
    assert (found["accuracy"], found["clients_evaluated"]) == (pytest.approx(2 / 3), 3)
    expected = evaluator().from_clients(GOOD)
    assert {k: v for k, v in found.items() if "personal" in k} == {k: v for k, v in expected.items() if "personal" in k}


def test_where_no_report_can_be_used_there_are_no_metrics(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING):
        assert evaluator(seen).from_clients([report(0, 9), (0, {})]) == {}
    assert "round 3: no client reports an evaluation that can be used" in caplog.text
    assert not seen


def test_clients_of_before_report_no_class_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = evaluator().from_clients([report(0, 1, class_counts=None), report(2, 3, class_counts=None)])
    assert found["accuracy"] == 0.5
    assert "macro_f1" not in found
    assert not caplog.records


def test_macro_f1_of_what_clients_report() -> None:
    found = evaluator().from_clients(GOOD)
    assert found["macro_f1"] == pytest.approx(2 * 4 / (4 + 8))  # 4 of 8 of class 0 found, none of it wrong


# ---- contaminated clients ----------------------------------------------------------------------------------------

ATTACKED = ("client.attack=sign_flip", "client.attackers=[2]")


def test_benign_metrics_are_those_of_the_others_alone() -> None:
    reports = [report(0, 1), report(1, 2), report(2, 4)]
    found = evaluator(None, *ATTACKED).from_clients(reports)
    alone = evaluator().from_clients(reports[:2])
    assert (found["accuracy"], found["worst10"]) == (pytest.approx(7 / 12), 0.25)  # of all, as ever
    assert (found["benign_accuracy"], found["benign_worst10"]) == (pytest.approx(3 / 8), 0.25)
    assert (found["benign_personal_accuracy"], found["benign_personal_worst10"]) == (pytest.approx(3 / 8), 0.25)
    assert found["benign_macro_f1"] == alone["macro_f1"]
    of_all = evaluator().from_clients(reports)
    assert {key: value for key, value in found.items() if not key.startswith("benign")} == of_all
    assert not [key for key in of_all if "benign" in key]


def test_where_only_contaminated_clients_report_there_are_no_benign_metrics() -> None:
    found = evaluator(None, *ATTACKED).from_clients([report(2, 4)])
    assert found["accuracy"] == 1
    assert not [key for key in found if "benign" in key]


def test_server_and_clients_agree_on_what_is_benign() -> None:
    """Of a regression, whose errors are known: one client with a row space of its own, one that lies."""
    overrides = ["dataset=linear", "model=linear", f"num_clients={CLIENTS}", "clients_per_round=2"]
    task = build(compose([*overrides, "dataset.contaminated=1", "client.attack=sign_flip", "client.attackers=[0]"]))
    assert task.attackers == {0, 3}
    made = Evaluator(task, CLIENTS, lambda *_: None)
    arrays = get_arrays(task.new_model())
    _, on_server = made.on_server(1, arrays, {})
    answers = [
        TaskClient(task, cid).evaluate(EvaluateIns(ndarrays_to_parameters(arrays), {})) for cid in range(CLIENTS)
    ]
    by_clients = made.from_clients([(answer.num_examples, dict(answer.metrics)) for answer in answers])
    assert by_clients == on_server
    truth = np.sum((arrays[0].astype(np.float64) - task.problem.weights) ** 2, axis=(1, 2))  # type: ignore[attr-defined]
    assert on_server["estimation_error"] == pytest.approx(truth.mean())
    assert on_server["benign_estimation_error"] == pytest.approx(truth[[1, 2]].mean())
    scores = [float(answer.metrics["r2"]) for answer in answers]
    assert (on_server["benign_r2"], on_server["benign_worst10"]) == (
        pytest.approx(np.mean(scores[1:3])),
        min(scores[1:3]),
    )
