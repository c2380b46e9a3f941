"""The clocks around an actor's stages, which take the place of what the service calls."""

from __future__ import annotations

import measure_costs
import numpy as np

from mtmd import load
from mtmd.service.encode_queue import EncodeQueue


def test_clocks_are_around_an_answer_and_gone_after_it() -> None:
    before, clocks = EncodeQueue.step, measure_costs.Clocks()
    with load() as model, clocks.set():
        result = model.answer(np.full((60, 80, 3), 200, np.uint8), "What is this?", max_tokens=2)
    assert EncodeQueue.step is before and result.receipt.output_tokens == 2
    assert [tiles for _, tiles in clocks.batches] == [1]
    assert sum(read for *_, read in clocks.steps) > 0
    assert all(clocks.calls[stage] > 0 for stage in ("preprocess", "turn"))
