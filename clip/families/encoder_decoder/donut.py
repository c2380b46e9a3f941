"""Donut (arXiv:2111.15664): Swin over a page, to whose states a decoder attends. Which task it was
trained for is said by the token that begins an answer, which is written in tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError, PromptError
from mtmd.clip.families.encoder_decoder.swin import SwinParams, read_swin
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sheet import Sheet, read_sheet
from mtmd.clip.start_token import added_spellings, start_token
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# Tokens with which the answers of published models begin, where config.json does not say
STARTS = ("docvqa", "cord-v2", "cord", "rvlcdip", "zhtrainticket", "synthdog")
QUESTION, ANSWER = "<s_question>", "<s_answer>"
# Special tokens that are text of answers: values, and, but for questions, the fields around them
VALUES, TAGS = re.compile(r"<[\w-]+/>"), re.compile(r"</?s_[^<>]*>|<[\w-]+/>")
DESCRIBE = "Describe the image."
TEMPLATE = {
    QUESTION: pictures_first(QUESTION + "{{ text }}</s_question>" + ANSWER),
    "": pictures_first("{{ text }}"),
}


@dataclass(frozen=True)
class DonutVision:
    """`questions`: whether it answers questions, which stand in tags. `image_token` begins the
    answer.
    """

    swin: SwinParams
    questions: bool
    image_token: str
    resolution: Sheet

    marker = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    pictures = 1
    bare_prompt = True
    template = TEMPLATE
    unused = (
        r"encoder\..*\.relative_position_index",
        r"encoder\.(pooler|layernorm)\..*",
        r"decoder\.final_logits_bias",
    )

    @property
    def shown_tokens(self) -> re.Pattern[str]:
        return VALUES if self.questions else TAGS

    def real_rows(self, plan: ImagePlan) -> int:  # noqa: ARG002
        rows, columns = self.swin.grids[-1]
        return rows * columns

    def parameters(self) -> Mapping[str, Parameter]:
        return self.swin.parameters(lambda name: (f"encoder.{name}",))

    def prompt(self, plan: ImagePlan) -> str:  # noqa: ARG002
        return self.image_token

    def rewritten(self, text: str) -> str:
        """Return the prompt with the last of its questions, as each was trained alone, and without
        words where the model takes none. Raises PromptError for words then, and where there is no
        picture.
        """
        token = self.image_token
        words = text.replace(token, "")  # a system text can stand before the picture
        if token not in text:
            raise PromptError("this model reads a page, found no picture; send one")
        if self.questions:
            return token + QUESTION + words.rpartition(QUESTION)[2]
        if words.strip() not in ("", DESCRIBE):
            raise PromptError(
                f"this model reads a page and takes no words, found {words.strip()!r:.40}; send "
                "the picture alone"
            )
        return token

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> states [B, P, C]"""
        return self.swin.graph(tiles, Weights(weights, tiles.dtype), attention)


def read(top: Settings, image: Settings) -> DonutVision:
    """Read it from config.json in `usual_words` and the image processor's settings, with
    transformers' defaults; ModelError where a value cannot be followed.
    """
    vision, tokens = top.part("vision_config"), image.part("tokens")
    swin = read_swin(vision)
    height, width = (cells * swin.patch for cells in swin.grids[0])
    known = set(added_spellings(tokens).values())
    questions = {QUESTION, ANSWER} <= known
    return DonutVision(
        swin, questions, _start(top, tokens, known), read_sheet(image, (width, height), 1)
    )


def _start(top: Settings, tokens: Settings, known: set[str]) -> str:
    """The token that begins an answer: the one that config.json says, or that of a published model
    among those that were added. Raises ModelError where it is neither.
    """
    if top.get("decoder_start_token_id", None) is not None:
        return start_token(top, top.part("text_config"), tokens)[1]
    for name in STARTS:
        if f"<s_{name}>" in known:
            return f"<s_{name}>"
    raise ModelError(
        f"{top.where}: decoder_start_token_id is not stated, and no token of a published model's "
        f"task was added to its vocabulary (<s_{STARTS[0]}>, <s_{STARTS[1]}>, ...); add the id of "
        "the token that begins its answers"
    )
