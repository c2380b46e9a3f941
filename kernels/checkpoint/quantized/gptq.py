"""AWQ and GPTQ: `x.qweight` has integer codes in 32-bit words, `x.scales` a scale and `x.qzeros` a
zero point for each group of a row: scale (q - zero).

GPTQ (arXiv:2210.17323, as AutoGPTQ and GPTQModel write it): words hold codes that follow each other
along a row; zero points are stored less 1, in "gptq_v2" as they are, and so are AutoRound's but in
its form "auto_gptq". `x.g_idx` says which group a column belongs to. AWQ (arXiv:2306.00978,
AutoAWQ's "gemm"): words hold codes of 8 rows, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import SCALES, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import GROUP_MAX, Scheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # rows of the codes in a word, lowest bits first
_WORDS = (torch.int32,)


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of AWQ or GPTQ. Raises ModelError for one whose parts do not fit."""
    suffix = ".qweight"
    bases = sorted(n.removesuffix(suffix) for n in parts.names if n.endswith(suffix))
    if not bases:
        return
    group, awq = _group(scheme), _is_awq(scheme)
    for base in bases:
        name = f"{base}.weight"
        shape, _ = parts.expect(f"{base}.qweight", name, _WORDS)
        if len(shape) != 2 or not is_matrix(shape):
            raise ModelError(
                f"{parts.where}: tensor {base}.qweight has shape {list(shape)}, expected a matrix"
            )
        yield _awq(parts, base, group) if awq else _gptq(parts, base, group, scheme)


def _awq(parts: Parts, base: str, stated: int | None) -> Packed:
    name, (k, columns) = f"{base}.weight", parts.meta(f"{base}.qweight")[0]
    n = 8 * columns
    (groups, *_), _ = parts.expect(f"{base}.scales", name, SCALES)
    parts.expect(f"{base}.scales", name, SCALES, (groups, n))
    parts.expect(f"{base}.qzeros", name, _WORDS, (groups, columns))
    group = integers.group_size(parts, f"{base}.scales", k, groups, stated)
    layout = integers.layout(4, k, group)

    def open() -> Part:
        words, zeros = parts.read(f"{base}.qweight"), parts.read(f"{base}.qzeros")
        heads = integers.heads(parts.finite(f"{base}.scales").t(), _awq_rows(zeros))

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return _awq_rows(words[:, start // 8 : stop // 8]), heads[start:stop]

        return part

    names = tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))
    label = integers.label("AWQ", 4, layout, stated)
    return Packed(name, (n, k), layout, "AWQ", label, names, open, step=128)


def _awq_rows(words: Tensor) -> Tensor:
    """int32 [K, N / 8] -> codes, uint8 [N, K]."""
    # torch turns matrices fast whose rows lie one after another.
    packed = words.contiguous().view(torch.uint8).t().contiguous().unflatten(0, (-1, 4))
    rows = packed.new_empty(len(packed), 8, packed.shape[2])
    for byte in range(4):
        low, high = AWQ_ORDER[2 * byte : 2 * byte + 2]
        torch.bitwise_and(packed[:, byte], 15, out=rows[:, low])
        torch.bitwise_right_shift(packed[:, byte], 4, out=rows[:, high])
    codes: Tensor = rows.flatten(0, 1)
    return codes


def _gptq(parts: Parts, base: str, stated: int | None, scheme: Scheme) -> Packed:
    name, (rows, n) = f"{base}.weight", parts.meta(f"{base}.qweight")[0]
    (groups, *_), _ = parts.expect(f"{base}.scales", name, SCALES)
    parts.expect(f"{base}.scales", name, SCALES, (groups, n))
    shape, _ = parts.expect(f"{base}.qzeros", name, _WORDS)
    packed = {(groups, -(-n * bits // 32)): bits for bits in integers.BITS}
    if shape not in packed or rows % _words_of(packed[shape]):
        raise ModelError(
            f"{parts.where}: tensors {base}.qweight {[rows, n]} and {base}.qzeros {list(shape)} "
            f"are no codes of {' or '.join(map(str, integers.BITS))} bits; fetch the checkpoint "
            "again"
        )
    bits = packed[shape]
    k = rows * 32 // bits
    group = integers.group_size(parts, f"{base}.scales", k, groups, stated)
    order = integers.group_order(parts, f"{base}.g_idx", k, group)
    layout = integers.layout(bits, k, group, order)
    less = _less(scheme)
    names = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]

    def open() -> Part:
        words, scales = parts.read(f"{base}.qweight"), parts.finite(f"{base}.scales").t()
        zeros = integers.unpack(parts.read(f"{base}.qzeros"), bits)[:, :n].t()
        heads = integers.heads(scales, zeros.to(torch.int32) + less)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            turned = words[:, start:stop].contiguous().t().contiguous()  # fast, of whole rows
            return integers.unpack(turned, bits), heads[start:stop]

        return part

    label = integers.label("GPTQ", bits, layout, stated)
    parts_there = tuple(part for part in names if part in parts)
    return Packed(name, (n, k), layout, "GPTQ", label, parts_there, open)


def _words_of(bits: int) -> int:
    """Words after which codes begin anew."""
    return bits if 32 % bits else 1


def _group(scheme: Scheme) -> int | None:
    """Values in a group, None for whole rows or where nothing is said. Raises ModelError."""
    value = scheme.settings.get("group_size", scheme.settings.get("q_group_size", None))
    if value is None or (type(value) is int and value == -1):
        return None
    if type(value) is not int or not 0 < value <= GROUP_MAX:
        raise ModelError(
            f"{scheme.settings.where}: group_size is {value!r:.40}, expected -1 or from 1 to "
            f"{GROUP_MAX}"
        )
    return value


def _less(scheme: Scheme) -> int:
    """Return what zero points are stored less: 1 or 0."""
    if _is_auto_round(scheme):
        form = str(scheme.settings.get("packing_format", "auto_round:auto_gptq"))
        return 1 if "gptq" in form and "gptqmodel" not in form else 0
    return 0 if scheme.settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1


def _is_auto_round(scheme: Scheme) -> bool:
    return scheme.method in ("auto-round", "auto_round")


def _is_awq(scheme: Scheme) -> bool:
    """Return whether codes lie as AWQ packs them. Raises ModelError for other packings."""
    settings = scheme.settings
    if _is_auto_round(scheme):
        return "awq" in str(settings.get("packing_format", ""))
    if scheme.method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(
                f"{settings.where}: weights are AWQ in version {version!r:.40}, expected gemm; use "
                "such a checkpoint, the original one, or a GGUF of it"
            )
        return True
    form = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{settings.where}: checkpoint_format is {form!r:.40}, expected gptq or gptq_v2; use "
            "such a checkpoint, the original one, or a GGUF of it"
        )
    return False
