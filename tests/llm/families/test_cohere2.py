"""What is special to Cohere 2: layers of two kinds, the scale of its logits, and what a GGUF says
of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families.cohere2 import Cohere2Text, read
from mtmd.llm.family import gguf_text_family, text_family

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 9,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = tuple(torch.randint(0, 50, (70,), generator=torch.Generator().manual_seed(1)).tolist())

VARIANTS: dict[str, dict[str, Any]] = {
    "every fourth layer full": {"logit_scale": 0.25},
    "every second": {"sliding_window_pattern": 2},
    "all full": {"layer_types": ["full_attention"] * 5},
    "biases, a table of its own": {"attention_bias": True, "tie_word_embeddings": False},
    "a head of its own size, unscaled": {"head_dim": 10, "logit_scale": 1.0},
}


def reference(**more: Any) -> tuple[Any, torch.Tensor]:
    """transformers' model with random weights, and its logits after TOKENS."""
    from transformers import Cohere2Config, Cohere2ForCausalLM

    torch.manual_seed(0)
    model = Cohere2ForCausalLM(Cohere2Config(**SIZES | more)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    with torch.no_grad():
        return model, model(torch.tensor([TOKENS])).logits[0, -1]


def logits(family: Any, file: Any, flash: str = "auto") -> torch.Tensor:
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    engine = Runner(family, weights, [Cpu()], dtype=torch.float32, context=128, flash_attn=flash)
    return engine.prefill([Span(TOKENS)], engine.new_cache())


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize("flash", ["on", "off"])
def test_logits_are_those_of_the_reference(case: str, flash: str) -> None:
    model, expected = reference(**VARIANTS[case])
    family = text_family("cohere2", Settings(model.config.to_dict(), "config.json"))
    assert nmse(logits(family, TensorFile(model.state_dict()), flash), expected) <= 1e-10


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Cohere2Config

    config = Cohere2Config().to_dict()
    assert read(Settings({}, "config.json")) == read(Settings(config, "config.json"))
    older = {k: v for k, v in config.items() if k not in ("layer_types", "rope_parameters")}
    older |= {"sliding_window_pattern": 4, "rope_theta": 1e4, "rope_scaling": None}
    assert read(Settings(older, "config.json")) == read(Settings(config, "config.json"))


def test_logits_are_scaled_where_the_reference_scales_them() -> None:
    """transformers' model with pictures leaves the scale out."""
    assert read(Settings({"logit_scale": 0.25}, "config.json")).logit_scale == 0.25
    part = Settings({"logit_scale": 0.25, "part_of": "aya_vision"}, "config.json: text_config")
    assert read(part).logit_scale == 1


def metadata(**more: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    keys = {
        "block_count": 5,
        "embedding_length": 24,
        "context_length": 512,
        "feed_forward_length": 40,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 9,
        "rope.freq_base": 1e4,
        "rope.dimension_count": 6,
        "rope.scaling.type": "none",
        "vocab_size": 50,
        "logit_scale": 0.25,
        **more,
    }
    return {f"cohere2.{key}": value for key, value in keys.items()}


def gguf_names(model: Any) -> dict[str, torch.Tensor]:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.COHERE2, 5)
    return {
        names.get_name(name, try_suffixes=(".weight",)): tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def test_the_same_out_of_a_gguf() -> None:
    model, expected = reference(logit_scale=0.25)
    tensors = gguf_names(model)
    family = gguf_text_family("cohere2", metadata(), frozenset(tensors), "file")
    assert isinstance(family, Cohere2Text)
    assert family.windows == (9, 9, 9, None, 9)
    assert nmse(logits(family, TensorFile(tensors, canonical=True)), expected) <= 1e-10


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "groups": ({"num_key_value_heads": 5}, "64 heads of size 128 in 5 groups"),
    "kinds": (
        {"num_hidden_layers": 1, "layer_types": ["linear"]},
        "layer_types has to name 1 layers, each sliding_attention or full_attention",
    ),
    "no window": (
        {"sliding_window": None},
        "layer_types names sliding_attention, but sliding_window is null",
    ),
    "scale": ({"logit_scale": 0}, "logit_scale is 0, expected a number above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(Settings(values, "config.json"))


def test_a_gguf_whose_heads_turn_in_part() -> None:
    with pytest.raises(ModelError, match=r"^file: cohere2: rope.dimension_count is 4, expected"):
        gguf_text_family("cohere2", metadata(**{"rope.dimension_count": 4}), frozenset(), "file")


def test_positions_of_cohere_compass() -> None:
    """Each kind of layer has its own, or none; a base beside them is of neither."""
    config: dict[str, Any] = {"model_type": "cohere_compass_text", **SIZES}

    def made(rope: dict[str, Any], **more: Any) -> Any:
        return text_family(
            "cohere_compass_text", Settings({**config, **more, "rope_parameters": rope}, "file")
        )

    sliding = {"rope_theta": 5e4, "mrope_section": [1, 1, 1]}
    family = made({"sliding_attention": sliding, "full_attention": None, "rope_theta": 10.0})
    assert family.full is None and family.rotary.axes == (0, 1, 2)
    assert family.rotary.frequencies[1] == pytest.approx(5e4 ** (-1 / 3))
    assert family.windows == (None,) * 5 and family.logit_scale == 1 and family.stacked == 0
    with pytest.raises(
        ModelError, match="settings of neither sliding_attention nor full_attention"
    ):
        made({"rope_theta": 1e4})
    with pytest.raises(ModelError, match="expected 3 counts with a sum of 3"):
        made({"full_attention": {"rope_theta": 1e4}})
    with pytest.raises(ModelError, match="expected a list of at most 5"):
        made({"full_attention": None}, part_of="cohere_compass", deepstack_visual_indexes=[0] * 6)
