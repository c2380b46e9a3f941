"""TrOCR (arXiv:2109.10282): a plain vision transformer over one line of text, stretched to a
square, to whose states a decoder attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import PromptError
from mtmd.clip.blocks import VitParams, biased_parameters, read_vit, vit_block, vit_parameters
from mtmd.clip.families.encoder_decoder.words import FIRST, square_sizes, usual_words
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.start_token import start_token
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

DESCRIBE = "Describe the image."
TASKS = {"text": ""}
TEMPLATE = pictures_first("{{ text }}")
# Names within a layer: ours, those of published checkpoints, and those that transformers 5 saves
LAYER = {
    "layer_norm1": ("layernorm_before", "layernorm_before"),
    "layer_norm2": ("layernorm_after", "layernorm_after"),
    "self_attn.q_proj": ("attention.attention.query", "attention.q_proj"),
    "self_attn.k_proj": ("attention.attention.key", "attention.k_proj"),
    "self_attn.v_proj": ("attention.attention.value", "attention.v_proj"),
    "self_attn.out_proj": ("attention.output.dense", "attention.o_proj"),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}


__all__ = ["TrOcrVision", "read", "usual_words"]


@dataclass(frozen=True)
class TrOcrVision:
    """`first`: the tokens before those of patches, by their names in checkpoints. `projected`:
    whether a matrix brings the states to the decoder's width. `image_token` begins the answer.
    """

    vit: VitParams
    first: tuple[str, ...]
    biases: bool
    patch: int
    projected: bool
    text_width: int
    image_token: str
    resolution: FixedSquare

    marker = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    pictures = 1
    bare_prompt = True
    template = TEMPLATE
    tasks = TASKS
    unused = (r"encoder\.pooler\..*",)

    @property
    def rows(self) -> int:
        return len(self.first) + (self.resolution.side // self.patch) ** 2

    def real_rows(self, plan: ImagePlan) -> int:  # noqa: ARG002
        return self.rows

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch = self.vit.width, self.patch
        parameters = vit_parameters(self.vit, _layer_names)
        if not self.biases:
            for index in range(self.vit.layers):
                for part in "qkv":
                    del parameters[f"v.blk.{index}.attn_{part}.bias"]
        patches = "embeddings.patch_embeddings.projection"
        ends = {
            "v.patch_embd": (patches, (width, 3, patch, patch)),
            "v.post_ln": ("layernorm", (width,)),
        }
        for name in self.first:
            parameters[f"v.{name}"] = Parameter(
                (width,), _names(f"embeddings.{name}"), (1, 1, width), lambda w: w[0, 0]
            )
        parameters["v.position_embd.weight"] = Parameter(
            (self.rows, width),
            _names("embeddings.position_embeddings"),
            (1, self.rows, width),
            lambda w: w[0],
        )
        projection = {"mm.input_projection": ("enc_to_dec_proj", (self.text_width, width))}
        return {
            **parameters,
            **biased_parameters(ends, _names),
            **(biased_parameters(projection, lambda name: (name,)) if self.projected else {}),
        }

    def prompt(self, plan: ImagePlan) -> str:  # noqa: ARG002
        return self.image_token

    def rewritten(self, text: str) -> str:
        """Return the prompt without the words that ask for a description. Raises PromptError for
        others, and where there is no picture.
        """
        words = text.replace(self.image_token, "").strip()
        if words not in ("", DESCRIBE):
            raise PromptError(
                f"this model reads the text of a picture and takes no words, found {words!r:.40}; "
                "send the picture alone"
            )
        if self.image_token not in text:
            raise PromptError("this model reads the text of a picture, found none; send one")
        return self.image_token

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> states [B, R, C]"""
        w = Weights(weights, tiles.dtype)
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        for name in reversed(self.first):
            x = ops.prepend(x, w.tensor(f"v.{name}"), name=f"v.{name}.first")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, bias=self.biases)
        x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        return w.linear(x, "mm.input_projection", bias=True) if self.projected else x


def _names(name: str) -> tuple[str, ...]:
    return (f"encoder.{name}",)


def _layer_names(name: str) -> tuple[str, ...]:
    _, _, index, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    published, saved = LAYER[part]
    return (
        f"encoder.encoder.layer.{index}.{published}.{kind}",
        f"encoder.layers.{index}.{saved}.{kind}",
    )


def read(top: Settings, image: Settings) -> TrOcrVision:
    """Read it from config.json in `usual_words` and the image processor's settings, with
    transformers' defaults; ModelError where a value cannot be followed.
    """
    vision, text = top.part("vision_config"), top.part("text_config")
    vision.choice("num_channels", (3,), 3)
    side, patch = square_sizes(vision)
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu", eps=1e-12)
    width = text.count("d_model", 1024, maximum=MAX_WIDTH)
    reads = text.get("cross_attention_hidden_size", None)
    return TrOcrVision(
        vit=vit,
        first=FIRST[vision.choice("model_type", FIRST, "vit")],
        biases=vision.flag("qkv_bias", True),
        patch=patch,
        projected=vit.width != width and reads is None,
        text_width=width,
        image_token=start_token(top, text, image.part("tokens"))[1],
        resolution=_square(image, side),
    )


def _square(image: Settings, side: int) -> FixedSquare:
    """The whole picture, stretched: of older settings the size is one number."""
    size = image.get("size", side)
    size = {"height": size, "width": size} if type(size) is int else size
    image = Settings({"resample": 2, **image.values, "size": size}, image.where)
    return read_fixed_square(image, side, 1, read_normalize(image), crops=False, ground=None)
