"""Every family answers alike on a device that records its runs and replays them, for which its
graphs are rewritten, and on one that runs node by node; and no plan of any waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import Oracle
from stand_in import StandIn, storage
from table import CHOSEN

from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import toposort
from mtmd.kernels.plan.graph_replay import Replay
from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.engine.spans import Span
from mtmd.llm.state import KV
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
PROMPTS = (tuple(range(3, 40)), tuple(range(30, 39)), (5,))
STEPS = 6


class Copied:
    """Bytes of outputs, of each step of decoding that is replayed, that lie in no cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.bytes: list[int] = []
        self.outputs: list[int] = []
        outputs = Replay.outputs

        def counted(replay: Replay, batch: Any) -> list[torch.Tensor] | None:
            result = outputs(replay, batch)
            if result is not None and isinstance(batch, Batch):
                saved = set(map(storage, batch.cache.tensors.values()))
                self.bytes.append(sum(o.nbytes for o in result if storage(o) not in saved))
                self.outputs.append(len(result))
            return result

        monkeypatch.setattr(Replay, "outputs", counted)


def answers(oracle: Oracle, backend: Backend) -> tuple[list[list[int]], Model]:
    """Greedy tokens of three sequences, of which one, two or three are in a batch."""
    model = Model(
        open_checkpoint(oracle.folder),
        LoadOptions(parallel=3, context=128, dtype="fp32"),
        [backend, Cpu(), Reference()],
    )
    runner = model.runner
    cache = runner.new_cache()
    running = [runner.begin(cache, slot) for slot in range(3)]
    tokens = [
        [int(runner.prefill([Span(prompt)], cache, one).argmax())]
        for one, prompt in zip(running, PROMPTS, strict=True)
    ]
    for step in range(3 * STEPS):
        chosen = range(1 + step % 3)
        logits = runner.read([(running[i], [Span((tokens[i][-1],))]) for i in chosen], cache)
        for i, row in zip(chosen, logits, strict=True):
            tokens[i].append(int(row.argmax()))
    return tokens, model


@pytest.mark.parametrize(("row", "variant"), CHOSEN)
def test_replayed_and_not_replayed(
    build: Build, row: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, device, copied = build(row, variant), StandIn(), Copied(monkeypatch)
    expected, _ = answers(oracle, Reference())
    actual, model = answers(oracle, device)
    assert actual == expected
    logits = 4 * model.checkpoint.text.vocabulary
    assert set(copied.bytes) == {logits * sequences for sequences in (1, 2, 3)}
    # Layers that are known only as a whole leave what they keep in the cache
    recurrent = sum(not isinstance(s, KV) for layer in model.runner.layers for s in layer)
    assert set(copied.outputs) == {1 + recurrent}
    kinds = ("lfm", "minicpmv4_6", "qwen3_next", "qwen3_5", "granite_hybrid", "nemotron")
    assert bool(recurrent) == row.startswith(kinds)
    assert len(set(actual[0])) > 3, "the random model repeats itself: this says little"
    runner, recorder = model.runner, device.recorder
    assert recorder is not None and recorder.recordings == 3
    # Two runs of each shape come before, and the prompt of one token is one
    assert recorder.replays == 3 * STEPS + 1 - 3 * 2
    seen: list[str] = []
    runner.prefill(
        [Span((5, 6))], runner.new_cache(), observe=lambda node, *_: seen.append(node.name)
    )
    built = [n.name for n in toposort(*runner.graph(BatchShape(2))) if not n.is_leaf]
    assert set(built) == set(seen), "whoever looks on sees the nodes of the family"
    for plan in map(runner.plan, runner.sizes().values()):
        assert not any(step.node.op == "gather_pages" for step in plan.steps)
    if (encoder := model.encoder) is not None:
        tile = torch.rand(encoder.family.resolution.tile_type().shape).numpy()
        first, *others = (encoder.encode([tile + i % 2])[0] for i in range(5))
        assert recorder.recordings == 4
        for i, again in enumerate(others, 1):
            assert torch.equal(first, again) == (i % 2 == 0)
