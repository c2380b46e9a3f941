"""Qwen2's text settings, alone and with pictures: transformers' defaults, windows, sections, and
what cannot be followed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Reference
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.rotary import rotary, sections
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families import qwen2
from mtmd.llm.family import gguf_text_family, text_family

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "qwen2_5_vl"


def read(**values: Any) -> qwen2.Qwen2Text:
    return qwen2.read(Settings(values, "config.json"))


@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen2VLTextConfig", "Qwen2_5_VLTextConfig"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    import transformers
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    expected = {
        "Qwen2Config": transformers.Qwen2Config,
        "Qwen2VLTextConfig": Qwen2VLTextConfig,
        "Qwen2_5_VLTextConfig": Qwen2_5_VLTextConfig,
    }[kind]()
    actual: Any = text_family(
        expected.model_type, Settings({"model_type": expected.model_type}, "config.json")
    )
    assert (
        actual.width,
        actual.ffn,
        actual.heads,
        actual.groups,
        actual.vocabulary,
        actual.context,
        actual.eps,
    ) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.rms_norm_eps,
    )
    assert [
        ("sliding_attention" if w else "full_attention") for w in actual.windows
    ] == expected.layer_types
    turned = rotary(expected.rope_parameters["rope_theta"], actual.head)
    assert actual.rotary == (
        turned
        if kind == "Qwen2Config"
        else turned.by_axes(sections([16, 24, 24], interleaved=False))
    )


def test_old_and_new_ropes() -> None:
    """Published files have `rope_scaling` of type mrope beside `rope_theta`; transformers 5 writes
    `rope_parameters`.
    """
    sizes = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    old = read(**sizes, rope_theta=1e5, rope_scaling={"type": "mrope", "mrope_section": [8, 8, 8]})
    assert old == read(
        **sizes,
        rope_parameters={
            "rope_type": "default",
            "type": "mrope",
            "rope_theta": 1e5,
            "mrope_section": [8, 8, 8],
        },
    )
    assert old.rotary.axes == (0,) * 8 + (1,) * 8 + (2,) * 8


WINDOWS: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "off": ({"sliding_window": 8, "max_window_layers": 1}, [None, None, None]),
    "on": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8, 8]),
    "on, everywhere": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        [8, 8, 8],
    ),
    "on, the default": ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
    "on, none": (
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        [None, None, None],
    ),
    "by name": (
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        [8, None, None],
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str) -> None:
    values, expected = WINDOWS[case]
    assert list(read(num_hidden_layers=3, **values).windows) == expected


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
def test_windows_against_transformers(tmp_path: Path, tied: bool) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=97,
            hidden_size=60,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=128,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    ).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path)
    actual = qwen2.read(Settings(json.loads((tmp_path / "config.json").read_text()), "config.json"))
    engine = Runner(
        actual,
        CanonicalWeights(open_weights(tmp_path), actual.parameters(), "x"),
        [Reference("cpu")],
        dtype=torch.float32,
        context=64,
    )
    tokens = torch.randint(97, (1, 40))
    with torch.no_grad():
        expected = model(tokens).logits[0, -1]
    logits = engine.prefill([Span(tuple(tokens[0].tolist()))], engine.new_cache())
    assert ((logits - expected).square().sum() / expected.square().sum()) <= 1e-9


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "layers": (
        {"num_hidden_layers": 1025},
        "num_hidden_layers is 1025, expected an integer from 1 to 1024",
    ),
    "groups": ({"num_key_value_heads": 3}, "32 heads of size 128 in 3 groups"),
    "one section": (
        {"rope_scaling": {"mrope_section": [64]}},
        r"mrope_section is \[64\], expected 3 counts with a sum of 64",
    ),
    "short sections": (
        {"rope_scaling": {"mrope_section": [1, 2, 3]}},
        r"mrope_section is \[1, 2, 3\], expected 3 counts with a sum of 64",
    ),
    "first layer": (
        {"max_window_layers": "all"},
        "max_window_layers is 'all', expected a number of layers",
    ),
    "kinds": (
        {"layer_types": ["full_attention"]},
        "layer_types has to name 32 layers, each full_attention or sliding_attention",
    ),
    "no window": (
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "layer_types names sliding_attention, but there is no",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: .*{reported}"):
        read(**values)


def test_biases_and_names() -> None:
    result = read(num_hidden_layers=1, tie_word_embeddings=True).parameters()
    assert {n for n in result if n.endswith(".bias")} == {
        f"blk.0.attn_{part}.bias" for part in "qkv"
    }
    assert result["blk.0.attn_q.bias"].sources[0] == "model.layers.0.self_attn.q_proj.bias"
    assert (
        "output.weight" not in result and "output.weight" in read(num_hidden_layers=1).parameters()
    )


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"needs the checkpoints of {GOLDEN}")
def test_the_golden_gguf_says_what_its_config_says() -> None:
    file = GgufFile(GOLDEN / "text-BF16.gguf")
    actual: Any = gguf_text_family("qwen2vl", file.metadata, frozenset(file.names()), "text")
    expected = qwen2.read(
        Settings(
            json.loads((GOLDEN / "hf" / "config.json").read_text())["text_config"], "config.json"
        )
    )
    assert actual.eps == pytest.approx(expected.eps)
    same = (
        "width",
        "ffn",
        "heads",
        "groups",
        "head",
        "vocabulary",
        "context",
        "tied",
        "windows",
        "rotary",
    )
    assert [getattr(actual, name) for name in same] == [getattr(expected, name) for name in same]
    assert set(CanonicalWeights(file, actual.parameters(), "text").sources) == set(file.names())
