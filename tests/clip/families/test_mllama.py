"""Llama 3.2 Vision: settings that are refused, rows of a picture, what tokens see of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families.mllama import MllamaVision, Rows, read
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.spans import Seen, Span, context_of, seen_in, sight
from mtmd.llm.families.mllama import read as read_text

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "num_hidden_layers": 4,
    "intermediate_layers_indices": [1, 2],
    "vision_output_dim": 192,
}
TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def family(**vision: Any) -> MllamaVision:
    image = {"size": {"height": 28, "width": 28}}
    return read(
        Settings({"vision_config": VISION | vision, "text_config": TEXT}, "config.json"),
        Settings(image, "preprocessor_config.json"),
    )


def test_rows_come_back_tile_by_tile() -> None:
    """Real ones first, whatever the canvas's shape."""
    for grid in family().resolution.grids:
        rows = Rows(grid, 4, 4)
        assert rows.total == 68 and rows.real == grid[0] * grid[1] * 17
        tile, at = rows.locations[rows.order].T
        assert torch.equal(tile, torch.arange(4).repeat_interleave(17))
        assert torch.equal(at, torch.arange(17).repeat(4))
        # What is real in the tower is what stands before classes of padding.
        assert set(rows.order[: rows.real].tolist()) == set(range(rows.real))


def test_what_tokens_see() -> None:
    """As get_cross_attention_token_mask of transformers says."""
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    for tokens in ([5, 5, 0, 5, 5], [0, 0, 5], [5, 0, 5, 0, 0, 5], [0]):
        places = [at for at, token in enumerate(tokens) if token == 0]
        pictures = [Seen(at, 10, 10) for at in places]
        ranges = get_cross_attention_token_mask(tokens, 0)
        for token in range(len(tokens)):
            ends = (len(tokens) if stop == -1 else stop for _, stop in ranges)
            seen = [
                index
                for index, ((start, _), stop) in enumerate(zip(ranges, ends, strict=True))
                if start <= token < stop
            ]
            first, last, attends, shown = sight(pictures, token)
            assert attends and bool(shown) == bool(seen)
            expected = range(10 * seen[0], 10 * seen[-1] + 10) if seen else range(10 * len(places))
            assert range(first, last + 1) == expected
    assert sight((), 3) == (0, -1, 0, 0)


def test_padding_is_stored_behind_all_that_is_real() -> None:
    one, two = torch.zeros(3, 2), torch.ones(4, 2)
    spans = [Span((1, 2)), Span((9,), one, real=2), Span((9,), two, real=1), Span((3,))]
    assert seen_in(spans, 5) == (Seen(7, 2, 3), Seen(8, 1, 4))
    assert [len(rows) for rows in context_of(spans)] == [2, 1, 1, 3]
    assert sight(seen_in(spans), 4) == (0, 2, 1, 1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"attention_heads": 3}, "3 heads of width 64"),
    "patches": ({"patch_size": 5}, "no whole number of patches"),
    "features": ({"intermediate_layers_indices": [4]}, "expected layers below 4"),
    "width": ({"vision_output_dim": 64}, "vision_output_dim"),
    "grids": ({"supported_aspect_ratios": [[1, 1]]}, "supported_aspect_ratios"),
    "tiles": ({"max_num_tiles": 2}, "expected 2 of 28 x 28"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    vision, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(**vision)


TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"cross_attention_layers": [40]}, "expected layers below 40"),
    "heads": ({"head_dim": 8}, "4 heads of 8 numbers, expected 64"),
    "rows": ({"vision_config": {"image_size": 1 << 20}}, "expected at most 65536"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_decoders_that_cannot_be(case: str) -> None:
    settings, reported = TEXTS[case]
    with pytest.raises(ModelError, match=reported):
        read_text(Settings(TEXT | settings, "config.json: text_config"))
