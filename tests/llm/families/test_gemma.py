"""The text settings of Gemma 1 to 3: transformers' defaults, and sizes that cannot be; the first two
alone, against transformers and out of a GGUF.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families import gemma
from mtmd.llm.family import gguf_of, gguf_text_family


def read(values: dict[str, Any]) -> gemma.GemmaText:
    return gemma.read(Settings(values, "config.json: text_config"))


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Gemma3Text"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    import transformers

    expected = getattr(transformers, f"{kind}Config")()
    actual = read({"model_type": expected.model_type})
    assert (
        actual.width,
        actual.ffn,
        actual.heads,
        actual.groups,
        actual.head,
        actual.vocabulary,
        actual.context,
    ) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
        expected.vocab_size,
        expected.max_position_embeddings,
    )
    layers = ["full_attention"] * expected.num_hidden_layers
    assert list(actual.kinds) == getattr(expected, "layer_types", layers)
    assert actual.softcap == getattr(expected, "attn_logit_softcapping", None)
    assert actual.final_softcap == getattr(expected, "final_logit_softcapping", None)
    assert actual.window == getattr(expected, "sliding_window", actual.window)
    ropes = expected.rope_parameters
    ropes = dict.fromkeys(gemma.KINDS, ropes) if "rope_theta" in ropes else ropes
    assert actual.ropes == {
        kind: rotary(values["rope_theta"], expected.head_dim) for kind, values in ropes.items()
    }


TOKENS = tuple(torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(1)).tolist())


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2"])
def test_a_decoder_alone_and_its_gguf(kind: str) -> None:
    """As its reference answers, its window exceeded; its GGUF's keys say the same model."""
    import transformers

    more = {"sliding_window": 9, "query_pre_attn_scalar": 6} if kind == "Gemma2" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        **more,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    family = read(config.to_dict())
    file = TensorFile(model.state_dict())
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    for flash in ("on", "off"):
        engine = Runner(family, weights, [Cpu()], dtype=torch.float32, context=64, flash_attn=flash)
        actual = engine.prefill([Span(TOKENS)], engine.new_cache())
        assert (actual - expected).square().sum() <= 1e-10 * expected.square().sum()
    architecture, keys, _ = gguf_of(family, "test")
    assert architecture == kind.lower()
    keys[f"{architecture}.vocab_size"] = 50
    names = frozenset(family.parameters())
    assert gguf_text_family(architecture, keys, names, "test") == family


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"num_hidden_layers": 10_000_000},
        "num_hidden_layers is 10000000, expected an integer from 1 to 1024",
    ),
    "width": (
        {"hidden_size": 1 << 24},
        "hidden_size is 16777216, expected an integer from 1 to 1048576",
    ),
    "ffn": ({"intermediate_size": 1 << 24}, "intermediate_size is 16777216, expected"),
    "heads": (
        {"num_attention_heads": 1 << 20},
        "num_attention_heads is 1048576, expected an integer from 1 to 4096",
    ),
    "groups": (
        {"num_key_value_heads": 1 << 20},
        "num_key_value_heads is 1048576, expected an integer from 1 to 4096",
    ),
    "head": ({"head_dim": 1 << 20}, "head_dim is 1048576, expected an integer from 1 to 4096"),
}


@pytest.mark.parametrize("case", WRONG)
def test_sizes_that_cannot_be(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(values).parameters()
