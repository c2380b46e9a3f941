"""How many kernels a step of decoding launches on a GPU, counted from the plan of the models as they
were published, with fewer layers.
"""

from __future__ import annotations

import pytest
import torch

from mtmd.bench.random_weights import RandomFile, text_kinds
from mtmd.bench.shapes import read_shape
from mtmd.checkpoint.folder import text_settings
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.ops import OPS
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.runner import Runner
from mtmd.llm.family import text_family

# Of a layer, before its graph was rewritten: 41, 37, 39, 37 and 40.
DENSE = {
    "gemma-3-4b": "gemma3_text",
    "qwen2.5-vl-3b": "qwen2_5_vl_text",
    "qwen3-vl-2b": "qwen3_vl_text",
    "llama-3.2-1b": "llama",
    "glm-4.1v-9b": "glm4v_text",
}


# Of which the values' projection has another type in some layers, and of which all have one.
QUANTIZED = ("Q4_K_M", "Q4_0")


def launches(name: str, layers: int, tokens: int, kind: str = "BF16") -> int:
    _, config, _ = read_shape(name)
    settings = Settings({**text_settings(config).values, "num_hidden_layers": layers}, name)
    family, target = text_family(DENSE[name], settings), Target("cuda:90")
    parameters = family.parameters()
    weights = CanonicalWeights(
        RandomFile(parameters, text_kinds(kind, parameters)), parameters, name
    )
    runner = Runner(
        family, weights, [target, Cpu(), Reference()], dtype=torch.bfloat16, context=2048
    )
    plan = runner.plan(BatchShape(tokens, pages=64, requested=tokens, sequences=tokens))
    waiting = {n.op for n in (s.node for s in plan.steps) if OPS[n.op].waits}
    assert not waiting and all(step.backend is target for step in plan.steps)
    counts = [cost(step, target) for step in plan.steps]
    return sum(c.torch + c.triton for c in counts)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_layer_takes_at_most_ten(name: str, tokens: int) -> None:
    six, eight = (launches(name, layers, tokens) for layers in (6, 8))
    assert 0 < eight - six <= 2 * 10
    assert six - 6 * 10 <= 21  # embeddings, angles of each kind, the last norm, logits


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("name", DENSE)
def test_a_quantized_layer_takes_at_most_ten(name: str, kind: str, tokens: int) -> None:
    """The activation of gate and up is in their product. A layer whose values are projected apart
    has one launch more for it.
    """
    few, many = (launches(name, layers, tokens, kind) for layers in (8, 16))
    maximum = 10 if kind == "Q4_K_M" else 9
    assert 0 < many - few <= 8 * maximum
    assert few - 8 * maximum <= 21
