"""Experts, for NVIDIA and AMD GPUs: the `moe` op in four or five launches, for which nothing has to
be known on the host (arXiv:2101.03961).

1. `route_kernel`: each token's experts and their weights.
2. `order_kernel`: choices (a token and one of its experts) in the order of experts, and where each
   expert's begin. One program for each expert counts those before its own, then writes its own.
3. `gated_kernel`: act(gate x) * (up x) for each choice. A program has up to ROWS choices of one
   expert by COLUMNS values. As in `paged_attention`, expert e begins with block
   starts[e] / ROWS + e, and a program finds its expert by binary search.
4. `down_kernel`: what comes of that, times the choice's weight, in fp32, at the choice's place.
5. `sum_kernel`: the sum over each token's choices, in their order: the same in every run.

Of few choices each is a block of its own (SINGLE), and none is put in order. Tables are plain
numbers or GGUF's blocks. With those, products of few rows an expert in 16 bits are of packed codes
(`few_rows`); others are decoded in registers (`quant_matmul/blocks.py`).
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import nan_or, sigmoid
from mtmd.kernels.gpu.jit import on_rdna, tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.moe import few_rows
from mtmd.kernels.gpu.moe.cases import CASES, NMSE, PLAIN, USES
from mtmd.kernels.gpu.moe.choices import activated, block_of, choice_of
from mtmd.kernels.gpu.quant_matmul.blocks import add_product, decode
from mtmd.kernels.gpu.quant_matmul.cases import KINDS
from mtmd.kernels.gpu.quant_matmul.grids import grids_of
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, declared, same
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.quantization.blocks import BLOCKS

MAX_EXPERTS, MAX_CHOSEN = 1024, 64


@dataclass(frozen=True)
class Operands:
    """Operands of `moe`: x [T, D], router [T, E], gate and up [E, F, D], down [E, D, F], shares and
    bias [E], reads [T] -> [T, D]
    """

    x: Type
    router: Type
    gate: Type
    up: Type
    down: Type
    shares: Type | None = None
    bias: Type | None = None
    reads: Type | None = None
    _: KW_ONLY
    routing: Routing
    act: str = "silu"
    gate_quant: str | None = None
    up_quant: str | None = None
    down_quant: str | None = None

    @property
    def tables(self) -> Sequence[tuple[str, Type, str | None]]:
        return (
            ("gate", self.gate, self.gate_quant),
            ("up", self.up, self.up_quant),
            ("down", self.down, self.down_quant),
        )


@triton.jit
def _in_best_groups(ratings, e, E, C: tl.constexpr):
    """Ratings of one token, of experts outside of its best groups at minus infinity."""
    group = e // (E // C.GROUPS)
    number = tl.arange(0, C.GROUP_LANES)
    rated = tl.full([C.GROUP_LANES], float("-inf"), tl.float32)
    for g in range(C.GROUPS):
        inside = tl.where((group == g) & (e < E), ratings, float("-inf"))
        total = tl.max(inside, 0)
        if C.GROUP_BEST == 2:
            total += tl.max(tl.where(e == tl.argmax(inside, 0), float("-inf"), inside), 0)
        rated = tl.where(number == g, total, rated)
    open_ = e < 0
    for _ in range(C.TOP_GROUPS):
        one = tl.argmax(rated, 0)
        open_ = open_ | (group == one)
        rated = tl.where(number == one, float("-inf"), rated)
    return tl.where(open_, ratings, float("-inf"))


@triton.jit
def route_kernel(router, shares, bias, reads, weights, chosen, s, C: tl.constexpr):
    """One token, whose experts are all E where none reads it. CHOICES, EXPERTS and GROUP_LANES are
    powers of two that hold TOP, E and GROUPS.
    """
    t = tl.program_id(0).to(tl.int64)
    E = s.E
    e = tl.arange(0, C.EXPERTS)
    j = tl.arange(0, C.CHOICES)
    x = tl.load(router + t * s.router_step + e, mask=e < E, other=float("-inf")).to(tl.float32)
    if C.SCORE == "softmax":
        p = tl.exp(x - tl.max(x, 0))
        p /= tl.sum(p, 0)
    else:
        p = nan_or(x, sigmoid(x))
    if C.BIAS:
        x = p + tl.load(bias + e, mask=e < E, other=float("-inf"))
    elif C.GROUPS > 1:
        x = tl.where(e < E, p, float("-inf"))
    # Ratings that are no numbers lose to all that are, lanes without an expert included: of a token
    # with no others the first expert is chosen, and its weights are no numbers.
    x = tl.where(x == x, x, float("-inf"))
    if C.GROUPS > 1:
        x = _in_best_groups(x, e, E, C)
    best = tl.zeros([C.CHOICES], tl.int32)
    part = tl.zeros([C.CHOICES], tl.float32)
    for number in range(C.TOP):
        one = tl.argmax(x, 0)
        best = tl.where(j == number, one, best)
        part = tl.where(j == number, tl.sum(tl.where(e == one, p, 0.0), 0), part)
        x = tl.where(e == one, float("-inf"), x)
    if C.NORMALIZE:
        part /= tl.sum(part, 0) + s.eps
    part *= s.scale
    if C.SCORE != "softmax":  # which spreads one expert's NaN to all of them
        part = nan_or(tl.sum(p, 0), part)
    if C.SHARES:
        part *= tl.load(shares + best)
    if C.READS:
        best = tl.where(tl.load(reads + t) != 0, best, E)
    tl.store(chosen + t * C.TOP + j, best, mask=j < C.TOP)
    tl.store(weights + t * C.TOP + j, part, mask=j < C.TOP)


@triton.jit(do_not_specialize=["N"])
def order_kernel(chosen, order, starts, N, E, BLOCK: tl.constexpr):
    """The choices of one expert."""
    e = tl.program_id(0)
    at = 0
    for begin in range(0, N, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        one = tl.load(chosen + i, mask=i < N, other=E)
        at += tl.sum((one < e).to(tl.int32), 0)
    tl.store(starts + e, at)
    for begin in range(0, N, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + i, mask=i < N, other=E) == e).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, i, mask=mine == 1)
        at += tl.sum(mine, 0)
    if e == E - 1:
        tl.store(starts + E, at)


@triton.jit
def _choices(p, block, E, C: tl.constexpr):
    """A block's expert, its rows among the ordered choices, which of them are there, and the
    choices.
    """
    expert, first, end = block_of(p, block, E, C)
    rows = first + tl.arange(0, C.ROWS)
    there = rows < end
    return expert, rows.to(tl.int64), there, choice_of(p.order, rows, there, C.SINGLE)


@triton.jit
def _values(p, w, row, start, K, TYPE: tl.constexpr, QUANT: tl.constexpr, C: tl.constexpr):
    """32 COUNT values, from `start`, of each row of a table, as TYPE. `row`: where they begin, in
    values or in bytes of blocks.
    """
    if QUANT == "plain":
        k = start + tl.arange(0, 32 * C.COUNT)
        if C.WHOLE:
            value = tl.load(w + row[:, None] + k[None, :])
        else:
            value = tl.load(w + row[:, None] + k[None, :], mask=(k < K)[None, :], other=0)
    else:
        value = decode(w, row, start, K, QUANT, C.WHOLE, 32 * C.COUNT, TYPE, p)
    return value.to(TYPE)


@triton.jit
def _product(p, total, x_row, there, w, row, K, QUANT: tl.constexpr, C: tl.constexpr):
    """The product of rows of x that are there with rows of a table is added."""
    for start in range(0, K, 32 * C.COUNT):
        value = _values(p, w, row, start, K, x_row.dtype.element_ty, QUANT, C)
        total = add_product(total, x_row, there[:, None], start, K, value, C.WHOLE)
    return total


@triton.jit(do_not_specialize=["blocks"])
def gated_kernel(p, s, blocks, E, K, F, C: tl.constexpr):
    """ROWS choices by COLUMNS of F values. Blocks of one expert follow each other."""
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * C.COLUMNS + tl.arange(0, C.COLUMNS)
    expert, rows, there, choice = _choices(p, block, E, C)
    if tl.sum(there.to(tl.int32), 0) > 0:
        row = expert * F + tl.minimum(n, F - 1)
        x_row = p.x + (choice // C.TOP)[:, None] * K
        total = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
        # One loop, in which x is read once, or two that take fewer registers
        if C.GATE == C.UP and not on_rdna():
            TYPE: tl.constexpr = p.x.dtype.element_ty
            g, u = total, total
            for start in range(0, K, 32 * C.COUNT):
                value = _values(p, p.gate, row * s.gate_step, start, K, TYPE, C.GATE, C)
                g = add_product(g, x_row, there[:, None], start, K, value, C.WHOLE)
                value = _values(p, p.up, row * s.up_step, start, K, TYPE, C.UP, C)
                u = add_product(u, x_row, there[:, None], start, K, value, C.WHOLE)
        else:
            g = _product(p, total, x_row, there, p.gate, row * s.gate_step, K, C.GATE, C)
            u = _product(p, total, x_row, there, p.up, row * s.up_step, K, C.UP, C)
        if C.ON_INPUT:  # of what both products read, which is the same
            weight = tl.load(p.weights + choice, mask=there, other=0)[:, None]
            g *= weight
            u *= weight
        tl.store(
            p.out + rows[:, None] * F + n[None, :],
            activated(g, u, C.ACT).to(p.out.dtype.element_ty),
            mask=there[:, None] & (n < F)[None, :],
        )


@triton.jit(do_not_specialize=["blocks"])
def down_kernel(p, blocks, E, K, D, down_step, C: tl.constexpr):
    """ROWS choices by COLUMNS of D values; K values each are in `gated`."""
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * C.COLUMNS + tl.arange(0, C.COLUMNS)
    expert, rows, there, choice = _choices(p, block, E, C)
    if tl.sum(there.to(tl.int32), 0) > 0:
        row = expert * D + tl.minimum(n, D - 1)
        x_row = p.gated + rows[:, None] * K
        total = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
        total = _product(p, total, x_row, there, p.down, row * down_step, K, C.DOWN, C)
        if not C.ON_INPUT:
            total *= tl.load(p.weights + choice, mask=there, other=0)[:, None]
        tl.store(
            p.out + choice[:, None] * D + n[None, :], total, mask=there[:, None] & (n < D)[None, :]
        )


@triton.jit
def sum_kernel(parts, reads, out, D, TOP: tl.constexpr, COLUMNS: tl.constexpr, READS: tl.constexpr):
    """COLUMNS values of one token."""
    blocks = tl.cdiv(D, COLUMNS)
    t = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    there = c < D
    if READS:
        there = there & (c * 0 + tl.load(reads + t) != 0)
    for j in range(TOP):
        total += tl.load(parts + (t * TOP + j) * D + c, mask=there, other=0)
    tl.store(out + t * D + c, total.to(out.dtype.element_ty), mask=c < D)


def rejects(o: Operands) -> str | None:
    """None if the kernels compute experts of these types, else why not."""
    x, router = o.x, o.router
    for name, type_ in (("x", x), ("the router", router)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    for name, type_, quant in o.tables:
        if quant is not None and quant not in KINDS:
            return f"{name} is {quant}; the kernel supports {', '.join(KINDS)}"
        if type_.count >= 2**40:
            return f"{name} is {type_}; the kernel supports below 2^40 values"
    dense = {"x": x, "gate": o.gate, "up": o.up, "down": o.down, "shares": o.shares, "bias": o.bias}
    dense["reads"] = o.reads
    for name, kind in dense.items():
        if kind is not None and not kind.is_contiguous:
            return f"{name} has strides {list(kind.strides)}; the kernel needs it contiguous"
    if router.strides[-1] != 1 and router.shape[-1] > 1:
        return f"the router has strides {list(router.strides)}; the kernel needs stride 1 at last"
    experts, top_k = router.shape[1], o.routing.top_k
    if experts > MAX_EXPERTS or top_k > MAX_CHOSEN:
        return (
            f"{top_k} of {experts} experts; the kernel supports up to {MAX_CHOSEN} of {MAX_EXPERTS}"
        )
    if x.shape[0] * top_k >= 2**24 or max(x.shape[1], o.gate.shape[1]) >= 2**24:
        return f"x is {x} and top_k {top_k}; the kernel supports below 2^24 choices and values"
    return None


def _product_call(o: Operands, inner: int, outer: int, *quants: str | None) -> Call:
    """Return how rows of `inner` values are multiplied by `outer` rows of tables of an expert."""
    experts, choices = o.gate.shape[0], o.x.shape[0] * o.routing.top_k
    single, mean = 2 * choices <= experts, -(-choices // experts)
    # Rounded up: each number of steps is compiled for itself.
    search = -(-max(experts - 1, 0).bit_length() // 4) * 4
    max_threads = registers = None
    scalars: dict[str, int | float] = {"E": experts, "K": inner}
    constants: dict[str, int | bool | str] = {"SINGLE": single, "SEARCH": search}
    if few_rows.takes(o.x.dtype, mean, *quants):
        rows, stages = few_rows.rows_of_a_block(mean), 1
        every = outer * min(choices, experts)
        given = list(filter(None, quants))
        result, columns, warps = few_rows.tiles(inner, every, rows, *given)
        registers = few_rows.registers(rows, *given)
        for prefix, (units, count) in zip(("", "up_"), result, strict=False):
            scalars[f"{prefix}units"] = units
            constants[f"{prefix}count".upper()] = count
            constants[f"{prefix}whole".upper()] = units % count == 0
    else:
        (rows, columns, count, warps), stages = _tile(mean, o.x.dtype, *quants), 2
        constants |= {"COUNT": count, "WHOLE": inner % (32 * count) == 0}
        max_threads = columns * count if any(quants) else None
    scalars["blocks"] = blocks = choices if single else choices // rows + experts
    constants |= {"ROWS": rows, "COLUMNS": columns}
    programs = blocks * -(-outer // columns)
    return Call(scalars, constants, programs, warps, stages, max_threads, registers)


def gated_call(o: Operands) -> Call:
    ffn = o.gate.shape[1]
    call = _product_call(o, o.x.shape[1], ffn, o.gate_quant, o.up_quant)
    call.scalars.update(F=ffn, gate_step=o.gate.shape[2], up_step=o.up.shape[2])
    if "units" in call.scalars:
        call.scalars["blocks_again"] = call.scalars["blocks"]
    call.constants.update(TOP=o.routing.top_k, ACT=o.act, ON_INPUT=o.routing.on_input)
    call.constants.update(GATE=o.gate_quant or PLAIN, UP=o.up_quant or PLAIN)
    return call


def down_call(o: Operands) -> Call:
    width = o.x.shape[1]
    call = _product_call(o, o.gate.shape[1], width, o.down_quant)
    call.scalars.update(D=width, down_step=o.down.shape[2])
    call.constants.update(DOWN=o.down_quant or PLAIN, ON_INPUT=o.routing.on_input)
    return call


def route_call(o: Operands) -> Call:
    (tokens, _), experts, how = o.x.shape, o.gate.shape[0], o.routing
    step = o.router.strides[0] if tokens > 1 else 0
    return Call(
        {"E": experts, "router_step": step, "eps": how.eps, "scale": how.scale},
        {
            "TOP": how.top_k,
            "SCORE": how.score,
            "NORMALIZE": how.normalize,
            "SHARES": o.shares is not None,
            "BIAS": o.bias is not None,
            "READS": o.reads is not None,
            "GROUPS": how.groups,
            "TOP_GROUPS": how.top_groups,
            "GROUP_BEST": how.group_best,
            "CHOICES": power_of_two(how.top_k),
            "EXPERTS": power_of_two(experts),
            "GROUP_LANES": power_of_two(how.groups),
        },
        tokens,
        1 if experts <= 128 else 4,
        1,
    )


def plan(o: Operands) -> Plan:
    (tokens, width), (experts, ffn) = o.x.shape, o.gate.shape[:2]
    out = Type.contiguous(o.x.shape, o.x.dtype)
    if not out.count:
        return Plan(out, [])
    choices = tokens * o.routing.top_k
    buffers = {
        "weights": Type.contiguous((choices,), torch.float32),
        "chosen": Type.contiguous((choices,), torch.int32),
        "gated": Type.contiguous((choices * ffn,), o.x.dtype),
        "parts": Type.contiguous((choices * width,), torch.float32),
    }
    launches = [Launch(route_kernel, route_call(o), title="experts, choice")]
    gated, down = gated_call(o), down_call(o)
    few = "units" in gated.scalars, "units" in down.scalars
    if gated.constants["SINGLE"]:
        ordered = {"chosen": "chosen", "order": "chosen", "starts": "chosen"}
    else:
        ordered = same("chosen order starts")
        buffers["order"] = Type.contiguous((choices,), torch.int32)
        buffers["starts"] = Type.contiguous((experts + 1,), torch.int32)
        call = Call({"N": choices, "E": experts}, {"BLOCK": 1024}, experts, 4, 1)
        launches.append(Launch(order_kernel, call, title="experts, order"))
    block = min(512, power_of_two(max(width, 1)))  # of 1,024 eight choices would spill on cuda:80
    sizes: dict[str, int | bool | str] = {"TOP": o.routing.top_k, "COLUMNS": block}
    sizes["READS"] = o.reads is not None
    tile = "ROWS", "COLUMNS", "COUNT"
    grids = grids_of(o.gate_quant, o.up_quant, o.down_quant)
    of_gated = same(" ".join(grids_of(o.gate_quant, o.up_quant)))
    of_down = same(" ".join(grids_of(o.down_quant)))
    launches += [
        Launch(
            few_rows.few_gated_kernel if few[0] else gated_kernel,
            gated,
            same("x gate up" + " weights" * o.routing.on_input)
            | ordered
            | {"out": "gated"}
            | of_gated,
            tile,
            "experts, gate and up",
        ),
        Launch(
            few_rows.few_down_kernel if few[1] else down_kernel,
            down,
            same("gated down weights") | ordered | {"out": "parts"} | of_down,
            tile,
            "experts, down",
        ),
        Launch(
            sum_kernel,
            Call({"D": width}, sizes, tokens * -(-width // block), 4, 1),
            title="experts, sum",
        ),
    ]
    return Plan(out, launches, buffers, grids)


def alignments(o: Operands) -> dict[str, int]:
    return {name: math.gcd(BLOCKS[kind].bytes, 4) for name, _, kind in o.tables if kind}


def _tile(rows: int, dtype: torch.dtype, *quants: str | None) -> tuple[int, int, int, int]:
    """Choices, rows of a table, groups of 32 values, warps. Chosen from the compiler's report
    alone, not by a GPU's clock.
    """
    few = dtype == torch.float32 or rows <= 16
    block, columns, warps = (16, 32, 4) if few else (64, 64, 4)
    count = 2 if few and dtype != torch.float32 else 1
    if any(quants):
        count = 4  # blocks of 256 are decoded by halves
        if not few and len(quants) == 2:  # of gate and up more would spill on cuda:80
            if quants[0] != quants[1]:
                warps = 8
            else:
                columns, count = (64, 2) if quants[0] == "Q5_K" else (32, 4)
    return block, columns, count, warps


KERNEL = declared(
    Operands, plan, rejects, what="experts", aligned=alignments, cases=CASES, uses=USES, limits=NMSE
)
