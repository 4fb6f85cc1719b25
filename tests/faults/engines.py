"""Faults of workers: a client's process dies, a client never answers."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace

from flwr.common import FitRes

from .stage import Stage, fault


def dies(res: FitRes, number: int) -> FitRes:
    if number == 1:
        os._exit(1)
    return res


def hangs(res: FitRes, number: int) -> FitRes:
    if number == 1:
        time.sleep(3600)
    return replace(res)


@fault("a client's process dies")
def process_dies(stage: Stage) -> str:
    run = stage.run("simulation=ray", wrong=dies)
    gc.collect()  # Ray leaves the files of its processes to the collector; now, while its warnings are no errors
    assert [r["clients_accepted"] for r in run.records] == [5, 6]
    return run.text()


@fault("a client never answers, `round_timeout` set")
def never_answers(stage: Stage) -> str:
    run = stage.run("simulation=ray", "round_timeout=20", wrong=hangs)
    gc.collect()
    assert [r["clients_accepted"] for r in run.records] == [5, 6]
    return run.text()
