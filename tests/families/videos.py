"""Oracles of families that read videos: those of pictures, with transformers' own video processor
beside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any

import minicpmv4_6
import numpy as np
import torch
from common import Messages, Oracle, picture, write
from torchvision_stand_in import torchvision_here

Unpack = Callable[[Any], list[np.ndarray]]


@dataclass(frozen=True)
class Clip:
    """Frames uint8 [Y, X, 3] that were taken, `indices`, of `total` at `fps`."""

    frames: tuple[np.ndarray, ...]
    indices: tuple[int, ...]
    total: int
    fps: float

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(i / self.fps for i in self.indices)


def clip(seed: int, frames: int, width: int, height: int, every: int, fps: float) -> Clip:
    """One of every `every` frames of a picture that changes."""
    shown = tuple(picture(seed * 100 + i, width, height) for i in range(frames))
    return Clip(shown, tuple(range(0, frames * every, every)), frames * every, fps)


@dataclass(frozen=True)
class VideoCase:
    """A variant of a row of the family table. `processor` is transformers' video processor, module
    and class, with `settings`; `tiles` makes of its output the tiles that the tower reads, one
    array a group. `mixed`: whether the reference takes pictures and videos in one prompt;
    `many`: and several videos of different lengths.
    """

    row: str
    variant: str
    module: str
    kind: str
    settings: dict[str, Any]
    tiles: Unpack
    token: str
    mixed: bool = True
    many: bool = True
    marker: str = ""
    """What the reference's text has where the template wrote `written`."""
    written: str = ""
    published_positions: bool = False
    two_at_least: bool = False
    """Whether the reference refuses a single frame."""

    @property
    def name(self) -> str:
        return f"{self.row}: {self.variant}"


def pairs(inputs: Any) -> list[np.ndarray]:
    """[6, Y, X] of each group of two frames, from patches, 2 x 2 of them together."""
    result = []
    grids = inputs["video_grid_thw"].tolist()
    counts = [time * rows * columns for time, rows, columns in grids]
    for patches, (time, rows, columns) in zip(
        inputs["pixel_values_videos"].split(counts), grids, strict=True
    ):
        side = int((patches.shape[1] / 6) ** 0.5)
        cells = patches.numpy().reshape(time, rows // 2, columns // 2, 2, 2, 3, 2, side, side)
        result += list(
            cells.transpose(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(time, 6, rows * side, columns * side)
        )
    return result


def single_pairs(inputs: Any) -> list[np.ndarray]:
    """[6, Y, X] of each two frames, the last one twice where they are odd, from patches of one each,
    2 x 2 of them together.
    """
    result, start = [], 0
    for time, rows, columns in inputs["video_grid_thw"].tolist():
        stop = start + time * rows * columns
        patches, start = inputs["pixel_values_videos"][start:stop].numpy(), stop
        if time % 2:
            patches = np.concatenate((patches, patches[-rows * columns :]))
            time += 1
        side = int((patches.shape[1] / 3) ** 0.5)
        cells = patches.reshape(time, rows // 2, columns // 2, 2, 2, 3, side, side)
        each = cells.transpose(0, 5, 1, 3, 6, 2, 4, 7)
        result += list(each.reshape(time // 2, 6, rows * side, columns * side))
    return result


def frames(inputs: Any) -> list[np.ndarray]:
    """[3, Y, X] of each frame."""
    return list(
        inputs["pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"]
        .flatten(0, -4)
        .numpy()
    )


def frame_pairs(inputs: Any) -> list[np.ndarray]:
    """[6, Y, X] of each two frames of a video, the last one twice where they are odd."""
    each = frames(inputs)
    each += each[-1:] * (len(each) % 2)
    return [np.concatenate(pair) for pair in zip(each[::2], each[1::2], strict=True)]


def area_frames(inputs: Any, side: int = 4) -> list[np.ndarray]:
    """[3, Y, X] of each frame, from its patches by their positions."""
    result = []
    for patches, positions in zip(
        inputs["pixel_values_videos"].numpy(), inputs["video_position_ids"].numpy(), strict=True
    ):
        real = positions.min(-1) >= 0
        columns, rows = positions[real].max(0) + 1
        cells = patches[real].reshape(rows, columns, side, side, 3).transpose(4, 0, 2, 1, 3)
        result.append(cells.reshape(3, rows * side, columns * side))
    return result


CASES: dict[str, VideoCase] = {}
for case in (
    VideoCase(
        "qwen2_vl",
        "qwen2-vl, heads of 40 and 24",
        "qwen2_vl",
        "Qwen2VLVideoProcessor",
        {"patch_size": 14, "min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        pairs,
        "<|video_pad|>",
        published_positions=True,
    ),
    VideoCase(
        "ernie4_5_vl",
        "experts of text and of pictures",
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeVideoProcessor",
        {
            "patch_size": 6,
            "size": {"shortest_edge": 12 * 12 * 6, "longest_edge": 12 * 12 * 30},
            "draw_on_frames": False,
        },
        single_pairs,
        "<|VIDEO_PLACEHOLDER|>",
        published_positions=True,
    ),
    *(
        VideoCase(
            "video_llama3",
            variant,
            "video_llama_3",
            "VideoLlama3VideoProcessor",
            {
                "merge_size": 2,
                "temporal_patch_size": 1,
                "size": {"shortest_edge": 12 * 12 * 2, "longest_edge": 12 * 12 * 110},
                **more,
            },
            single_pairs,
            "<|video_pad|>",
        )
        for variant, more in (
            ("heads of 40 and 24", {"patch_size": 6}),
            (
                "tied, patches of 8, 6 heads on 2, as published",
                {"patch_size": 8, "use_token_compression": False},
            ),
        )
    ),
    VideoCase(
        "exaone4_5",
        "4 heads on 2, windows of 2x2 tokens",
        "qwen2_vl",
        "Qwen2VLVideoProcessor",
        {"patch_size": 14, "min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        pairs,
        "<|video_pad|>",
    ),
    VideoCase(
        "qwen2_vl",
        "qwen2.5-vl, windows of 2x2 merged patches",
        "qwen2_vl",
        "Qwen2VLVideoProcessor",
        {
            "patch_size": 14,
            "size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 30},
            "cap_pixels_per_frame": True,
            "max_video_tokens": 60,
        },
        pairs,
        "<|video_pad|>",
        published_positions=True,
    ),
    VideoCase(
        "qwen_omni",
        "2.5, thinker",
        "qwen2_vl",
        "Qwen2VLVideoProcessor",
        {"patch_size": 14},
        pairs,
        "<|VIDEO|>",
    ),
    VideoCase(
        "qwen3_vl",
        "dense",
        "qwen3_vl",
        "Qwen3VLVideoProcessor",
        {"size": {"shortest_edge": 32 * 32 * 6, "longest_edge": 32 * 32 * 70}},
        pairs,
        "<|video_pad|>",
        marker="<|video_pad|>",
        written="<|vision_start|><|video_pad|><|vision_end|>",
        two_at_least=True,
    ),
    VideoCase(
        "lfm3_vl",
        "heads of 20 and 24, windows of 9",
        "qwen3_vl",
        "Qwen3VLVideoProcessor",
        {"patch_size": 6, "size": {"shortest_edge": 12 * 12 * 6, "longest_edge": 12 * 12 * 70}},
        pairs,
        "<|video_pad|>",
        marker="<|video_pad|>",
        written="<|vision_start|><|video_pad|><|vision_end|>",
        two_at_least=True,
    ),
    VideoCase(
        "cohere_compass",
        "every fourth layer full, without positions, as published",
        "cohere_compass",
        "CohereCompassVideoProcessor",
        {"size": {"shortest_edge": 32 * 32 * 6, "longest_edge": 32 * 32 * 70}},
        pairs,
        "<|VIDEO_PAD|>",
        marker="<|VIDEO_PAD|>",
        written="<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
        two_at_least=True,
    ),
    VideoCase(
        "qwen3_5",
        "dense",
        "qwen3_vl",
        "Qwen3VLVideoProcessor",
        {
            "size": {"shortest_edge": 32 * 32 * 6, "longest_edge": 32 * 32 * 70},
            "cap_pixels_per_frame": True,
            "max_video_tokens": 9,
        },
        pairs,
        "<|video_pad|>",
        marker="<|video_pad|>",
        written="<|vision_start|><|video_pad|><|vision_end|>",
        two_at_least=True,
    ),
    VideoCase(
        "glm4v",
        "heads of 40 and 24, half of each turning",
        "glm4v",
        "Glm4vVideoProcessor",
        {"size": {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 70}},
        pairs,
        "<|image|>",
        mixed=False,
        two_at_least=True,
    ),
    VideoCase(
        "glm4v",
        "glmga",
        "glmga",
        "GlmgaVideoProcessor",
        {"size": {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 70}},
        pairs,
        "<|image|>",
        mixed=False,
        two_at_least=True,
    ),
    VideoCase(
        "idefics3",
        "smolvlm",
        "smolvlm",
        "SmolVLMVideoProcessor",
        {
            "size": {"longest_edge": 50},
            "max_image_size": {"longest_edge": 24},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 50}},
        },
        frames,
        "<image>",
        mixed=False,
        many=False,
    ),
    VideoCase(
        "internvl",
        "qwen2",
        "internvl",
        "InternVLVideoProcessor",
        {"size": {"height": 28, "width": 28}},
        frames,
        "<IMG_CONTEXT>",
        many=False,
    ),
    VideoCase(
        "llava_onevision",
        "qwen2, canvases thinned to 2 tiles",
        "llava_onevision",
        "LlavaOnevisionVideoProcessor",
        {"size": {"height": 28, "width": 28}},
        frames,
        "<video>",
        many=False,
    ),
    VideoCase(
        "llava_video",
        "next, llama, as published",
        "llava_next_video",
        "LlavaNextVideoVideoProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        frame_pairs,
        "<video>",
        many=False,
    ),
    VideoCase(
        "llava_video",
        "two towers, llama, as published",
        "video_llava",
        "VideoLlavaVideoProcessor",
        {"size": {"shortest_edge": 45}, "crop_size": {"height": 42, "width": 42}},
        frame_pairs,
        "<video>",
        many=False,
    ),
    VideoCase(
        "gemma4",
        "dense: keys are values, images attend in both directions",
        "gemma4",
        "Gemma4VideoProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        area_frames,
        "<|video|>",
        many=False,
    ),
    VideoCase(
        "gemma4",
        "E2B-like: per-layer embeddings, shared layers, clipped linears",
        "gemma4",
        "Gemma4VideoProcessor",
        {"patch_size": 6, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        partial(area_frames, side=6),
        "<|video|>",
    ),
    VideoCase(
        "minicpmv4_6",
        "slices, windows merged after the second layer",
        "minicpmv4_6",
        "MiniCPMV4_6VideoProcessor",
        {"patch_size": 6, "scale_resolution": 48, "slice_mode": False},
        partial(minicpmv4_6.tiles, patch=6, key="pixel_values_videos", sizes="target_sizes_videos"),
        "<|video_pad|>",
    ),
    VideoCase(
        "minicpmv4_6",
        "4.7, slices on canvases",
        "minicpmv4_6",
        "MiniCPMV4_6VideoProcessor",
        {"patch_size": 6, "scale_resolution": 48, "slice_mode": False},
        partial(minicpmv4_6.tiles, patch=6, key="pixel_values_videos", sizes="target_sizes_videos"),
        "<|video_pad|>",
    ),
):
    CASES[case.name] = case


class VideoOracle:
    """transformers' model and processor of a case; writes its settings into the checkpoint."""

    def __init__(self, oracle: Oracle, case: VideoCase):
        self.case, tokenizer = case, oracle.processor.tokenizer
        self.oracle = replace(oracle, video_token=tokenizer.convert_tokens_to_ids(case.token))
        with torchvision_here():
            module = import_module(
                f"transformers.models.{case.module}.video_processing_{case.module}"
            )
        settings = {
            key: value
            for key, value in vars(oracle.processor.image_processor).items()
            if key in ("image_mean", "image_std", "merge_size", "patch_size")
        } | case.settings
        write(
            oracle.folder,
            "video_preprocessor_config.json",
            {"video_processor_type": case.kind, **settings},
        )
        if case.module == "smolvlm":
            import transformers.models.smolvlm.processing_smolvlm as processing

            # Counts in words, for which it asks a library of that name.
            processing.num2words = {1: "one", 5: "five", 6: "six"}.__getitem__
        self.videos = getattr(module, case.kind)(**settings)
        oracle.processor.video_processor = self.videos
        body = oracle.model.model
        if case.published_positions and not isinstance(body.get_rope_index, _Published):
            body.get_rope_index = _Published(body)

    def inputs(self, messages: Messages, media: Sequence[np.ndarray | Clip]) -> Any:
        """As `Oracle.inputs`; `media` in the order of the messages' parts."""
        processor = self.oracle.processor
        rendered = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        if self.case.written:
            rendered = rendered.replace(self.case.written, self.case.marker)
        clips = [m for m in media if isinstance(m, Clip)]
        images = [m for m in media if not isinstance(m, Clip)]
        more: dict[str, Any] = {}
        if clips:
            more["videos"] = [np.stack(c.frames) for c in clips]
            more["video_metadata"] = [
                {
                    "total_num_frames": c.total,
                    "fps": c.fps,
                    "duration": c.total / c.fps,
                    "frames_indices": list(c.indices),
                }
                for c in clips
            ]
            more["do_sample_frames"] = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # transformers' use of numpy
            result = processor(text=[rendered], images=images or None, return_tensors="pt", **more)
        if "video_second_per_grid" in result:  # of a rate that is passed for all videos
            seconds = [2 * (c.indices[-1] / c.fps) / max(len(c.indices) - 1, 1) for c in clips]
            result["video_second_per_grid"] = torch.tensor(seconds)
        return {k: v for k, v in result.items() if k not in ("labels", "video_metadata")}


class _Published:
    """Where tokens stand as the models' authors have it, and transformers had it up to 5.2: what
    follows a video begins behind the last of its positions, its time among them
    (arXiv:2409.12191, 3.1).
    """

    def __init__(self, body: Any):
        self.body = body

    def __call__(
        self,
        input_ids: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vision = self.body.config.vision_config
        grids = {
            kind: iter(() if grid is None else grid)
            for kind, grid in ((1, image_grid_thw), (2, video_grid_thw))
        }
        seconds = iter(() if second_per_grid_ts is None else second_per_grid_ts)
        at, result = 0, []
        for kind, group in groupby(mm_token_type_ids[0].tolist()):
            count = len(list(group))
            if kind == 0:
                result.append(torch.arange(count).expand(3, -1) + at)
            else:
                each = getattr(vision, "tokens_per_second", None)
                separate = each * next(seconds) if kind == 2 and each else 1
                frames = getattr(vision, "temporal_merge_size", 1) if kind == 2 else 1
                result.append(
                    self.body.get_vision_position_ids(
                        at, next(grids[kind]), frames, vision.spatial_merge_size, separate
                    )
                )
            at = int(result[-1].max()) + 1
        positions = torch.cat(result, 1)[:, None]
        return positions, (positions.max() + 1 - input_ids.shape[1]).reshape(1, 1)
