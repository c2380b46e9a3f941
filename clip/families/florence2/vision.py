"""Florence-2 (arXiv:2311.06242): DaViT over a picture stretched to a square, and an encoder that
reads its features with the prompt, to whose states a decoder attends. A prompt is one of the
authors' tasks, or a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError, PromptError
from mtmd.clip.families.florence2.davit import EPS, DavitParams, read_davit
from mtmd.clip.families.florence2.encoder import BartEncoder, read_encoder
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.instructed import Instruction
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.start_token import spelled_token, start_token
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

SIDE = 768  # pixels, where the image processor does not say
MAX_SIDE = 4096
MAX_POSITIONS = 4096  # rows or columns, and frames
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DESCRIBE = "Describe the image."
TASKS = {
    "text": "<OCR>",
    "layout": "<OCR_WITH_REGION>",
    "caption": "<DETAILED_CAPTION>",
    "short-caption": "<CAPTION>",
    "long-caption": "<MORE_DETAILED_CAPTION>",
    "objects": "<OD>",
}
# The authors' prompts, those that stand alone and those that take words or a region
ALONE = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
WITH_WORDS = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}
# Tokens of places, which prompts may have, too, and what stands between places in answers
LOCATION = re.compile(r"(<loc_\d{1,3}>)")
SHOWN = re.compile(r"<loc_\d{1,3}>|</?poly>|<sep>|<and>")
TURN = "\x1e"  # between turns, of which the last one is asked: each task was trained alone
TEMPLATE = pictures_first("{% if not loop.first %}" + TURN + "{% endif %}{{ text }}")


@dataclass(frozen=True)
class Florence2Vision:
    """`image_token` begins the answer, and `begins` follows it. `positions`: rows and columns that
    have a learned position; `frames`: pictures of a video, of which the first is read.
    """

    tower: DavitParams
    encoder: BartEncoder
    positions: int
    frames: int
    image_token: str
    begins: str
    resolution: FixedSquare

    marker = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    pictures = 1
    bare_prompt = True
    begin_key = "decoder_start_token_id"
    template = TEMPLATE
    tasks = TASKS
    shown_tokens = SHOWN
    unused = (
        r"(model\.)?language_model\.(model\.)?(encoder|decoder)\.embed_tokens\.weight",
        r"(language_model\.)?final_logits_bias",
    )

    @property
    def width(self) -> int:
        """Return how many numbers a cell of the last stage has."""
        return self.tower.stages[-1].width

    @property
    def grid(self) -> tuple[int, int]:
        return self.tower.stages[-1].grid

    @property
    def rows(self) -> int:
        """Return how many features a picture has, the mean of all first."""
        return 1 + self.grid[0] * self.grid[1]

    @property
    def instruction(self) -> Instruction:
        room = self.encoder.positions - self.rows
        return Instruction("", self.encoder.words, room, written=LOCATION, in_place=self.begins)

    def real_rows(self, plan: ImagePlan) -> int:  # noqa: ARG002
        return self.rows

    def parameters(self) -> Mapping[str, Parameter]:
        c, d = self.width, self.encoder.width
        projector = "multi_modal_projector"
        half = c // 2
        return {
            **self.tower.parameters(),
            **self.encoder.parameters(),
            "mm.input_projection.weight": Parameter(
                (d, c),
                (f"model.{projector}.image_projection.weight",),
                others=(Stored(("image_projection",), (c, d), lambda w: w.t().contiguous()),),
            ),
            **{
                f"mm.norm.{kind}": Parameter(
                    (d,), (f"model.{projector}.image_proj_norm.{kind}", f"image_proj_norm.{kind}")
                )
                for kind in ("weight", "bias")
            },
            **{
                f"mm.{axis}_embd.weight": Parameter(
                    (self.positions, size),
                    (
                        f"model.{projector}.image_position_embed.{axis}_embeddings.weight",
                        f"image_pos_embed.{axis}_embeddings.weight",
                    ),
                )
                for axis, size in (("row", half), ("column", c - half))
            },
            "mm.first_frame": Parameter(
                (c,),
                (
                    f"model.{projector}.visual_temporal_embed.pos_idx_to_embed",
                    "visual_temporal_embed.pos_idx_to_embed",
                ),
                (self.frames, c),
                lambda frames: frames[0],
            ),
        }

    def prompt(self, plan: ImagePlan) -> str:  # noqa: ARG002
        return self.image_token

    def rewritten(self, text: str) -> str:
        """Return the last turn's prompt, with a task in its authors' words. Raises PromptError if
        there is no picture, and for a task with words that it does not take.
        """
        token = self.image_token
        if token not in text:
            raise PromptError("this model looks at a picture, found none; send one")
        # A system text can stand before the picture.
        words = text.replace(token, "").rpartition(TURN)[2]
        stated = words.strip()
        if stated == DESCRIBE:
            stated = words = TASKS["caption"]
        for task, prompt in ALONE.items():
            if task in stated and stated != task:
                raise PromptError(
                    f"{task} stands alone in a prompt, found {stated!r:.40}; leave the words out"
                )
            if stated == task:
                words = prompt
        for task, prompt in WITH_WORDS.items():
            if task in stated:
                words = prompt.format(stated.replace(task, "").strip())
                break
        return token + words

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> features [B, 1 + P, D]"""
        w = Weights(weights, tiles.dtype)
        x = ops.add(self.tower.graph(tiles, w, attention), self._positions(w), name="mm.placed")
        x = ops.add(x, w.tensor("mm.first_frame"), name="mm.framed")
        mean = ops.pool2d(x, grid=self.grid, size=(1, 1), name="mm.mean")
        x = ops.concat(mean, x, axis=1, name="mm.features")
        return w.layer_norm(w.linear(x, "mm.input_projection"), "mm.norm", EPS)

    def _positions(self, w: Weights) -> Node:
        """Learned positions of all cells          -> [P, C], those of columns first"""
        rows, columns = self.grid

        def taken(axis: str, at: torch.Tensor) -> Node:
            numbers = graph_input(f"inp.{axis}s", (len(at),), torch.int64, lambda _: at)
            return ops.take_rows(w.tensor(f"mm.{axis}_embd.weight"), numbers, name=f"mm.{axis}s")

        parts = (
            taken("column", torch.arange(columns).repeat(rows)),
            taken("row", torch.arange(rows).repeat_interleave(columns)),
        )
        return ops.concat(*parts, axis=1, name="mm.positions")

    def instructed(
        self, features: Node, ids: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        return self.encoder.graph(features, ids, Weights(weights, features.dtype), attention)


def read(top: Settings, image: Settings) -> Florence2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults or
    as the authors have them; ModelError where a value cannot be followed.
    """
    vision, text, tokens = top.part("vision_config"), top.part("text_config"), image.part("tokens")
    usual = {"size": {"height": SIDE, "width": SIDE}}
    size = Settings({**usual, **image.values}, image.where).part("size")
    side = size.count("height", maximum=MAX_SIDE)
    tower, encoder = read_davit(vision, side), read_encoder(text)
    width = tower.stages[-1].width
    positions = vision.part("image_pos_embed").get("max_pos_embeddings", None)
    positions = vision.get("max_position_embeddings", 50 if positions is None else positions)
    positions = Settings({"max_position_embeddings": positions}, vision.where).count(
        "max_position_embeddings", maximum=MAX_POSITIONS
    )
    frames = vision.part("visual_temporal_embedding").get("max_temporal_embeddings", 100)
    frames = Settings({"max_temporal_embeddings": frames, **vision.values}, vision.where).count(
        "max_temporal_embeddings", 100, maximum=MAX_POSITIONS
    )
    rows, columns = tower.stages[-1].grid
    if max(rows, columns) > positions or width < 2:
        raise ModelError(
            f"{vision.where}: {rows} x {columns} cells, for which there are {positions} positions "
            f"(max_position_embeddings) of {width} numbers"
        )
    if (projected := vision.count("projection_dim", 1024, maximum=MAX_WIDTH)) != encoder.width:
        raise ModelError(
            f"{vision.where}: projection_dim is {projected}, expected {encoder.width}, the d_model "
            "of text_config"
        )
    if encoder.positions < rows * columns + 2:
        raise ModelError(
            f"{text.where}: max_position_embeddings is {encoder.positions}, too few for a picture "
            f"of {rows * columns + 1} features and a prompt"
        )
    square = read_fixed_square(
        Settings({**usual, **image.values}, image.where),
        side,
        1,
        read_normalize(image, MEAN, STD),
        crops=False,
        ground=None,
    )
    forced = text.token_id("forced_bos_token_id", text.token_id("bos_token_id", 0))
    begins = spelled_token(forced, text, tokens)
    if not begins:
        raise ModelError(
            f"{text.where}: forced_bos_token_id is {forced}, a token that {tokens.where} does not "
            "name; expected it in added_tokens_decoder"
        )
    return Florence2Vision(
        tower, encoder, positions, frames, start_token(text, text, tokens)[1], begins, square
    )
