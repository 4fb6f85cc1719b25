"""The report of finished runs: tables, files, comparisons, what is left out."""

import csv
import io
import json
import math
import re
import struct
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.comparison import holm
from experiments.curves import drawable, figure_of
from experiments.report import main, report
from experiments.runs import find_runs, group_runs
from experiments.tracking import RunTracker


def config(seed=0, **changes):
    settings = {
        "seed": seed,
        "num_clients": 100,
        "clients_per_round": 10,
        "num_rounds": 3,
        "dataset": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.1}},
        "model": {"name": "mlp"},
        "client": {"lr": 0.1, "device": "cpu"},
        "strategy": {"_target_": "strategies.FedAvg"},
        "target_accuracy": 0.5,
    }
    return settings | changes


def write_run(folder, accuracies, settings, **metrics):
    """Leave a run whose round r has the r-th accuracy and, if given, the r-th value of the other metrics."""
    with RunTracker(
        folder, config=settings, num_rounds=settings["num_rounds"], tensorboard=False, progress=False
    ) as run:
        for number, accuracy in enumerate(accuracies):
            row = {"round": number, "accuracy": accuracy}
            run.log_round(row | {name: values[number] for name, values in metrics.items()})


def craft(server_lr=0.1):
    return {"_target_": "strategies.CRAFT", "server_lr": server_lr}


def quiet(width=120):
    return Console(file=io.StringIO(), width=width)


def rows(folder):
    with (folder / "report.csv").open(encoding="utf-8", newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


@pytest.fixture
def runs(tmp_path):
    """Two strategies with two seeds, and numbers that a person can average."""
    spread = {
        "accuracy_std": [None, None, None, 0.2],
        "worst10": [0.0, 0.1, 0.2, 0.25],
        "best10": [None, None, None, 1.0],
        "conflict_share_before": [None, 0.4, 0.4, 0.4],
        "conflict_share_after": [None, 0.0, 0.1, 0.0],
    }
    write_run(tmp_path / "a0", [0.1, 0.4, 0.6, 0.7], config(0, strategy=craft()), **spread)
    write_run(tmp_path / "a1", [0.1, 0.5, 0.6, 0.8], config(1, strategy=craft()), **spread)
    write_run(tmp_path / "deep/er/b0", [0.1, 0.2, 0.3, 0.4], config(0))
    write_run(tmp_path / "deep/er/b1", [0.1, 0.2, 0.3, 0.6], config(1), clients_rejected=[0, 1, 0, 2])
    return tmp_path


def test_numbers_against_a_hand_calculation(runs):
    report([runs], console=quiet())
    table = rows(runs)
    assert list(table) == ["CRAFT", "FedAvg"]  # best first
    best, other = table["CRAFT"], table["FedAvg"]
    assert (best["dataset"], best["model"], best["partition"]) == ("digits", "mlp", "dirichlet")
    assert (best["num_clients"], best["clients_per_round"], best["num_rounds"]) == ("100", "10", "3")
    assert best["seeds"] == other["seeds"] == "2"
    assert float(best["accuracy_seed_mean"]) == pytest.approx(0.75)
    assert float(best["accuracy_seed_std"]) == pytest.approx(0.1 / 2**0.5)  # sample std of two values
    assert float(best["accuracy_std_seed_mean"]) == pytest.approx(0.2)
    assert float(best["worst10_seed_mean"]) == pytest.approx(0.25)
    assert float(best["best10_seed_mean"]) == pytest.approx(1.0)
    assert float(best["target"]) == 0.5
    assert float(best["rounds_to_target_seed_mean"]) == pytest.approx((2 + 1) / 2)
    assert best["seeds_reaching_target"] == "2"
    assert float(best["seconds_seed_mean"]) >= 0
    assert float(other["accuracy_seed_mean"]) == pytest.approx(0.5)
    assert other["worst10_seed_mean"] == ""  # not reported
    assert other["seeds_reaching_target"] == "1"
    assert float(other["rounds_to_target_seed_mean"]) == 3
    assert other["rounds_to_target_seed_std"] == ""
    assert (best["rejected_clients"], other["rejected_clients"]) == ("0", "3")


def test_markdown_table(runs):
    assert report([runs], console=quiet()) == runs / "report.md"
    text = (runs / "report.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    titles, _, best, other = lines
    best, other = dict(zip(titles, best, strict=True)), dict(zip(titles, other, strict=True))
    assert best["accuracy"] == "**75.0 ± 7.1**"
    assert other["accuracy"] == "50.0 ± 14.1"
    assert best["rounds to target"] == "2"  # alone with a full value, so best of nothing
    assert other["rounds to target"] == "3 (1/2)"
    assert other["worst 10 %"] == "–"
    assert other["rejected clients"] == "3"
    assert "failed rounds" not in titles
    assert "digits, mlp, dirichlet(0.1)" in text
    assert "100 clients, 10 per round, 3 rounds" in text
    assert f"python -m experiments.report {runs}" in text


def test_runs_of_before_have_none_of_the_newer_tables_and_columns(runs):
    console = quiet(120)
    text = report([runs], console=console).read_text(encoding="utf-8")
    for output in (text, console.file.getvalue(), ",".join(rows(runs)["CRAFT"])):
        assert not any(word in output for word in ("forgetting", "Forgetting", "F1", "dice", "HD95", "personal"))
    assert [len(axes) for axes in panels(runs)] == [3]


def panels(folder):
    """Return the axes of each setting's curves."""
    figure = figure_of(group_runs(find_runs([folder])[0], None, []))
    return [part.get_axes() for part in figure.subfigs[:-1]]


STABLE = {
    "forgetting": [0.0, 0.0, 0.1, 0.2],
    "updatable": [0.0, -0.3, -0.7, -1.0],
    "zeta": [0.0, -0.3, -0.6, -0.8],
    "total_variation": [0.0, 0.3, 0.6, 0.7],
    "share_fell": [0.0, 0.0, 0.0, 0.25],
    "udp_loss": [None, 0.0, 0.5, 0.4],
    "udp_norm": [None, 1.0, 1.0, 0.75],
    "straightness": [None, 1.0, 0.9, 0.625],
    "path_length": [None, 1.0, 2.0, 3.0],
    "distance_from_start": [None, 1.0, 1.8, 1.875],
    "train_loss": [None, 2.0, 1.5, 1.25],
}


def table_of(text, *titles):
    """Return the rows of the Markdown table that has these titles first, by strategy."""
    tables = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
        for part in text.split("\n\n")
        if part.startswith("| ")
    ]
    (found,) = [table for table in tables if tuple(table[0][1 : 1 + len(titles)]) == titles]
    return {line[0]: dict(zip(found[0], line, strict=True)) for line in found[2:]}


def test_forgetting_and_stability_have_a_table_of_their_own(tmp_path):
    calmer = STABLE | {"forgetting": [0.0, 0.0, 0.0, 0.1], "straightness": [None, 1.0, 1.0, 0.75]}
    deltas = {"udp_loss_delta": 0.0, "udp_norm_delta": 2.5}
    write_run(tmp_path / "a", [0.1, 0.4, 0.6, 0.7], config(0, strategy=craft(), tracking=deltas), **STABLE)
    write_run(tmp_path / "b", [0.1, 0.4, 0.6, 0.7], config(1, strategy=craft(), tracking=deltas), **calmer)
    write_run(tmp_path / "c", [0.1, 0.2, 0.3, 0.4], config(0))  # of before
    text = report([tmp_path], console=quiet()).read_text(encoding="utf-8")
    stability = table_of(text, "forgetting", "updatable", "ζ")
    assert stability["CRAFT"] == {
        "strategy": "CRAFT",
        "forgetting": "15.0 ± 7.1",
        "updatable": "-100.0 ± 0.0",
        "ζ": "-80.0 ± 0.0",
        "fell (%)": "25.0 ± 0.0",
        "total variation": "70.0 ± 0.0",
        "UDP loss (%)": "40.0 ± 0.0",
        "UDP norm (%)": "75.0 ± 0.0",
        "straightness": "0.69 ± 0.09",
    }
    assert set(stability["FedAvg"].values()) == {"FedAvg", "–"}
    assert "percentage points of the accuracy" in text
    assert "slow early learning lowers ζ" in text
    assert "(loss, δ = 0)" in text
    assert "(norm, δ = 2.5)" in text
    row = rows(tmp_path)["CRAFT"]
    assert float(row["forgetting_seed_mean"]) == pytest.approx(0.15)
    assert float(row["straightness_seed_std"]) == pytest.approx(0.125 / 2**0.5)
    assert rows(tmp_path)["FedAvg"]["forgetting_seed_mean"] == ""
    assert "round 0 (the untrained model) included where it was evaluated" in text
    assert "failed rounds left out" in text


def test_less_forgetting_is_better_and_a_low_zeta_is_not(tmp_path):
    worse = STABLE | {name: [1.0] * 4 for name in STABLE if name not in ("path_length", "distance_from_start")}
    write_run(tmp_path / "a", [0.1, 0.2, 0.3, 0.4], config(strategy=craft()), **STABLE)
    write_run(tmp_path / "b", [0.1, 0.2, 0.3, 0.4], config(), **worse)
    text = report([tmp_path], console=quiet()).read_text(encoding="utf-8")
    best, other = (table_of(text, "forgetting")[name] for name in ("CRAFT", "FedAvg"))
    bold = {title for title, cell in best.items() if cell.startswith("**")}
    assert bold == {"forgetting", "fell (%)", "total variation", "UDP loss (%)", "UDP norm (%)"}
    assert not any(cell.startswith("**") for cell in other.values())
    assert "δ as configured" in text  # these runs do not say


def segmentation(seed=0, **changes):
    settings = {
        "num_clients": 16,
        "dataset": {"name": "fets2022", "partition": {"kind": "natural"}},
        "model": {"name": "unet3d"},
        "target_accuracy": None,
    }
    return config(seed, **settings | changes)


@pytest.fixture
def segmented(tmp_path):
    for name, seed, last in (("craft", 0, 0.75), ("craft", 1, 0.85), ("fedavg", 0, 0.6), ("fedavg", 1, 0.7)):
        dice = [0.0, 0.3, 0.5, last]
        classes = {f"dice_{c}": [d - shift for d in dice] for c, shift in (("wt", 0.0), ("tc", 0.05), ("et", 0.1))}
        distances = {f"hd95{c}": [100.0 * (1 - d) for d in dice] for c in ("", "_wt", "_tc", "_et")}
        metrics = {"dice": dice, "worst10": dice, "dice_std": [0.1] * 4, **classes, **distances, **STABLE}
        write_run(tmp_path / name / str(seed), [None] * 4, segmentation(seed, strategy=named(name)), **metrics)
    return tmp_path


def test_segmentation_is_reported_by_dice(segmented):
    text = report([segmented], against="craft", console=quiet()).read_text(encoding="utf-8")
    main = table_of(text, "seeds", "Dice", "std over institutions")
    assert list(main) == ["craft", "fedavg"]
    assert main["craft"]["Dice"] == "**80.0 ± 7.1**"
    assert main["fedavg"]["gain of craft (%)"] == "+23.1"
    assert "Mean Dice of WT, TC, ET in % at the last evaluation, every institution counting equally" in text
    assert "Target: 72.0 % (90 % of the best result" in text
    assert "Gain: mean Dice of craft" in text
    assert "16 institutions, 10 per round, 3 rounds" in text
    assert "percentage points of the Dice" in text
    assert "ccuracy," not in text.replace("target_accuracy", "")
    classes = table_of(text, "Dice WT", "Dice TC", "Dice ET", "HD95 WT", "HD95 TC", "HD95 ET", "HD95 mean")
    assert classes["craft"]["Dice ET"] == "**70.0 ± 7.1**"
    assert classes["craft"]["HD95 mean"] == "**20.0 ± 7.1**"  # in mm, the lower the better
    assert classes["fedavg"]["HD95 mean"] == "35.0 ± 7.1"
    row = rows(segmented)["craft"]
    assert float(row["dice_seed_mean"]) == pytest.approx(0.8)
    assert float(row["hd95_seed_mean"]) == pytest.approx(20.0)
    assert "accuracy_seed_mean" not in row


def test_accuracy_and_dice_share_a_report(segmented):
    write_run(segmented / "digits", [0.1, 0.2, 0.3, 0.4], config(strategy=named("alone")), macro_f1=[0, 0, 0, 0.25])
    text = report([segmented], console=quiet()).read_text(encoding="utf-8")
    table = rows(segmented)
    assert float(table["alone"]["accuracy_seed_mean"]) == 0.4
    assert float(table["alone"]["macro_f1_seed_mean"]) == 0.25
    assert table["alone"]["dice_seed_mean"] == table["craft"]["accuracy_seed_mean"] == ""
    assert table_of(text, "seeds", "accuracy")["alone"]["macro F1"] == "25.0"
    assert "macro F1" not in table_of(text, "seeds", "Dice")["craft"]
    assert sorted(len(axes) for axes in panels(segmented)) == [6, 9]


def test_personal_dice_is_compared_where_all_have_it(segmented):
    for name, last in (("craft", 0.9), ("fedavg", 0.6)):
        changes = {"client": {"ditto_lambda": 1.0}, "strategy": named(name)}
        personal = {"personal_dice": [0.0, 0.1, 0.2, last], "dice": [0.0, 0.1, 0.2, 0.3]}
        write_run(
            segmented / f"ditto/{name}", [None] * 4, segmentation(num_rounds=3, num_clients=5, **changes), **personal
        )
    text = report([segmented / "ditto"], against="craft", console=quiet()).read_text(encoding="utf-8")
    assert table_of(text, "seeds", "Dice")["fedavg"]["gain of craft (%)"] == "+50.0"
    assert "Gain: mean personal Dice of craft" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_every_title_and_number_whole(segmented, width):
    console = quiet(width)
    report([segmented], against="craft", console=console)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("Wrote"))
    words = set(console.file.getvalue().split())
    titles = "Forgetting stability forgetting updatable ζ fell (%) total variation UDP loss norm straight- ness"
    assert words >= {*titles.split(), "institutions", "Dice", "HD95", "WT", "TC", "ET", "mean", "(Holm)", "gain"}
    assert words >= {"20.0", "-100.0", "0.62", "80.0", "7.1", "+23.1"}
    assert not any("…" in word for word in words)


def test_a_table_too_wide_is_shared_out_evenly(tmp_path):
    """Eight columns do not fit into 80 characters: two tables of four, not of seven and of one."""
    for seed in range(2):
        large = {name: [1234.5] * 4 for name in STABLE}
        write_run(tmp_path / str(seed), [0.1, 0.2, 0.3, 0.4], config(seed), **large)
    console = quiet(80)
    report([tmp_path], console=console)
    heads = [line for line in console.file.getvalue().splitlines() if line.startswith(" strategy")]
    assert [len(line.split()) for line in heads[1:]] == [5, 7]  # with "loss (%)" and "norm (%)"


def test_curves_are_a_wide_png(runs):
    report([runs], console=quiet())
    png = (runs / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 2000
    assert 300 < height < width


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_shows_whole_names_and_numbers(runs, width):
    write_run(runs / "c", [0.1, 0.2, 0.3, 0.45], config(strategy=craft(0.3)))
    console = quiet(width)
    report([runs], console=console)
    words = set(console.file.getvalue().split())
    assert words >= {"CRAFT", "server_lr=0.1", "FedAvg", "accuracy", "75.0", "7.1", "50.0", "14.1", "(s)"}


def heights(axes):
    """Return what a panel's lines show, but for those that mark a level."""
    return [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 2]


def test_the_last_line_of_a_classifier_is_macro_f1_udp_and_total_variation(tmp_path):
    metrics = STABLE | {"macro_f1": [0.0, 0.25, 0.5, 0.625]}
    write_run(tmp_path / "a", [0.1, 0.4, 0.6, 0.7], config(strategy=craft()), **metrics)
    write_run(tmp_path / "old", [0.1, 0.4, 0.6, 0.7], config())
    ((*_, macro_f1, udp, variation),) = panels(tmp_path)
    assert [axes.get_title() for axes in (macro_f1, udp, variation)] == [
        "Macro F1 of all test samples", "UDP (loss) so far", "Total variation of accuracy so far",
    ]  # fmt: skip
    assert heights(macro_f1) == [[0, 25, 50, 62.5]]
    assert heights(udp) == [[0, 50, 40]]
    assert heights(variation) == [pytest.approx([0, 30, 60, 70])]
    for axes in (macro_f1, udp, variation):
        assert [text.get_text() for text in axes.texts] == ["not reported: FedAvg"]
        assert axes.get_ylim()[0] == 0


def test_each_line_of_panels_is_there_where_it_has_something_to_show(tmp_path):
    path = {name: STABLE[name] for name in ("path_length", "distance_from_start")}
    for number, metrics in enumerate(({}, path, {"macro_f1": [0.1] * 4}, path | {"udp_loss": STABLE["udp_loss"]})):
        write_run(tmp_path / str(number), [0.1, 0.2, 0.3, 0.4], config(), **metrics)
    assert [len(axes) for number in range(4) for axes in panels(tmp_path / str(number))] == [3, 6, 6, 9]


def test_the_last_line_of_segmentation_is_dice_hd95_and_udp(segmented):
    ((*_, dice, hd95, udp),) = panels(segmented)
    assert [axes.get_title() for axes in (dice, hd95, udp)] == [
        "Dice of each class, mean over subjects", "HD95, mean of the classes", "UDP (loss) so far",
    ]  # fmt: skip
    assert [text.get_text() for text in dice.get_legend().get_texts()] == ["WT", "TC", "ET"]
    last = {(line.get_linestyle(), line.get_color()): line.get_ydata()[-1] for line in dice.lines}
    craft, fedavg = dict.fromkeys(colour for _, colour in last)
    expected = {("-", craft): 80, ("--", craft): 75, (":", craft): 70}
    expected |= {("-", fedavg): 65, ("--", fedavg): 60, (":", fedavg): 55}
    assert last == pytest.approx(expected)
    assert hd95.get_ylabel() == "HD95 (mm)"
    assert [line[-1] for line in heights(hd95)] == pytest.approx([20, 35])  # not per cent
    assert hd95.get_yscale() == "linear"
    assert dice.get_ylim()[0] == hd95.get_ylim()[0] == udp.get_ylim()[0] == 0


@pytest.mark.parametrize(("count", "lines"), [(4, 12), (5, 5)])
def test_where_three_classes_would_crowd_the_panel_it_shows_one(tmp_path, count, lines):
    for number in range(count):
        classes = {f"dice_{name}": [0.1, 0.2, 0.3, 0.4] for name in ("wt", "tc", "et")}
        settings = segmentation(strategy=named(f"s{number}"))
        write_run(tmp_path / str(number), [None] * 4, settings, dice=[0.1, 0.2, 0.3, 0.4], **classes)
    ((*_, dice, hd95, _),) = panels(tmp_path)
    assert len(dice.lines) == lines
    assert ("WT" in dice.get_title()) == (dice.get_legend() is None) == (count == 5)
    assert [text.get_text() for text in hd95.texts] == ["not reported"]


def test_distances_that_fall_by_more_than_a_decade_are_drawn_in_decades(tmp_path):
    write_run(tmp_path, [None] * 4, segmentation(), dice=[0.1, 0.2, 0.3, 0.4], hd95=[300.0, 90.0, 20.0, 10.0])
    ((*_, hd95, _),) = panels(tmp_path)
    assert hd95.get_yscale() == "log"
    assert heights(hd95) == [[300, 90, 20, 10]]


def test_a_target_may_be_asked_for(runs):
    report([runs], target=0.7, console=quiet())
    assert float(rows(runs)["CRAFT"]["rounds_to_target_seed_mean"]) == 3
    assert rows(runs)["FedAvg"]["rounds_to_target_seed_mean"] == ""


def test_without_a_target_it_is_nine_tenths_of_the_best(tmp_path):
    write_run(tmp_path / "a", [0.1, 0.2, 0.9, 0.8], config(target_accuracy=None))
    report([tmp_path], console=quiet())
    assert float(rows(tmp_path)["FedAvg"]["target"]) == pytest.approx(0.72)
    assert "90 % of the best" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", [0, 80, -0.1])
def test_a_target_in_percent_is_refused(runs, target):
    with pytest.raises(ValueError, match="between 0 and 1"):
        report([runs], target=target, console=quiet())


def test_the_result_is_that_of_the_last_evaluated_round(tmp_path):
    write_run(tmp_path / "a", [0.1, None, 0.6, None], config(), worst10=[0.0, None, 0.3, None])
    report([tmp_path], console=quiet())
    assert float(rows(tmp_path)["FedAvg"]["accuracy_seed_mean"]) == 0.6
    assert float(rows(tmp_path)["FedAvg"]["worst10_seed_mean"]) == 0.3
    assert float(rows(tmp_path)["FedAvg"]["rounds_to_target_seed_mean"]) == 2


def test_hyper_parameters_tell_runs_apart_and_seeds_and_machines_do_not(tmp_path):
    accuracies = [0.1, 0.2, 0.3, 0.4]
    gpu = {"lr": 0.1, "device": "cuda"}
    write_run(tmp_path / "a", accuracies, config(0, strategy=craft(0.1)))
    write_run(tmp_path / "b", accuracies, config(1, strategy=craft(0.1), client=gpu))
    write_run(tmp_path / "c", accuracies, config(0, strategy=craft(0.3)))
    write_run(tmp_path / "d", accuracies, config(0, strategy=craft(0.3), client={"lr": 0.5, "device": "cpu"}))
    write_run(tmp_path / "e", accuracies, config(0, strategy={"name": "mine"} | craft(0.3)))
    report([tmp_path], console=quiet())
    assert {label: row["seeds"] for label, row in rows(tmp_path).items()} == {
        "CRAFT server_lr=0.1 client.lr=0.1": "2",
        "CRAFT server_lr=0.3 client.lr=0.1": "1",
        "CRAFT server_lr=0.3 client.lr=0.5": "1",
        "mine": "1",
    }


def test_settings_get_a_table_each(tmp_path):
    accuracies = [0.1, 0.2, 0.3, 0.4]
    iid = {"name": "digits", "partition": {"kind": "iid"}}
    write_run(tmp_path / "a", accuracies, config())
    write_run(tmp_path / "b", accuracies, config(num_clients=1000))
    write_run(tmp_path / "c", accuracies, config(dataset=iid))
    report([tmp_path], console=quiet())
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## digits, mlp, dirichlet(0.1) num_clients=100",
        "## digits, mlp, dirichlet(0.1) num_clients=1000",
        "## digits, mlp, iid",
    ]


def test_unusable_runs_are_named_with_the_reason(runs):
    (runs / "empty").mkdir()
    (runs / "empty/metrics.jsonl").touch()
    write_run(runs / "short", [0.1, 0.2], config(7))
    write_run(runs / "blind", [None] * 4, config(8))
    write_run(runs / "garbled", [0.9] * 4, config(9))
    (runs / "garbled/metrics.jsonl").write_text('{"round": 0, "acc', encoding="utf-8")
    write_run(runs / "foreign", [0.9] * 4, {"num_rounds": 3})
    (runs / "killed").mkdir()
    for name in ("metrics.jsonl", "config.yaml"):
        (runs / "killed" / name).write_bytes((runs / "a0" / name).read_bytes())
    with pytest.raises(RuntimeError, match="diverged"), tracker_of(runs / "failed"):
        raise RuntimeError("diverged")
    console = quiet()
    report([runs], console=console)
    for output in (console.file.getvalue(), (runs / "report.md").read_text(encoding="utf-8")):
        assert f"{runs / 'empty'} has no config.yaml" in output
        assert f"{runs / 'killed'} has no status.json: still running, or killed" in output
        assert f"{runs / 'failed'} failed: RuntimeError: diverged" in output
        assert f"{runs / 'short'} stopped after round 1 of 3" in output
        assert f"{runs / 'blind'} reports no accuracy" in output
        assert f"{runs / 'garbled'} cannot be read: JSONDecodeError" in output
        assert f"{runs / 'foreign'} cannot be read: KeyError: 'dataset'" in output
    assert rows(runs)["FedAvg"]["seeds"] == "2"


def tracker_of(folder):
    return RunTracker(folder, config=config(), num_rounds=3, tensorboard=False, progress=False)


def test_a_repeated_seed_counts_once(runs):
    write_run(runs / "z", [0.1, 0.2, 0.3, 0.9], config(0))
    console = quiet()
    report([runs], console=console)
    assert rows(runs)["FedAvg"]["seeds"] == "2"
    assert float(rows(runs)["FedAvg"]["accuracy_seed_mean"]) == pytest.approx((0.9 + 0.6) / 2)
    assert f"{runs / 'deep/er/b0'} has the settings and the seed of {runs / 'z'}" in console.file.getvalue()


def test_a_run_found_twice_counts_once(runs):
    report([runs, runs / "a0"], console=quiet())
    assert rows(runs)["CRAFT"]["seeds"] == "2"


def test_a_report_is_replaced_and_leaves_nothing_else(runs, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        report([runs], out=out, console=quiet())
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "report.csv", "report.md"]


def test_more_strategies_than_colours(tmp_path):
    for number in range(9):
        write_run(tmp_path / str(number), [0.1, 0.2, 0.3, 0.4], config(strategy={"_target_": f"s.S{number}"}))
    assert report([tmp_path], console=quiet())
    assert len(rows(tmp_path)) == 9


def test_of_more_rows_than_styles_the_best_of_each_strategy_are_drawn(tmp_path):
    for number in range(30):
        name = "CRAFT" if number % 2 else "FedAvg"
        strategy = {"_target_": f"strategies.{name}", "server_lr": 0.1 * number}
        write_run(tmp_path / str(number), [0.1, 0.2, 0.3, 0.01 * number], config(strategy=strategy))
    (group,) = group_runs(find_runs([tmp_path])[0], None, [])
    drawn = drawable(group)
    assert [row.values["accuracy"][0] for row in drawn.rows] == pytest.approx([0.01 * n for n in range(29, 1, -1)])
    assert "the best 14 settings of each strategy" in drawn.title
    report([tmp_path], console=quiet())
    assert len(rows(tmp_path)) == 30  # the tables have them all


def test_runs_moved_aside_are_passed_over(runs):
    text = report([runs], console=quiet()).read_text()
    write_run(runs / "a0.aside1", [0.1, 0.2, 0.3, 0.9], config(0, strategy=craft()))
    write_run(runs / "deep.aside12/b2", [0.1, 0.2, 0.3, 0.9], config(2))
    assert report([runs], console=quiet()).read_text() == text
    report([runs / "a0.aside1"], console=quiet())  # unless asked for
    assert rows(runs / "a0.aside1")["CRAFT"]["seeds"] == "1"


def named(name, **changes):
    return {"_target_": "strategies.Any", "name": name} | changes


@pytest.fixture
def compared(tmp_path):
    """`craft` in two settings, the better one with three seeds; three others, of which one shares two seeds."""
    accuracies = {"craft": [0.60, 0.66, 0.72], "near": [0.58, 0.65, 0.66], "far": [0.30, 0.33, 0.33]}
    accuracies |= {"short": [0.50, 0.55], "same": [0.50, 0.56, 0.62]}
    for name, of_seed in accuracies.items():
        for seed, accuracy in enumerate(of_seed):
            changes = {"server_lr": 1.0} if name == "craft" else {}
            write_run(
                tmp_path / name / str(seed), [0.1] * 3 + [accuracy], config(seed, strategy=named(name, **changes))
            )
    write_run(tmp_path / "worse", [0.1] * 4, config(0, strategy=named("craft", server_lr=9.0)))
    write_run(tmp_path / "lone", [0.1] * 3 + [0.3], config(7, strategy=named("lone")))
    for name, seed in (("near", 3), ("broken", 0), ("broken", 1)):
        tracker = RunTracker(
            tmp_path / f"{name}-failed{seed}", config=config(seed, strategy=named(name)), num_rounds=3,
            tensorboard=False, progress=False,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="gone"), tracker:
            raise RuntimeError("gone")
    return tmp_path


def p_value(differences):
    """Student's t of paired differences; the tails of one and two degrees of freedom have closed forms."""
    n, mean = len(differences), sum(differences) / len(differences)
    t = abs(mean) / math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    return 1 - 2 / math.pi * math.atan(t) if n == 2 else 1 - t / math.sqrt(2 + t * t)


def test_gain_and_significance_against_a_hand_calculation(compared):
    report([compared], against="craft", console=quiet())
    table = rows(compared)
    best, worse = "craft server_lr=1.0", "craft server_lr=9.0"
    assert next(iter(table)) == best
    assert {row["against"] for label, row in table.items() if label != "broken"} == {best}
    assert [table[best][name] for name in ("gain", "p_value", "p_holm", "pairs")] == [""] * 4
    assert float(table["near"]["gain"]) == pytest.approx(0.66 / 0.63 - 1)
    assert float(table["far"]["gain"]) == pytest.approx(0.66 / 0.32 - 1)
    assert {label: table[label]["pairs"] for label in ("near", "far", "short", "same", "lone", worse)} == {
        "near": "3", "far": "3", "short": "2", "same": "3", "lone": "0", worse: "1",
    }  # fmt: skip
    p = {
        "near": p_value([0.02, 0.01, 0.06]),
        "far": p_value([0.30, 0.33, 0.39]),
        "short": p_value([0.10, 0.11]),
    }
    assert {label: float(table[label]["p_value"]) for label in p} == pytest.approx(p)
    first, second, third = sorted(p, key=p.get)
    holm = {first: 3 * p[first]}
    holm[second] = max(holm[first], 2 * p[second])
    holm[third] = max(holm[second], p[third])
    assert {label: float(table[label]["p_holm"]) for label in p} == pytest.approx(holm)
    # one seed in common, or none, or the same difference with every seed: nothing to test
    assert [table[label]["p_value"] for label in ("lone", worse, "same")] == ["", "", ""]
    assert {label: row["failed_seeds"] for label, row in table.items() if row["failed_seeds"] != "0"} == {
        "near": "1", "broken": "2",
    }  # fmt: skip
    assert table["broken"]["seeds"] == "0"


def test_holm_by_a_known_example():
    """p = .01, .04, .03, .005 gives .03, .06, .06, .02: R's p.adjust(method="holm")."""
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison_is_shown_and_written(compared, width):
    console = quiet(width)
    text = report([compared], against="craft", console=console).read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    titles, _, *cells = lines
    table = {line[0]: dict(zip(titles, line, strict=True)) for line in cells}
    assert table["near"]["gain of craft (%)"] == "+4.8"
    assert table["craft server_lr=1.0"]["gain of craft (%)"] == "–"
    assert table["same"]["p (Holm)"] == "–"
    assert [table["broken"][t] for t in ("seeds", "accuracy", "failed seeds")] == ["0", "–", "0, 1"]
    assert table["near"]["failed seeds"] == "3"
    assert "--against craft" in text
    shown = console.file.getvalue().split()
    assert {"+4.8", "broken", "(Holm)"} <= set(shown)
    assert not any("…" in word for word in shown)


def test_without_the_strategy_to_compare_with_the_report_says_so(compared, capsys):
    assert main([str(compared), "--against", "crfat"]) == 0
    assert "No finished run of crfat to compare with" in " ".join(capsys.readouterr().out.split())
    assert {row["gain"] for row in rows(compared).values()} == {""}


def test_without_against_there_is_none_of_it(compared):
    text = report([compared], console=quiet()).read_text(encoding="utf-8")
    assert "gain of" not in text.lower()
    assert "Holm" not in text
    assert "| broken" not in text
    assert not {"gain", "p_value", "failed_seeds"} & set(rows(compared)["near"])


def test_nothing_found_is_one_sentence_and_status_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().out.split("\n") == [f"No finished run found below {tmp_path}.", ""]
    assert not list(tmp_path.iterdir())


def test_command_line(runs, tmp_path, capsys):
    assert main([str(runs), "--target", "0.7", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/report.md").is_file()
    assert "CRAFT" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--target", "80"]])
def test_a_mistake_on_the_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_panels_are_equally_wide_whatever_the_title_and_labels(runs):
    found, _ = find_runs([runs])
    (group,) = group_runs(found, None, [])
    rows = [replace(row, label=row.label + " setting=1.25" * 6) for row in group.rows]
    figure = figure_of([replace(group, title="a long title " * 12, rows=rows)])
    figure.draw_without_rendering()
    left, middle, right = (axes.get_window_extent().width for axes in figure.get_axes())
    assert left == pytest.approx(middle, rel=0.05)
    assert left == pytest.approx(right, rel=0.05)
    assert left > 0.2 * figure.bbox.width


def test_a_damaged_run_is_named_and_the_others_are_reported(runs):
    path = next(runs.rglob("metrics.jsonl"))
    path.write_text(path.read_text().replace('"accuracy": 0', '"accuracy": "much", "x": 0'))
    assert report([runs], console=quiet()) is not None
    assert str(path.parent) in (runs / "report.md").read_text()


def test_an_output_folder_that_cannot_be_is_one_sentence(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        main([str(runs), "--out", str(tmp_path / "file" / "folder")])
    assert error.value.code == 2
    assert "Not a directory" in capsys.readouterr().err


def damage(path, name, value):
    """Give a run another value of a metric, or of its round, in the last round."""
    *before, last = path.read_text().splitlines()
    path.write_text("\n".join([*before, json.dumps(json.loads(last) | {name: value})]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failed_round", "yes"),
        ("failed_round", [True]),
        ("failed_round", math.nan),
        ("clients_rejected", "many"),
        ("clients_rejected", -1),
        ("clients_rejected", 10**120),
        ("round", "1"),
        ("round", None),
        ("round", -1),
        ("round", 1.5),
        ("round", True),
        ("round", 10**30),
        ("accuracy", 1.7e308),
        ("accuracy", 10**400),
        ("accuracy", [0.5]),
        ("hd95", -1.7e308),
        ("zeta", 1e307),
        ("train_loss", math.inf),
        ("seconds", {}),
    ],
)
def test_numbers_that_cannot_be_are_named_and_the_other_runs_reported(runs, name, value):
    for folder in ("a0", "a1"):
        damage(runs / folder / "metrics.jsonl", name, value)
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    for folder in ("a0", "a1"):
        (sentence,) = [line for line in text.splitlines() if line.startswith(f"- {runs / folder} ")]
        assert f"{runs / folder} is damaged: {name}" in sentence
    assert rows(runs)["FedAvg"]["seeds"] == "2"
    assert (runs / "curves.png").is_file()


@pytest.mark.parametrize("line", ["7", "[]", "[" * 100_000])
def test_a_line_that_is_no_record_is_named(runs, line):
    (runs / "a0/metrics.jsonl").write_text(line)
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    assert f"- {runs / 'a0'} " in text
    assert rows(runs)["CRAFT"]["seeds"] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"tracking": {"udp_norm_delta": [1, 2]}},
        {"tracking": {"udp_loss_delta": "much"}},
        {"target_accuracy": "0.5"},
        {"target_accuracy": 1e200},
        {"seed": "first"},
        {"seed": None},
    ],
)
def test_settings_that_cannot_be_are_named(runs, changes):
    write_run(runs / "odd", [0.1, 0.2, 0.3, 0.9], config(**{"seed": 5, **changes}), **STABLE)
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    (name,) = changes
    assert f"- {runs / 'odd'} is damaged: {name}" in text
    assert rows(runs)["FedAvg"]["seeds"] == "2"


def test_the_largest_numbers_that_count_can_be_reported(tmp_path):
    for seed, sign in enumerate((1, -1)):
        metrics = {name: [None, 0.0, -sign * 9e99, sign * 9e99] for name in (*STABLE, "worst10", "macro_f1", "hd95")}
        write_run(tmp_path / f"a{seed}", [0.0, 0.1, -9e99, sign * 9e99], config(seed, strategy=craft()), **metrics)
        write_run(tmp_path / f"b{seed}", [0.0, 0.1, 0.2, 0.3], config(seed), **STABLE)
        write_run(tmp_path / f"c{seed}", [None] * 4, segmentation(seed), dice=[0.1, 0.2, 0.3, sign * 9e99], **metrics)
    assert report([tmp_path], against="FedAvg", console=quiet())
    assert len(rows(tmp_path)) == 2


def test_a_dollar_is_no_formula(tmp_path):
    name = r"$\frac{a$ b $x^"
    settings = config(strategy=named(name), dataset={"name": name, "partition": {"kind": "iid"}})
    write_run(tmp_path, [0.1, 0.2, 0.3, 0.4], settings)
    report([tmp_path], console=quiet())
    assert (tmp_path / "curves.png").is_file()
    figure = figure_of(group_runs(find_runs([tmp_path])[0], None, []))
    figure.draw_without_rendering()
    assert figure.subfigs[-1].legends[0].get_texts()[0].get_text() == name


def test_who_evaluates_and_how_often_is_part_of_the_setting(tmp_path):
    accuracies = [0.1, 0.2, 0.3, 0.4]
    for number, (mode, every) in enumerate((("server", 1), ("server", 2), ("federated", 2))):
        evaluation = {"mode": mode, "every": every, "batch_size": 2**number}
        write_run(tmp_path / str(number), accuracies, config(evaluation=evaluation))
    write_run(tmp_path / "more", accuracies, config(1, evaluation={"mode": "server", "every": 1, "batch_size": 7}))
    titles = [group.title for group in group_runs(find_runs([tmp_path])[0], None, [])]
    assert titles == [
        f"digits, mlp, dirichlet(0.1) evaluation.mode={mode} evaluation.every={every}"
        for mode, every in (("server", 1), ("server", 2), ("federated", 2))
    ]
    (group,) = group_runs(find_runs([tmp_path / "0", tmp_path / "more"])[0], None, [])
    assert group.title == "digits, mlp, dirichlet(0.1)"
    assert len(group.rows[0].runs) == 2
    write_run(tmp_path / "old/a", accuracies, config())
    write_run(tmp_path / "old/b", accuracies, config(1, evaluation=None))
    (group,) = group_runs(find_runs([tmp_path / "old"])[0], None, [])
    assert len(group.rows[0].runs) == 2


def test_names_and_errors_of_several_lines_and_with_markup_stay_in_their_cells(runs):
    name = "a | b\n\n# <b>*c*</b> `d` \\| e"
    write_run(runs / "odd", [0.1, 0.2, 0.3, 0.35], config(strategy=named(name)))
    with pytest.raises(RuntimeError), tracker_of(runs / "failed"):
        raise RuntimeError("diverged")
    status = json.loads((runs / "failed/status.json").read_text())
    (runs / "failed/status.json").write_text(json.dumps(status | {"error": "one <b>\n\n# *two* | three"}))
    text = report([runs], console=quiet()).read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| a ")]
    assert line.startswith(r"| a \| b # \<b>\*c\*\</b> \`d\` \\\| e |")
    titles = next(line for line in text.splitlines() if line.startswith("| strategy"))
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == titles.count("|")
    assert rf"- {runs / 'failed'} failed: one \<b> # \*two\* \| three" in text.splitlines()
    assert name in rows(runs)


def test_runs_with_stale_answers_are_a_setting_of_their_own(tmp_path):
    honest, attacked = ({"lr": 0.1, "device": "cpu", **more} for more in ({}, {"stale_update": 0.4}))
    write_run(tmp_path / "a", [0.1, 0.4, 0.6, 0.7], config(0, client=honest))
    write_run(tmp_path / "b", [0.1, 0.4, 0.6, 0.8], config(0, client=honest | {"stale_update": None}, strategy=craft()))
    write_run(tmp_path / "c", [0.1, 0.3, 0.4, 0.5], config(0, client=attacked))
    report([tmp_path], against="CRAFT", console=quiet())
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        found = [(row["setting"], row["strategy"]) for row in csv.DictReader(file)]
    plain = "digits, mlp, dirichlet(0.1)"
    stale = f"{plain}, 40 % stale answers"
    assert sorted(found) == [(plain, "CRAFT"), (plain, "FedAvg"), (stale, "FedAvg")]
