"""The parameters that decoders have in common: canonical names, and what checkpoints call them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.graph import Shape

Tensors = Mapping[str, tuple[str, Shape]]
"""Parts of a layer: canonical name -> (the checkpoint's, shape of the weight)."""
Source = Callable[[str], tuple[str, ...]]
"""The names that a tensor may have in a checkpoint, from that within the decoder."""
Convert = Callable[[Tensor], Tensor]

QKV = ("attn_q", "attn_k", "attn_v")
ATTENTION = (*QKV, "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
LM_HEAD = (
    *(
        f"{prefix}lm_head.weight"
        for prefix in ("", "language_model.", "model.", "thinker.", "llm.", "model.language_model.")
    ),
    "decoder.lm_head.weight",
    "text_decoder.lm_head.weight",
    "decoder.output_projection.weight",
)
# Of a tied table: a copy nobody needs
COPIED_HEAD = (
    r"((model\.)?(language_)?model\.|thinker\.|llm\.|(text_)?decoder\.)?"
    r"(lm_head|output_projection)\.weight"
)


def prefixed(prefixes: Iterable[str]) -> Source:
    """Names with each of the prefixes, the likeliest first."""
    return lambda name: tuple(prefix + name for prefix in prefixes)


def attention_tensors(width: int, heads: int, groups: int, head: int) -> Tensors:
    """Projections of grouped attention as most checkpoints name them: D, H, G and K."""
    return {
        "attn_q": ("self_attn.q_proj", (heads * head, width)),
        "attn_k": ("self_attn.k_proj", (groups * head, width)),
        "attn_v": ("self_attn.v_proj", (groups * head, width)),
        "attn_output": ("self_attn.o_proj", (width, heads * head)),
    }


def mlp_tensors(width: int, ffn: int) -> Tensors:
    """A gated feed-forward layer as most checkpoints name it: D and F."""
    return {
        "ffn_gate": ("mlp.gate_proj", (ffn, width)),
        "ffn_up": ("mlp.up_proj", (ffn, width)),
        "ffn_down": ("mlp.down_proj", (width, ffn)),
    }


def decoder_parameters(
    source: Source,
    layers: Sequence[Tensors],
    *,
    vocabulary: int,
    width: int,
    tied: bool,
    biased: Collection[str] = (),
    converts: Mapping[str, Convert] | None = None,
    norms: Convert | None = None,
) -> dict[str, Parameter]:
    """The token table, the last norm, the table of outputs where it is not `tied`, and each layer's
    `.weight`s, with `.bias`es of the parts `biased`. A tied table may be stored as either.

    `converts` order the rows of a part's weight and bias as ours, `norms` convert every norm's
    weight.
    """
    parameters = {
        "token_embd.weight": Parameter(
            (vocabulary, width), (*source("embed_tokens.weight"), *(LM_HEAD if tied else ()))
        ),
        "output_norm.weight": Parameter((width,), source("norm.weight"), convert=norms),
    }
    if not tied:
        parameters["output.weight"] = Parameter((vocabulary, width), LM_HEAD)
    for layer, tensors in enumerate(layers):
        for part, (theirs, shape) in tensors.items():
            at, name = f"blk.{layer}.{part}", f"layers.{layer}.{theirs}"
            convert = (converts or {}).get(part, norms if len(shape) == 1 else None)
            parameters[f"{at}.weight"] = Parameter(
                shape, source(f"{name}.weight"), convert=convert, picks_rows=len(shape) > 1
            )
            if part in biased:
                parameters[f"{at}.bias"] = Parameter(
                    shape[:1], source(f"{name}.bias"), convert=convert
                )
    return parameters
