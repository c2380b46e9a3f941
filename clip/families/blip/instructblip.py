"""InstructBLIP (arXiv:2305.06500): BLIP-2 whose Q-Former reads the prompt, too, so that what a
decoder sees of a picture depends on what it is asked. A video is some of its frames, each as a
picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.clip.families.blip.blip2 import read_square
from mtmd.clip.families.blip.queried import QueriedTower, read_queried
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.instructed import Instruction
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.video.family import Run
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.clip.video.single import SingleFrames, Stretched
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

FRAMES = 4  # of a video, as its authors show it
# What stands for a picture's tokens, by model_type
TOKENS = {"instructblip": "<image>", "instructblipvideo": "<video>"}
# From the authors' list of instructions
TASKS = {
    "caption": "Write a short description for the image.",
    "short-caption": "A short image caption.",
    "long-caption": "Write a detailed description.",
}
TEMPLATE = pictures_first("{% if not loop.first %}{{ '\\n' }}{% endif %}{{ text }}")


@dataclass(frozen=True)
class InstructBlipVision:
    queried: QueriedTower
    image_token: str
    resolution: FixedSquare
    video: SingleFrames

    marker = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    template = TEMPLATE
    before_bos = True
    tasks = TASKS

    @property
    def unused(self) -> tuple[str, ...]:
        return self.queried.unused

    @property
    def instruction(self) -> Instruction:
        qformer = self.queried.qformer
        return Instruction("qformer_tokenizer", qformer.words, qformer.positions)

    def parameters(self) -> Mapping[str, Parameter]:
        return self.queried.parameters()

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> features [B, 1 + P, C]"""
        return self.queried.tower.features(tiles, Weights(weights, tiles.dtype), attention)

    def instructed(
        self, features: Node, ids: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, features.dtype)
        return self.queried.embeddings(features, w, attention, ids)


def read(top: Settings, image: Settings) -> InstructBlipVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    token = TOKENS[top.choice("model_type", TOKENS, "instructblip")]
    queried, frames = read_queried(top, image, reads_text=True), image.part("video_processor")
    square = read_square(frames, queried)
    video = SingleFrames(
        how=Stretched(square.side, queried.queries),
        normalize=fused(read_normalize(frames, CLIP_MEAN, CLIP_STD)),
        resample=read_resample(frames, 3, MODES),
        rule=FrameRule(Beginnings(frames.count("num_frames", FRAMES))),
        markers=("<video>",),
        token=token,
        write=Run(token),
    )
    return InstructBlipVision(queried, token, read_square(image, queried), video)
