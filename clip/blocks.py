"""The pieces that vision families are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

ACTIVATIONS = {
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu": "none",
    "quick_gelu": "quick",
}
# Names that transformers has for turning half of a head by row and half by column
AXIAL = ("axial", "default")
GGUF_IMAGE_SIZE = 560  # for towers of any size, where the number says nothing
FRAMES_WEIGHT = "v.patch_embd.frames.weight"


@dataclass(frozen=True)
class VitParams:
    """A plain vision transformer: layers L, width C, FFN width F, heads H."""

    layers: int
    width: int
    ffn: int
    heads: int
    eps: float
    gelu: str  # "tanh", "none" (the exact one) or "quick"

    @property
    def head(self) -> int:
        return self.width // self.heads


def read_vit(
    vision: Settings, *, layers: int, width: int, ffn: int, heads: int, act: str, eps: float = 1e-6
) -> VitParams:
    """Read it from a vision_config with transformers' usual keys; the numbers are the family's
    defaults.
    """
    vit = VitParams(
        layers=vision.count("num_hidden_layers", layers, maximum=MAX_LAYERS),
        width=vision.count("hidden_size", width, maximum=MAX_WIDTH),
        ffn=vision.count("intermediate_size", ffn, maximum=MAX_WIDTH),
        heads=vision.count("num_attention_heads", heads, maximum=MAX_HEADS),
        eps=vision.number("layer_norm_eps", eps),
        gelu=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, act)],
    )
    if vit.width % vit.heads:
        raise ModelError(
            f"{vision.where}: {vit.heads} heads of width {vit.width}; expected heads that "
            "divide the width"
        )
    return vit


def gguf_size(shapes: Mapping[str, Shape], name: str, axis: int = 0) -> int | None:
    """Return one of a tensor's sizes in a GGUF, None where it has no such."""
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None


def gguf_vit(keys: Settings) -> dict[str, object]:
    """Return what a vision_config says of a plain vision transformer, from the `clip.` keys of a
    GGUF.
    """
    act = (
        "gelu_pytorch_tanh"
        if keys.flag("use_gelu", False)
        else "silu"
        if keys.flag("use_silu", False)
        else "quick_gelu"
    )
    same = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    return {
        "hidden_act": act,
        **{ours: keys.get(f"vision.{theirs}", None) for ours, theirs in same.items()},
    }


@dataclass(frozen=True)
class GgufTower:
    """An encoder as GGUF describes it: clip.projector_type, "" where there is none, and the keys
    below clip; beside its parameters tensors that are rows of the decoder's table, by the token,
    and others, fp32; parameters that are F32 in every file.
    """

    projector: str
    keys: Mapping[str, Any]
    rows: Mapping[str, str] = field(default_factory=dict)
    unrounded: tuple[str, ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def tower_keys(
    tower: Any, *, image_size: int, patch: int, text_width: int, ffn: int | None = None
) -> dict[str, Any]:
    """Return the keys with which a GGUF says the sizes of a vision transformer, `VitParams` or
    what has the same fields; `ffn` where it has another name.
    """
    return {
        "vision.block_count": tower.layers,
        "vision.embedding_length": tower.width,
        "vision.feed_forward_length": tower.ffn if ffn is None else ffn,
        "vision.attention.head_count": tower.heads,
        "vision.attention.layer_norm_epsilon": getattr(tower, "eps", 1e-6),
        "vision.image_size": image_size,
        "vision.patch_size": patch,
        "vision.projection_dim": text_width,
    }


def split_heads(x: Node, heads: int, name: str) -> Node:
    """[B, P, H * K] -> [B, P, H, K]"""
    return ops.reshape(x, shape=(*x.shape[:2], heads, x.shape[2] // heads), name=f"{name}.heads")


def attend(
    q: Node,
    k: Node,
    v: Node,
    attention: AttentionForm,
    *,
    at: str,
    bounds: Node | None = None,
    scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    mask: Node | None = None,
) -> Node:
    """Attention of an image's patches to each other, or, `causal`, of a text's tokens to those
    before them; `mask` is added to the scores

    q, k [B, P, H, K], [B, S, H, K], v [B, S, H, V] -> [B, P, H * V]
    """
    limits: dict[str, Any] = {"causal": True} if causal else {}
    mixed = attention(
        q,
        k,
        v,
        mask,
        bounds,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap,
        name=f"{at}.attn",
        **limits,
    )
    return ops.reshape(mixed, shape=(*q.shape[:2], q.shape[2] * v.shape[3]), name=f"{at}.attn.flat")


def vit_block(
    x: Node,
    index: int,
    p: VitParams,
    w: Weights,
    *,
    attention: AttentionForm,
    blocks: str = "v.blk",
    bounds: Node | None = None,
    causal: bool = False,
    bias: bool = True,
    key_bias: bool = True,
    fused: bool = False,
    angles: Node | None = None,
) -> Node:
    """Pre-norm attention and MLP          x [B, P, C] -> [B, P, C]; arXiv:2010.11929

    `bias`: of queries, values and, with `key_bias`, keys. `fused`: queries, keys and values have
    one matrix. `angles` [P, 2, R]: the first 2 R dimensions of each head turn by them.
    """
    at = f"{blocks}.{index}"
    y = w.layer_norm(x, f"{at}.ln1", p.eps)
    q, k, v = (
        split_heads(part, p.heads, part.name)
        for part in _projections(y, at, w, fused=fused, bias=bias, key_bias=key_bias)
    )
    if angles is not None:
        q, k = (ops.rope(part, angles, name=f"{part.name}.rope") for part in (q, k))
    x = ops.add(
        w.linear(
            attend(q, k, v, attention, at=at, bounds=bounds, causal=causal),
            f"{at}.attn_out",
            bias=True,
        ),
        x,
        name=f"{at}.attn_residual",
    )
    return ops.add(
        mlp(w.layer_norm(x, f"{at}.ln2", p.eps), at, p.gelu, w), x, name=f"{at}.ffn_residual"
    )


def plain_vit(
    tiles: Node,
    positions: Node,
    p: VitParams,
    w: Weights,
    attention: AttentionForm,
    bounds: Node | None = None,
) -> Node:
    """Patches with a learned position each, blocks, and a norm: SigLIP (arXiv:2303.15343)

    tiles [B, 3, Y, X], positions [P, C] -> [B, P, C]
    """
    patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
    x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
    return encoded_patches(x, positions, p, w, attention, bounds)


def encoded_patches(
    x: Node,
    positions: Node,
    p: VitParams,
    w: Weights,
    attention: AttentionForm,
    bounds: Node | None = None,
) -> Node:
    """Encode patches that are embedded, as `plain_vit` does          x [B, P, C] -> [B, P, C]"""
    x = ops.add(x, positions, name="v.position_embd")
    for index in w.layers(p.layers):
        x = vit_block(x, index, p, w, attention=attention, bounds=bounds)
    return w.layer_norm(x, "v.post_ln", p.eps)


def plain_vit_parameters(
    p: VitParams, patch: int, positions: int, source: Callable[[str], tuple[str, ...]]
) -> dict[str, Parameter]:
    """The parameters of `plain_vit`, with a table of so many positions."""
    ends = {
        "v.patch_embd": ("embeddings.patch_embedding", (p.width, 3, patch, patch)),
        "v.post_ln": ("post_layernorm", (p.width,)),
    }
    table = Parameter((positions, p.width), source("embeddings.position_embedding.weight"))
    return {
        **vit_parameters(p, source),
        **biased_parameters(ends, source),
        "v.position_embd.weight": table,
    }


def linear_patches(
    width: int, patch: int, source: Callable[[str], tuple[str, ...]]
) -> dict[str, Parameter]:
    """The kernels of a patch embedding that checkpoints have as a linear layer over a patch's
    pixels, channels last, and its bias.
    """
    name = "embeddings.patch_embedding"
    return {
        "v.patch_embd.weight": Parameter(
            (width, 3, patch, patch),
            source(f"{name}.weight"),
            (width, patch * patch * 3),
            lambda w: w.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2),
        ),
        "v.patch_embd.bias": Parameter((width,), source(f"{name}.bias")),
    }


def bucketed_positions(grid: tuple[int, int], positions: int, w: Weights) -> Node:
    """The rows of a tower's table that the patches of a tile take          -> [P, C]"""
    return table_rows(position_buckets(grid, positions), w)


def table_rows(rows: torch.Tensor, w: Weights) -> Node:
    """Rows of a tower's table, int64 [P]          -> [P, C]"""
    at = graph_input("inp.position_rows", tuple(rows.shape), rows.dtype, lambda _: rows)
    return ops.take_rows(w.tensor("v.position_embd.weight"), at, name="v.position_rows")


def position_buckets(grid: tuple[int, int], positions: int) -> torch.Tensor:
    """Return which row of a table, `positions` on a side, each patch of rows x columns takes,
    int64 [P] (arXiv:2307.06304), as Idefics computes it.
    """
    steps = ((torch.arange(side, dtype=torch.float32), 1.0 / torch.tensor(side)) for side in grid)
    row, column = ((at * step).clamp(max=1.0 - 1e-6) for at, step in steps)
    return buckets(row, column, positions)


def buckets(rows: torch.Tensor, columns: torch.Tensor, positions: int) -> torch.Tensor:
    """Return which row of a table, `positions` on a side, patches take whose rows and columns lie
    at these fractions of a picture, int64 [P].

    The references put fractions into buckets in fp32; one that falls just below its own bound
    shares its neighbour's row. How each of them rounds the fractions decides which do.
    """
    bounds = torch.arange(1 / positions, 1.0, 1 / positions)
    row, column = (torch.bucketize(at, bounds, right=True) for at in (rows, columns))
    return (row[:, None] * positions + column).flatten()


def position_sines(rows: int, columns: int, width: int) -> torch.Tensor:
    """Sines and cosines of each patch's column, then of its row, fp32 [P, width]; a quarter of the
    width each (arXiv:2111.06377, section A.1).
    """
    quarter = width // 4
    frequencies = 1 / 10000 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    column, row = (
        (torch.arange(side, dtype=torch.float32)[:, None] * frequencies) for side in (columns, rows)
    )
    column, row = (torch.cat((angle.sin(), angle.cos()), 1) for angle in (column, row))
    both = (column.expand(rows, -1, -1), row[:, None].expand(-1, columns, -1))
    return torch.cat(both, 2).view(rows * columns, width)


def learned_queries(
    name: str, batch: int, w: Weights, times: int = 1, first: int | None = None
) -> Node:
    """The rows of a table [N, D], or the `first` ones, once for each tile, or so many times
    -> [B, N, D]
    """
    table = w.tensor(name)
    rows_each = table.shape[0] if first is None else first
    count, width = rows_each * times, table.shape[1]
    at = torch.arange(rows_each).repeat(batch * times)
    rows = graph_input("inp.queries", tuple(at.shape), at.dtype, lambda _: at)
    return ops.reshape(
        ops.take_rows(table, rows, name=f"{name}.rows"),
        shape=(batch, count, width),
        name=f"{name}.tiles",
    )


def swiglu(x: Node, at: str, w: Weights) -> Node:
    """The gated feed-forward layer of arXiv:2002.05202, without biases"""
    gate, up = (w.linear(x, f"{at}.ffn_{part}") for part in ("gate", "up"))
    return w.linear(ops.silu_mul(gate, up, name=f"{at}.ffn_gated"), f"{at}.ffn_down")


def _projections(
    x: Node,
    at: str,
    w: Weights,
    *,
    fused: bool,
    bias: bool,
    key_bias: bool = True,
    kv: int | None = None,
) -> list[Node]:
    """Queries [B, P, C], keys and values, [B, P, C] or, where they have `kv` numbers, [B, P, kv]"""
    names = [f"{at}.attn_{part}" for part in "qkv"]
    if not fused:
        biases = (bias, bias and key_bias, bias)
        return [w.linear(x, name, bias=b) for name, b in zip(names, biases, strict=True)]
    qkv, start, parts = w.linear(x, f"{at}.attn_qkv", bias=bias), 0, []
    kv = x.shape[2] if kv is None else kv
    for name, width in zip(names, (x.shape[2], kv, kv), strict=True):
        parts.append(ops.columns(qkv, start=start, stop=start + width, name=name))
        start += width
    return parts


def mlp(x: Node, at: str, gelu: str, w: Weights) -> Node:
    """down(gelu(up(x))), with biases"""
    y = ops.gelu(w.linear(x, f"{at}.ffn_up", bias=True), approximate=gelu, name=f"{at}.ffn_gelu")
    return w.linear(y, f"{at}.ffn_down", bias=True)


def vit_parameters(
    p: VitParams, source: Callable[[str], tuple[str, ...]], blocks: str = "v.blk"
) -> dict[str, Parameter]:
    """The blocks' parameters; `source("encoder.layers.0.mlp.fc1.weight")` lists the names it may
    have in a checkpoint.
    """
    names = {
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    shapes = {
        "ln1": (p.width,),
        "ln2": (p.width,),
        "ffn_up": (p.ffn, p.width),
        "ffn_down": (p.width, p.ffn),
    }
    turned = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    parameters: dict[str, Parameter] = {}
    for index in range(p.layers):
        for part, name in names.items():
            shape = shapes.get(part, (p.width, p.width))
            for kind, stored in (("weight", shape), ("bias", shape[:1])):
                # The first GGUF files call the way up `ffn_down` and the way down `ffn_up`: the
                # shapes tell.
                cached = tuple(
                    Stored((f"{blocks}.{index}.{at}.{kind}",), stored)
                    for at in (part, turned.get(part, part))
                )
                parameters[f"{blocks}.{index}.{part}.{kind}"] = Parameter(
                    stored,
                    source(f"encoder.layers.{index}.{name}.{kind}"),
                    gguf=cached if part in turned else (),
                )
    return parameters


def tower_names(name: str, module: str = "vision_tower") -> tuple[str, ...]:
    """Return what a tensor of the tower is called in published checkpoints, and in those that
    transformers 5 saves.
    """
    return checkpoint_names(f"{module}.vision_model.{name}") + checkpoint_names(f"{module}.{name}")


def checkpoint_names(name: str) -> tuple[str, ...]:
    return name, f"model.{name}"


def read_grid_rotary(vision: Settings, width: int, heads: int) -> Rotary:
    """Half of a head's pairs turn by a patch's row, half by its column, at the same frequencies;
    arXiv:2409.12191. Raises ModelError for heads that cannot be halved so.
    """
    if width % heads or width // heads % 4:
        raise ModelError(
            f"{vision.where}: {heads} heads of width {width}; expected heads that divide the "
            "width, each of a multiple of 4"
        )
    rope = vision.part("rope_parameters")
    rope.choice("rope_type", AXIAL, "axial")
    half = rotary(rope.number("rope_theta", 1e4), width // heads // 2).frequencies
    return Rotary(half * 2, (0,) * len(half) + (1,) * len(half))


def rotary_attention(
    x: Node,
    at: str,
    w: Weights,
    attention: AttentionForm,
    *,
    heads: int,
    angles: Node,
    groups: int | None = None,
    bounds: Node | None = None,
    fused: bool = False,
    bias: bool = True,
    out_bias: bool = True,
    norm_eps: float | None = None,
    pairs: str = "half",
) -> Node:
    """Attention with rotary positions          x [B, P, C], angles [P, 2, K / 2] -> [B, P, C]

    `groups` of heads share keys and values, as many as there are heads unless said otherwise.
    `fused`: queries, keys and values have one matrix. `bias` is theirs, `out_bias` the output's.
    `norm_eps`: each head's queries and keys are normed before they turn. `pairs` as `rope` has
    them.
    """
    groups = groups or heads
    parts = _projections(x, at, w, fused=fused, bias=bias, kv=x.shape[2] // heads * groups)
    counts = (heads, groups, groups)
    q, k, v = (split_heads(part, n, part.name) for part, n in zip(parts, counts, strict=True))
    if norm_eps is not None:
        q = w.rms_norm(q, f"{at}.attn_q_norm", norm_eps)
        k = w.rms_norm(k, f"{at}.attn_k_norm", norm_eps)
    q, k = (ops.rope(part, angles, pairs=pairs, name=f"{part.name}.rope") for part in (q, k))
    return w.linear(
        attend(q, k, v, attention, at=at, bounds=bounds), f"{at}.attn_out", bias=out_bias
    )


def biased_parameters(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], source: Callable[[str], tuple[str, ...]]
) -> dict[str, Parameter]:
    """.weight and .bias of linear layers and layer norms: canonical name -> (the checkpoint's,
    shape of the weight)
    """
    return {
        f"{name}.{kind}": Parameter(
            shape if kind == "weight" else shape[:1], source(f"{theirs}.{kind}")
        )
        for name, (theirs, shape) in tensors.items()
        for kind in ("weight", "bias")
    }


def third(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that picks queries (0), keys (1) or values (2) of a tensor of all."""
    return lambda fused: fused.chunk(3)[index]


def qkv_parameters(
    at: str, width: int, theirs: str, source: Callable[[str], tuple[str, ...]]
) -> dict[str, Parameter]:
    """Queries, keys and values, which a checkpoint holds in one, `theirs`, whose name ends in qkv,
    or in three whose names end in q, k and v.
    """

    shapes: dict[str, tuple[int, ...]] = {"weight": (width, width), "bias": (width,)}
    return {
        f"{at}.attn_{part}.{kind}": Parameter(
            shape,
            source(f"{theirs}.{kind}"),
            (3 * width, *shape[1:]),
            third(index),
            others=tuple(
                Stored((name,), shape)
                for name in source(f"{theirs.removesuffix('qkv')}{part}.{kind}")
            ),
        )
        for index, part in enumerate("qkv")
        for kind, shape in shapes.items()
    }


def two_frames(width: int, patch: int, sources: tuple[str, ...]) -> dict[str, Parameter]:
    """The kernels of a patch embedding of two frames: as one, for a still picture is both frames,
    and side by side, the first frame's channels before the second's.
    """
    one, both = (width, 3, patch, patch), (width, 6, patch, patch)
    names = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    summed = Stored(names, one, lambda a, b: a.float() + b.float())
    alongside = Stored(
        names, one, lambda a, b: torch.cat((a, b), 1), invert=lambda kernels: kernels.chunk(2, 1)
    )
    stored = (width, 3, 2, patch, patch)
    return {
        "v.patch_embd.weight": Parameter(
            shape=one,
            sources=sources,
            stored=stored,
            convert=lambda w: w.float().sum(2),
            gguf=(summed,),
        ),
        FRAMES_WEIGHT: Parameter(
            shape=both,
            sources=sources,
            stored=stored,
            convert=lambda w: w.transpose(1, 2).flatten(1, 2),
            gguf=(alongside,),
        ),
    }


def frames_kernel(tiles: Node, w: Weights) -> Node:
    """The kernel of a patch embedding for tiles of a picture [B, 3, Y, X], or of two frames
    [B, 6, Y, X].
    """
    return w.tensor("v.patch_embd.weight" if tiles.shape[1] == 3 else FRAMES_WEIGHT)
