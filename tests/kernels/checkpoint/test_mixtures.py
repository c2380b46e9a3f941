"""Types of a mixture's tensors: those that llama.cpp's quantizer chose in files that it wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.mixtures import MIXTURES, tensor_types

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/text-*.gguf")), ids=lambda p: p.stem)
def test_types_are_those_of_files_that_llama_cpp_wrote(path):
    file, mixture = GgufFile(path), path.stem.removeprefix("text-")
    types = tensor_types(mixture, {name: file.shape(name) for name in file.names()})
    assert types and {name: file.kind(name) for name in types} == types
    plain = {"F32", "BF16"}
    assert {file.kind(name) for name in file.names() if name not in types} <= plain


def shapes(layers, width=512, *, groups=2, experts=0, tied=False, values="attn_v"):
    """Those of a decoder with 8 heads of 64."""
    ffn = ((experts,) if experts else (), "_exps" if experts else "")
    made = {"token_embd.weight": (1000, width), "output_norm.weight": (width,)}
    if not tied:
        made["output.weight"] = (1000, width)
    for layer in range(layers):
        at = f"blk.{layer}"
        made |= {
            f"{at}.attn_norm.weight": (width,),
            f"{at}.attn_q.weight": (512, width),
            f"{at}.attn_q.bias": (512,),
            f"{at}.attn_k.weight": (groups * 64, width),
            f"{at}.{values}.weight": (groups * 64, width),
            f"{at}.attn_output.weight": (width, 512),
            f"{at}.ffn_gate_inp.weight": (8, width),
            f"{at}.ffn_down{ffn[1]}.weight": (*ffn[0], width, 1024),
        }
    return made


def counted(mixture, part, model, **given):
    types = tensor_types(mixture, model, **given)
    return [kind for name, kind in types.items() if part in name]


def test_layers_that_suffer_most_get_more_bits():
    model = shapes(16)
    assert Counter(tensor_types("Q8_0", model).values()) == {"Q8_0": 16 * 5 + 2}
    more = [layer for layer in range(16) if layer in (0, 1, 14, 15) or (layer - 2) % 3 == 2]
    for part in ("attn_v", "ffn_down"):
        kinds = counted("Q4_K_M", part, model)
        assert [layer for layer, kind in enumerate(kinds) if kind == "Q6_K"] == more
    assert counted("Q3_K_M", "ffn_down", model) == ["Q5_K"] + ["Q4_K"] * 15
    assert counted("Q3_K_M", "attn_v", model) == ["Q5_K"] * 2 + ["Q4_K"] * 14
    assert counted("IQ4_XS", "ffn_down", model) == ["Q5_K"] * 2 + ["IQ4_XS"] * 14
    assert set(counted("IQ4_XS", "ffn_down", model, weighted=True)) == {"IQ4_XS"}
    assert counted("Q4_0", "ffn_down", model, weighted=True)[:3] == ["Q4_1", "Q4_1", "Q4_0"]
    assert set(counted("Q2_K", "attn_v", model)) == {"Q4_K"}
    assert set(counted("Q2_K", "attn_v", shapes(16, groups=8))) == {"Q3_K"}
    assert set(counted("Q4_K_M", "attn_v", shapes(80))) == {"Q5_K", "Q6_K"}
    fused = counted("Q4_K_S", "attn_qkv", shapes(8, values="attn_qkv"))
    assert fused == ["Q5_K"] * 4 + ["Q4_K"] * 4


def test_tables_and_experts():
    assert tensor_types("Q4_K_M", shapes(1))["token_embd.weight"] == "Q4_K"
    assert tensor_types("Q4_K_M", shapes(1))["output.weight"] == "Q6_K"
    assert tensor_types("Q4_K_M", shapes(1, tied=True))["token_embd.weight"] == "Q6_K"
    assert tensor_types("FP8", shapes(1, tied=True))["token_embd.weight"] == "BF16"
    eight = tensor_types("Q4_K_M", shapes(1, experts=8))
    assert (eight["blk.0.attn_v.weight"], eight["blk.0.attn_output.weight"]) == ("Q8_0", "Q5_K")
    sparse = tensor_types("MXFP4_MOE", shapes(1, experts=4))
    assert sparse["blk.0.ffn_down_exps.weight"] == "MXFP4"
    assert sparse["blk.0.attn_q.weight"] == "Q8_0"


def test_rows_of_no_whole_blocks_have_smaller_ones():
    narrow = tensor_types("Q4_K_M", shapes(4, width=96))
    assert narrow["blk.0.attn_q.weight"] == "Q5_0" and narrow["token_embd.weight"] == "Q5_0"
    assert narrow["output.weight"] == "Q8_0" and narrow["blk.0.attn_output.weight"] == "Q4_K"
    odd = tensor_types("Q6_K", shapes(1, width=40))
    assert odd["blk.0.attn_q.weight"] == "F16"
    assert tensor_types("FP8", shapes(1, width=96))["blk.0.attn_q.weight"] == "Q8_0"


@pytest.mark.parametrize("mixture", MIXTURES)
def test_norms_biases_and_routers_are_left_as_they_are(mixture):
    types = tensor_types(mixture, shapes(2))
    assert not [name for name in types if "norm" in name or "bias" in name or "gate_inp" in name]


def test_tables_that_are_added_or_attended_to_are_left_as_they_are():
    """They are read by ops that take plain numbers."""
    tables = ("v.position_embd.weight", "v.resample_query_768.weight", "v.patch_embd.weight")
    assert tensor_types("Q8_0", dict.fromkeys(tables, (144, 96))) == {}
    # llama.cpp's converter writes queries as matrices.
    assert tensor_types("BF16", dict.fromkeys(tables, (144, 96))) == {tables[1]: "BF16"}
