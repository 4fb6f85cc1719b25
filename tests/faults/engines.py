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
    if number == 2:  # when the workers are there
        time.sleep(3600)
    return replace(res)


def without_it(stage: Stage, missing: int) -> bytes:
    """The model where the client was left out in that round."""

    def raises(res: FitRes, number: int) -> FitRes:
        if number == missing:
            raise RuntimeError
        return res

    return Stage(stage.folder / "without").run(wrong=raises).bits


@fault("a client's process dies")
def process_dies(stage: Stage) -> str:
    run = stage.run("simulation=ray", wrong=dies)
    gc.collect()  # Ray leaves the files of its processes to the collector; now, while its warnings are no errors
    assert [r["clients_accepted"] for r in run.records] == [5, 6]
    assert run.bits == without_it(stage, 1)
    return run.text()


@fault("a client never answers, `round_timeout` set")
def never_answers(stage: Stage) -> str:
    run = stage.run("simulation=ray", "round_timeout=40", wrong=hangs)
    gc.collect()
    assert [r["clients_accepted"] for r in run.records] == [6, 5]
    assert run.bits == without_it(stage, 2)
    return run.text()
