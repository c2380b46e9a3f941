"""Qwen2.5-VL's windows against the reference's, and its picture settings: defaults, what cannot be
followed, what a GGUF says.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.bench.random_weights import RandomFile, plain_kinds
from mtmd.clip.families import qwen2_5_vl
from mtmd.clip.families.qwen2_5_vl import layout, layouts
from mtmd.clip.family import gguf_vision_family
from mtmd.clip.grids import Cells
from mtmd.clip.packing import Strip
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import graph_input, toposort
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.flash_choice import AttentionForm

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "qwen2_5_vl"


def read(**vision: Any) -> qwen2_5_vl.Qwen25Vision:
    return qwen2_5_vl.read(
        Settings({"vision_config": vision}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    new, result = Qwen2_5_VLVisionConfig(), read()
    assert (result.layers, result.width, result.ffn, result.heads, result.text_width) == (
        new.depth,
        new.hidden_size,
        new.intermediate_size,
        new.num_heads,
        new.out_hidden_size,
    )
    assert (result.full, result.window) == (
        frozenset(new.fullatt_block_indexes),
        new.window_size // new.patch_size // new.spatial_merge_size,
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    "frames": ({"temporal_patch_size": 1}, "temporal_patch_size is 1, expected one of 2"),
    "odd heads": (
        {"hidden_size": 84, "num_heads": 6},
        "6 heads of width 84; expected .* each of a multiple of 4",
    ),
    "no window": (
        {"window_size": 27},
        "window_size is 27, expected at least the 28 pixels of a token",
    ),
    "layers by name": (
        {"fullatt_block_indexes": "all"},
        "fullatt_block_indexes is 'all', expected a list of layers",
    ),
    "depth": ({"depth": 1025}, "depth is 1025, expected an integer from 1 to 1024"),
}


@pytest.mark.parametrize("case", WRONG)
def test_towers_that_cannot_be(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: vision_config: {reported}"):
        read(**values)


def test_heads_that_share_keys_and_values() -> None:
    """EXAONE 4.5's, by transformers' defaults, and what cannot be."""
    from transformers import Exaone4_5_Config

    def of(**vision: Any) -> qwen2_5_vl.Qwen25Vision:
        config = {"model_type": "exaone4_5", "vision_config": vision}
        return qwen2_5_vl.read(Settings(config, "config.json"), Settings({}, "image"))

    c = Exaone4_5_Config().vision_config
    ours = of()
    assert (ours.heads, ours.groups) == (c.num_heads, c.num_key_value_heads)
    rows = c.hidden_size + 2 * c.num_key_value_heads * (c.hidden_size // c.num_heads)
    assert ours.parameters()["v.blk.0.attn_qkv.weight"].shape == (rows, c.hidden_size)
    assert not ours.resolution.on_grid and ours.video.clock is None
    with pytest.raises(ModelError, match="16 heads in 3 groups; expected groups that divide"):
        of(num_key_value_heads=3)


def test_parameters() -> None:
    """Gated, and with norms that have no bias."""
    result = read(depth=1).parameters()
    assert result["v.blk.0.ffn_gate.weight"].sources[0] == "visual.blocks.0.mlp.gate_proj.weight"
    assert {"v.blk.0.ffn_gate.bias", "v.post_ln.weight"} < set(result) and not {
        "v.blk.0.ln1.bias",
        "v.post_ln.bias",
    } & set(result)


def test_windows_are_the_reference_ones() -> None:
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    rng = random.Random(0)
    for _ in range(100):
        merge, window = rng.randint(1, 3), rng.randint(1, 5)
        rows, columns = (merge * rng.randint(1, 12) for _ in range(2))
        grid = torch.tensor([[1, rows, columns]])
        index, lengths = get_vision_window_index(grid, merge, window * merge * 14, 14)
        actual = layout(rows, columns, merge, window)
        assert torch.equal(actual.back, torch.argsort(index))
        cells = (
            get_vision_position_ids(grid, merge).unflatten(0, (-1, merge**2))[index].flatten(0, 1)
        )  # [P, 2]
        assert torch.equal(actual.positions.t(), cells)
        assert torch.equal(actual.order, cells[:, 0] * columns + cells[:, 1])
        starts, ends = lengths[:-1], lengths[1:]
        expected = torch.repeat_interleave(torch.stack((starts, ends - 1), 1), ends - starts, 0)
        assert torch.equal(actual.bounds, expected.int()) and actual.bounds.dtype == torch.int32


def test_windows_of_several_pictures_are_the_reference_ones() -> None:
    """As transformers lays the pictures of one forward, with places behind them that are empty."""
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    merge, window, sides = 2, 3, ((4, 10), (2, 2), (12, 8))
    strip = Strip(Cells(14, merge), few=False)
    parts = strip.parts([(3, rows * 14, columns * 14) for rows, columns in sides])
    grid = torch.tensor([[1, *side] for side in sides])
    index, lengths = get_vision_window_index(grid, merge, window * merge * 14, 14)
    actual, count = layouts(parts, 160, merge, window), 140
    cells = get_vision_position_ids(grid, merge).unflatten(0, (-1, merge**2))
    assert torch.equal(actual.positions.t()[:count], cells[index].flatten(0, 1))
    order = torch.arange(count).unflatten(0, (-1, merge**2))[index].flatten()
    assert torch.equal(actual.order, torch.cat((order, torch.arange(count, 160))))
    tokens = count // merge**2
    assert torch.equal(actual.back[:tokens], torch.argsort(index))
    assert actual.back[tokens:].tolist() == list(range(tokens, 40))
    starts, ends = lengths[:-1], lengths[1:]
    expected = torch.repeat_interleave(torch.stack((starts, ends - 1), 1), ends - starts, 0)
    assert torch.equal(actual.bounds[:count], expected.int())
    assert (actual.bounds[count:, 0] > actual.bounds[count:, 1]).all()


def test_windows_count_what_they_see() -> None:
    """FLOPs of a layer's attention: of all patches, or of the 8 x 8 of a window."""
    family = read(depth=2, fullatt_block_indexes=[1])
    weights = CanonicalWeights(
        RandomFile(family.parameters(), plain_kinds("BF16")), family.parameters(), ""
    )
    tiles = graph_input("inp.pixels", (1, 3, 28 * 8, 28 * 8), torch.bfloat16, lambda x: x)
    nodes = toposort(family.graph(tiles, weights, AttentionForm()))
    windows, whole = (OPS["attention"].flops(n) for n in nodes if n.op == "attention")
    assert whole == 4 * windows == 4 * 256 * 256 * family.width


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"needs the checkpoints of {GOLDEN}")
def test_the_golden_gguf_says_what_its_config_says() -> None:
    file, folder = GgufFile(GOLDEN / "mmproj-BF16.gguf"), GOLDEN / "hf"
    actual: Any = gguf_vision_family(
        "qwen2.5vl_merger",
        file.metadata,
        {name: file.meta(name)[0] for name in file.names()},
        "mmproj",
    )
    config, image = (
        Settings(json.loads((folder / name).read_text()), name)
        for name in ("config.json", "preprocessor_config.json")
    )
    expected = qwen2_5_vl.read(config, image)
    same = ("layers", "width", "ffn", "heads", "text_width", "full", "rotary")
    assert [getattr(actual, name) for name in same] == [getattr(expected, name) for name in same]
    # The window is not in the file: the published one counts, and 56 pixels of this one's do not.
    assert (actual.window, expected.window) == (4, 2)
    assert actual.resolution.normalize.mean == pytest.approx(expected.resolution.normalize.mean)
    assert set(CanonicalWeights(file, actual.parameters(), "mmproj").sources) == set(file.names())
