"""The Q-Former against transformers', alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.clip.qformer import QFormer, read_qformer
from mtmd.kernels import ops
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.executor import Executor, Residency, finish
from mtmd.kernels.plan.scheduler import make_plan

SETTINGS = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 20,
    "use_qformer_text_input": False,
}
BLOCKS = ["q.0", "q.1", "q.2"]


def qformer(**more: Any) -> QFormer:
    settings = Settings(SETTINGS | more, "config.json: qformer_config")
    return read_qformer(settings, layers=1, every=1, width=24, heads=3, seen=20)


@torch.no_grad()
def test_queries_are_those_of_the_reference() -> None:
    from transformers import Blip2QFormerConfig, Blip2QFormerModel

    torch.manual_seed(0)
    theirs = Blip2QFormerModel(Blip2QFormerConfig(**SETTINGS)).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    ours = qformer()
    parameters = ours.parameters("q", BLOCKS, lambda name: (name,))
    file = TensorFile(dict(theirs.state_dict()))
    weights = CanonicalWeights(file, parameters, "a test")
    assert weights.sources == set(file.names())
    queries, seen = torch.randn(2, 5, 24), torch.randn(2, 7, 20)
    q, s = (
        graph_input(name, tuple(x.shape), x.dtype, lambda _, x=x: x)
        for name, x in (("queries", queries), ("seen", seen))
    )
    made = ours.graph(q, s, "q", BLOCKS, Weights(weights, torch.float32), ops.attention)
    (actual,) = finish(Executor(make_plan([made], [Cpu()]), Residency()).steps(None))
    expected = theirs(query_embeds=queries, encoder_hidden_states=seen).last_hidden_state
    assert float((actual - expected).square().sum() / expected.square().sum()) < 1e-10


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ({"use_qformer_text_input": True}, "use_qformer_text_input is True, expected"),
        ({"num_attention_heads": 5}, "5 heads of width 24; expected heads that divide the width"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of"),
        ({"num_hidden_layers": 1 << 20}, "expected an integer from 1 to 1024"),
    ],
)
def test_settings_that_cannot_be_followed(more: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        qformer(**more)
