"""What is special to Llama and Mistral: biases, windows, rotary scalings, and what GGUF files say
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
from mtmd.llm.families.llama import LlamaText, read
from mtmd.llm.family import default_context, for_context, gguf_text_family, text_family

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.0, 4.0, 16.0],
}
CLOVA: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
    "pad_token_id": None,
}
TOKENS = tuple(torch.randint(0, 50, (70,), generator=torch.Generator().manual_seed(1)).tolist())

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "biases, tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "a head of its own size, llama3 rope": ("Llama", {"head_dim": 10, "rope_parameters": LLAMA3}),
    "linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "dynamic rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "longrope, as long as was trained": (
        "Llama",
        {"rope_parameters": LONG | {"original_max_position_embeddings": 128}},
    ),
    "longrope, longer": (
        "Llama",
        {"rope_parameters": LONG | {"original_max_position_embeddings": 64}},
    ),
    "no window": ("Mistral", {"sliding_window": None}),
    "window": ("Mistral", {"sliding_window": 9}),
    "yarn": ("Mistral", {"sliding_window": 30, "rope_parameters": YARN}),
    "norms after blocks, multipliers": ("HyperCLOVAX", CLOVA),
    "multipliers, no norms after blocks": (
        "HyperCLOVAX",
        CLOVA | {"use_post_norm": False, "attention_multiplier": 0.3},
    ),
    "queries that grow": ("Ministral3", {"head_dim": 6, "rope_parameters": MINISTRAL}),
}


def reference(kind: str, **more: Any) -> tuple[Any, torch.Tensor]:
    """transformers' model with random weights, and its logits after TOKENS."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SIZES | more)
    ).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    with torch.no_grad():
        return model, model(torch.tensor([TOKENS])).logits[0, -1]


def settings(model: Any) -> Settings:
    """config.json, null where a value is None."""
    return Settings(model.config.to_dict(), "config.json")


def logits(
    family: Any, file: Any, flash: str = "auto", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    weights = CanonicalWeights(file, family.parameters(), "test")
    check_no_extra(file, weights.sources, family.unused, "test")
    family = for_context(family, 128)
    engine = Runner(family, weights, [Cpu()], dtype=dtype, context=128, flash_attn=flash)
    return engine.prefill([Span(TOKENS)], engine.new_cache())


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).square().sum() / expected.square().sum())


@pytest.mark.filterwarnings(
    "ignore:.*"
)  # yarn's factor is not the ratio of the contexts: transformers says so
@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize("flash", ["on", "off"])
def test_logits_are_those_of_the_reference(case: str, flash: str) -> None:
    kind, more = VARIANTS[case]
    model, expected = reference(kind, **more)
    config = settings(model)
    assert (
        nmse(
            logits(
                text_family(config.values["model_type"], config),
                TensorFile(model.state_dict()),
                flash,
            ),
            expected,
        )
        <= 1e-10
    )


@pytest.mark.filterwarnings("ignore:.*")  # as above
def test_queries_grow_in_the_models_own_dtype() -> None:
    kind, more = VARIANTS["queries that grow"]
    model, expected = reference(kind, **more)
    config, file = settings(model), TensorFile(model.state_dict())
    family = text_family(config.values["model_type"], config)
    assert nmse(logits(family, file, dtype=torch.bfloat16).float(), expected) <= 1e-2


def test_what_is_left_out_and_what_is_null() -> None:
    from transformers import HyperCLOVAXConfig, LlamaConfig, Ministral3Config, MistralConfig

    grows = Ministral3Config(rope_parameters=MINISTRAL)
    for config in (LlamaConfig(), MistralConfig(), grows, HyperCLOVAXConfig()):
        rope = {"rope_parameters": config.rope_parameters}
        left_out = read(Settings({"model_type": config.model_type} | rope, "config.json"))
        assert left_out == read(Settings(config.to_dict(), "config.json"))
        assert left_out.window == getattr(config, "sliding_window", None)
    assert read(Settings({"model_type": "mistral"}, "config.json")).window == 4096
    assert (
        read(Settings({"model_type": "mistral", "sliding_window": None}, "config.json")).window
        is None
    )
    assert (
        read(Settings({"model_type": "llama", "sliding_window": 7}, "config.json")).window is None
    )


def gguf_names(model: Any) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp's converter writes them: rows of q and k in adjacent pairs, Llama
    3's divisors as a tensor.
    """
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "mlp.": "ffn_",
        "self_attn.": "attn_",
        "_proj": "",
    }
    result = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = SIZES["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = (
                tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
            )
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = tensor
    return result


def metadata(arch: str, **more: Any) -> dict[str, Any]:
    keys = {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "context_length": "max_position_embeddings",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }
    numbers = {
        **{key: SIZES[name] for key, name in keys.items()},
        "attention.layer_norm_rms_epsilon": 1e-6,
        **more,
    }
    return {f"{arch}.{key.replace('__', '.')}": value for key, value in numbers.items()}


def test_llama_3_in_a_gguf() -> None:
    """The scaling is not told by a key: the frequencies are divided by a tensor."""
    model, expected = reference("Llama", rope_parameters=LLAMA3)
    tensors = gguf_names(model)
    plain = 1 / 500000 ** (torch.arange(0, 6, 2) / 6)
    waves, smooth = 2 * torch.pi / plain, (64 / (2 * torch.pi / plain) - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    tensors["rope_freqs.weight"] = torch.where(
        waves < 16, torch.ones(3), torch.where(waves > 64, torch.tensor(8.0), between)
    )
    family = gguf_text_family(
        "llama",
        metadata("llama", rope__freq_base=500000.0, rope__dimension_count=6),
        frozenset(tensors),
        "file",
    )
    assert isinstance(family, LlamaText)
    assert family.divided
    assert nmse(logits(family, TensorFile(tensors, canonical=True)), expected) <= 1e-9
    del tensors["rope_freqs.weight"]
    family = gguf_text_family(
        "llama", metadata("llama", rope__freq_base=500000.0), frozenset(tensors), "file"
    )
    assert nmse(logits(family, TensorFile(tensors, canonical=True)), expected) > 1e-6


def test_biases_and_a_tied_table_in_a_gguf() -> None:
    model, expected = reference(
        "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    )
    tensors = gguf_names(model)
    del tensors["output.weight"]
    family = gguf_text_family(
        "llama", metadata("llama", rope__freq_base=1e4), frozenset(tensors), "file"
    )
    assert nmse(logits(family, TensorFile(tensors, canonical=True)), expected) <= 1e-10


@pytest.mark.filterwarnings("ignore:.*")
def test_mistral3_in_a_gguf() -> None:
    model, expected = reference("Ministral3", rope_parameters=MINISTRAL, head_dim=6)
    tensors = gguf_names(model)
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 16.0,
        "rope__scaling__original_context_length": 32,
        "rope__scaling__yarn_beta_fast": 32.0,
        "rope__scaling__yarn_beta_slow": 1.0,
        "rope__scaling__yarn_log_multiplier": 1.0,
        "attention__temperature_scale": 0.1,
    }
    more = {
        **scaling,
        "rope__freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": model.config.rms_norm_eps,
    }
    family = gguf_text_family("mistral3", metadata("mistral3", **more), frozenset(tensors), "file")
    assert nmse(logits(family, TensorFile(tensors, canonical=True)), expected) <= 1e-10


def test_the_context_without_one_is_that_of_the_short_factors() -> None:
    long = LONG | {"original_max_position_embeddings": 64}
    for rope, expected in ((LLAMA3, 512), (long, 64)):
        config = Settings(SIZES | {"rope_parameters": rope}, "config.json")
        assert default_context(text_family("llama", config)) == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "act": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "groups": ({"num_key_value_heads": 5}, "32 heads of size 128 in 5 groups"),
    "rope": (
        {"rope_parameters": {"rope_type": "ntk"}},
        "rope_parameters: rope_type is 'ntk', expected one of",
    ),
    "older rope": (
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        "rope_parameters: short_factor is \\(\\), expected 64 numbers",
    ),
    "growth": (
        {"model_type": "ministral3", "rope_parameters": {}},
        "llama_4_scaling_beta is None, expected a number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(Settings(values, "config.json"))


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        (
            {"expert_count": 8},
            "file: llama: expert_count is 8; experts are not read in this architecture",
        ),
        ({"rope__dimension_count": 4}, "file: llama: rope.dimension_count is 4, expected one of 6"),
    ],
)
def test_ggufs_that_cannot_be_followed(keys: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=f"^{reported}"):
        gguf_text_family("llama", metadata("llama", **keys), frozenset(), "file")
