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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import on_rdna, tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.moe import few_rows
from mtmd.kernels.gpu.moe.cases import CASES, NMSE, PLAIN, USES
from mtmd.kernels.gpu.moe.choices import activated, block_of, choice_of
from mtmd.kernels.gpu.quant_matmul.blocks import add_product, decode
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE

MOST_EXPERTS, MOST_CHOSEN = 1024, 64


@triton.jit
def route_kernel(
    router,
    shares,
    weights,
    chosen,
    E,
    router_step,
    TOP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SHARES: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One token. CHOICES and EXPERTS are powers of two that hold TOP and E."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    j = tl.arange(0, CHOICES)
    x = tl.load(router + t * router_step + e, mask=e < E, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p /= tl.sum(p, 0)
    # Ratings that are no numbers lose to all that are, lanes without an expert included: of a token
    # with no others the first expert is chosen, and its weights are no numbers.
    x = tl.where(x == x, x, float("-inf"))
    best = tl.zeros([CHOICES], tl.int32)
    part = tl.zeros([CHOICES], tl.float32)
    for number in range(TOP):
        one = tl.argmax(x, 0)
        best = tl.where(j == number, one, best)
        part = tl.where(j == number, tl.sum(tl.where(e == one, p, 0.0), 0), part)
        x = tl.where(e == one, float("-inf"), x)
    if NORMALIZE:
        part /= tl.sum(part, 0)
    if SHARES:
        part *= tl.load(shares + best)
    tl.store(chosen + t * TOP + j, best, mask=j < TOP)
    tl.store(weights + t * TOP + j, part, mask=j < TOP)


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
    if e == E - 1:
        tl.store(starts + E, N)
    for begin in range(0, N, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + i, mask=i < N, other=E) == e).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, i, mask=mine == 1)
        at += tl.sum(mine, 0)


@triton.jit
def _choices(
    chosen, order, starts, block, E, SINGLE: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr
):
    """A block's expert, its rows among the ordered choices, which of them are there, and the
    choices.
    """
    expert, first, end = block_of(chosen, starts, block, E, SINGLE, SEARCH, ROWS)
    rows = first + tl.arange(0, ROWS)
    there = rows < end
    return expert, rows.to(tl.int64), there, choice_of(order, rows, there, SINGLE)


@triton.jit
def _values(w, row, start, K, like, QUANT: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """32 COUNT values, from `start`, of each row of a table, as x's type. `row`: where they begin,
    in values or in bytes of blocks.
    """
    if QUANT == "plain":
        k = start + tl.arange(0, 32 * COUNT)
        if WHOLE:
            value = tl.load(w + row[:, None] + k[None, :])
        else:
            value = tl.load(w + row[:, None] + k[None, :], mask=(k < K)[None, :], other=0)
    else:
        value = decode(w, row, start, K, QUANT, WHOLE, 32 * COUNT, like.dtype.element_ty)
    return value.to(like.dtype.element_ty)


@triton.jit
def _product(
    total,
    x_row,
    there,
    w,
    row,
    K,
    like,
    QUANT: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The product of rows of x that are there with rows of a table is added."""
    for start in range(0, K, 32 * COUNT):
        value = _values(w, row, start, K, like, QUANT, WHOLE, COUNT)
        total = add_product(total, x_row, there[:, None], start, K, value, WHOLE)
    return total


@triton.jit(do_not_specialize=["blocks"])
def gated_kernel(
    x,
    gate,
    up,
    chosen,
    order,
    starts,
    out,
    blocks,
    E,
    K,
    F,
    gate_step,
    up_step,
    TOP: tl.constexpr,
    ACT: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    WHOLE: tl.constexpr,
    SINGLE: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """ROWS choices by COLUMNS of F values. Blocks of one expert follow each other."""
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    expert, rows, there, choice = _choices(chosen, order, starts, block, E, SINGLE, SEARCH, ROWS)
    if tl.sum(there.to(tl.int32), 0) > 0:
        row = expert * F + tl.minimum(n, F - 1)
        x_row = x + (choice // TOP)[:, None] * K
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        # One loop, in which x is read once, or two that take fewer registers
        if GATE == UP and not on_rdna():
            g, u = total, total
            for start in range(0, K, 32 * COUNT):
                value = _values(gate, row * gate_step, start, K, x, GATE, WHOLE, COUNT)
                g = add_product(g, x_row, there[:, None], start, K, value, WHOLE)
                value = _values(up, row * up_step, start, K, x, UP, WHOLE, COUNT)
                u = add_product(u, x_row, there[:, None], start, K, value, WHOLE)
        else:
            g = _product(total, x_row, there, gate, row * gate_step, K, x, GATE, WHOLE, COUNT)
            u = _product(total, x_row, there, up, row * up_step, K, x, UP, WHOLE, COUNT)
        tl.store(
            out + rows[:, None] * F + n[None, :],
            activated(g, u, ACT).to(out.dtype.element_ty),
            mask=there[:, None] & (n < F)[None, :],
        )


@triton.jit(do_not_specialize=["blocks"])
def down_kernel(
    gated,
    down,
    weights,
    chosen,
    order,
    starts,
    out,
    blocks,
    E,
    K,
    D,
    down_step,
    DOWN: tl.constexpr,
    WHOLE: tl.constexpr,
    SINGLE: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """ROWS choices by COLUMNS of D values; K values each are in `gated`."""
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    expert, rows, there, choice = _choices(chosen, order, starts, block, E, SINGLE, SEARCH, ROWS)
    if tl.sum(there.to(tl.int32), 0) > 0:
        row = expert * D + tl.minimum(n, D - 1)
        x_row = gated + rows[:, None] * K
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total = _product(total, x_row, there, down, row * down_step, K, gated, DOWN, WHOLE, COUNT)
        total *= tl.load(weights + choice, mask=there, other=0)[:, None]
        tl.store(
            out + choice[:, None] * D + n[None, :], total, mask=there[:, None] & (n < D)[None, :]
        )


@triton.jit
def sum_kernel(parts, out, D, TOP: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS values of one token."""
    blocks = tl.cdiv(D, COLUMNS)
    t = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in range(TOP):
        total += tl.load(parts + (t * TOP + j) * D + c, mask=c < D, other=0)
    tl.store(out + t * D + c, total.to(out.dtype.element_ty), mask=c < D)


class Calls(NamedTuple):
    """How each kernel is called; `order` is not where choices are few."""

    route: Call
    order: Call | None
    gated: Call
    down: Call
    sum: Call


def rejects(
    x: Type,
    router: Type,
    gate: Type,
    up: Type,
    down: Type,
    shares: Type | None = None,
    *,
    top_k: int,
    normalize: bool,  # noqa: ARG001
    act: str = "silu",  # noqa: ARG001
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> str | None:
    """None if the kernels compute experts of these types, else why not."""
    for name, type_ in (("x", x), ("the router", router)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
    tables = (("gate", gate, gate_quant), ("up", up, up_quant), ("down", down, down_quant))
    for name, type_, quant in tables:
        if quant is not None and quant not in NATIVE:
            return f"{name} is {quant}; the kernel takes {', '.join(sorted(NATIVE))}"
        if type_.count >= 2**40:
            return f"{name} is {type_}; the kernel takes below 2^40 values"
    for name, kind in (("x", x), ("gate", gate), ("up", up), ("down", down), ("shares", shares)):
        if kind is not None and not kind.is_contiguous:
            return f"{name} has strides {list(kind.strides)}; the kernel needs it contiguous"
    if router.strides[-1] != 1 and router.shape[-1] > 1:
        return f"the router has strides {list(router.strides)}; the kernel needs stride 1 at last"
    if router.shape[1] > MOST_EXPERTS or top_k > MOST_CHOSEN:
        return (
            f"{top_k} of {router.shape[1]} experts; the kernel takes up to {MOST_CHOSEN} of "
            f"{MOST_EXPERTS}"
        )
    if x.shape[0] * top_k >= 2**24 or max(x.shape[1], gate.shape[1]) >= 2**24:
        return f"x is {x} and top_k {top_k}; the kernel takes below 2^24 choices and values"
    return None


def plan_calls(
    x: Type,
    router: Type,
    gate: Type,
    up: Type,
    down: Type,
    shares: Type | None = None,
    *,
    top_k: int,
    normalize: bool,
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Calls:
    tokens, width = x.shape
    experts, ffn = gate.shape[0], gate.shape[1]
    choices = tokens * top_k
    single = 2 * choices <= experts
    mean = -(-choices // experts)
    # Rounded up: each number of steps is compiled for itself.
    search = -(-max(experts - 1, 0).bit_length() // 4) * 4

    def product_call(inner: int, outer: int, *quants: str | None) -> Call:
        """Without what only one of the two products has."""
        most_threads = registers = None
        scalars: dict[str, int | float] = {"E": experts, "K": inner}
        constants: dict[str, int | bool | str] = {"SINGLE": single, "SEARCH": search}
        if few_rows.takes(x.dtype, mean, *quants):
            rows, stages = few_rows.rows_of_a_block(mean), 1
            every = outer * min(choices, experts)
            given = list(filter(None, quants))
            found, columns, warps = few_rows.tiles(inner, every, rows, *given)
            registers = few_rows.registers(rows, *given)
            for prefix, (units, count) in zip(("", "up_"), found, strict=False):
                scalars[f"{prefix}units"] = units
                constants[f"{prefix}count".upper()] = count
                constants[f"{prefix}whole".upper()] = units % count == 0
        else:
            (rows, columns, count, warps), stages = _tile(mean, x.dtype, *quants), 2
            constants |= {"COUNT": count, "WHOLE": inner % (32 * count) == 0}
            most_threads = columns * count if any(quants) else None
        scalars["blocks"] = blocks = choices if single else choices // rows + experts
        constants |= {"ROWS": rows, "COLUMNS": columns}
        programs = blocks * -(-outer // columns)
        return Call(scalars, constants, programs, warps, stages, most_threads, registers)

    route = Call(
        {"E": experts, "router_step": router.strides[0] if tokens > 1 else 0},
        {
            "TOP": top_k,
            "NORMALIZE": normalize,
            "SHARES": shares is not None,
            "CHOICES": power_of_two(top_k),
            "EXPERTS": power_of_two(experts),
        },
        tokens,
        1 if experts <= 128 else 4,
        1,
    )
    order = Call({"N": choices, "E": experts}, {"BLOCK": 1024}, experts, 4, 1)
    gated = product_call(width, ffn, gate_quant, up_quant)
    gated.scalars.update(F=ffn, gate_step=gate.shape[2], up_step=up.shape[2])
    if "units" in gated.scalars:
        gated.scalars["blocks_again"] = gated.scalars["blocks"]
    gated.constants.update(TOP=top_k, ACT=act, GATE=gate_quant or PLAIN, UP=up_quant or PLAIN)
    last = product_call(ffn, width, down_quant)
    last.scalars.update(D=width, down_step=down.shape[2])
    last.constants.update(DOWN=down_quant or PLAIN)
    block = min(512, power_of_two(max(width, 1)))  # of 1,024 eight choices would spill on cuda:80
    added = Call({"D": width}, {"TOP": top_k, "COLUMNS": block}, tokens * -(-width // block), 4, 1)
    return Calls(route, None if single else order, gated, last, added)


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


def _gated_kernel_of(call: Call) -> Any:
    return few_rows.few_gated_kernel if "units" in call.scalars else gated_kernel


def _down_kernel_of(call: Call) -> Any:
    return few_rows.few_down_kernel if "units" in call.scalars else down_kernel


def moe(
    x: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shares: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The `moe` op

    x [T, D], router [T, E], gate and up [E, F, D], down [E, D, F], shares [E] -> [T, D]

    Raises PlacementError with what `rejects` says.
    """
    given = (x, router, gate, up, down, shares)
    types = [None if t is None else Type.of(t) for t in given]
    reason = rejects(*types, **options)  # type: ignore[arg-type]
    if reason is None:
        reason = _unaligned(given[2:5], options)
    if reason:
        raise PlacementError(f"experts on the GPU: {reason}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    calls = plan_calls(*types, **options)  # type: ignore[arg-type]
    choices, (experts, ffn) = x.shape[0] * int(options["top_k"]), gate.shape[:2]

    def room(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=x.device)

    weights, chosen = room(choices, torch.float32), room(choices, torch.int32)
    run_call(
        route_kernel, calls.route, (router, weights if shares is None else shares, weights, chosen)
    )
    order, starts = chosen, chosen
    if calls.order is not None:
        order, starts = room(choices, torch.int32), room(experts + 1, torch.int32)
        run_call(order_kernel, calls.order, (chosen, order, starts))
    gated = room(choices * ffn, x.dtype)
    product = _gated_kernel_of(calls.gated)
    run_call(product, calls.gated, (x, gate, up, chosen, order, starts, gated))
    parts = room(choices * x.shape[1], torch.float32)
    product = _down_kernel_of(calls.down)
    run_call(product, calls.down, (gated, down, weights, chosen, order, starts, parts))
    run_call(sum_kernel, calls.sum, (parts, out))
    return out


def _unaligned(tables: Sequence[Tensor | None], options: Mapping[str, Any]) -> str | None:
    """Why a table's address will not do, if it will not."""
    for name, table in zip(("gate", "up", "down"), tables, strict=True):
        kind = options.get(f"{name}_quant")
        size = math.gcd(BLOCKS[kind].bytes, 4) if kind else 1
        if table is not None and table.data_ptr() % size:
            return (
                f"{name} begins at {table.data_ptr():#x}; the kernel needs it aligned to {size} "
                "bytes"
            )
    return None


def launches(*types: Type | None, **options: Any) -> int:
    """Five, and one less where choices are few."""
    return 5 if plan_calls(*types, **options).order is not None else 4  # type: ignore[arg-type]


def workspace(x: Type, router: Type, gate: Type, *types: Type | None, **options: Any) -> int:
    """Bytes of the choices, of what they make of gate and up, and of what comes of that."""
    choices = x.shape[0] * int(options["top_k"])
    calls = plan_calls(x, router, gate, *types, **options)  # type: ignore[arg-type]
    numbers = [4 * choices] * 2
    if calls.order is not None:
        numbers += [4 * choices, 4 * (gate.shape[0] + 1)]
    return sum((*numbers, choices * gate.shape[1] * x.dtype.itemsize, 4 * choices * x.shape[1]))


def program(
    x: Type, router: Type, gate: Type, up: Type, down: Type, *others: Type | None, **options: Any
) -> Program:
    """The products with gate and up; `down_program` are those that follow."""
    call = plan_calls(x, router, gate, up, down, *others, **options).gated
    number = Type.contiguous((1,), torch.int32)
    operands = {"x": x, "gate": gate, "up": up, "out": fresh(x)}
    operands |= dict.fromkeys(("chosen", "order", "starts"), number)
    tile = "ROWS", "COLUMNS", "COUNT"
    return Program(_gated_kernel_of(call), call, operands, tile, title="experts, gate and up")


def down_program(
    x: Type, router: Type, gate: Type, up: Type, down: Type, *others: Type | None, **options: Any
) -> Program:
    call = plan_calls(x, router, gate, up, down, *others, **options).down
    number, exact = (Type.contiguous((1,), t) for t in (torch.int32, torch.float32))
    operands = {"gated": fresh(x), "down": down, "weights": exact, "out": exact}
    operands |= dict.fromkeys(("chosen", "order", "starts"), number)
    tile = "ROWS", "COLUMNS", "COUNT"
    return Program(_down_kernel_of(call), call, operands, tile, title="experts, down")


def programs(
    x: Type,
    router: Type,
    gate: Type,
    up: Type,
    down: Type,
    shares: Type | None = None,
    **options: Any,
) -> list[Program]:
    """All that a run launches."""
    if not x.count:
        return []
    given = (x, router, gate, up, down, shares)
    calls = plan_calls(*given, **options)
    number, exact = (Type.contiguous((1,), t) for t in (torch.int32, torch.float32))
    route = {"router": router, "shares": shares or exact, "weights": exact, "chosen": number}
    found = [Program(route_kernel, calls.route, route, title="experts, choice")]
    if calls.order is not None:
        order = dict.fromkeys(("chosen", "order", "starts"), number)
        found.append(Program(order_kernel, calls.order, order, title="experts, order"))
    found += [program(*given, **options), down_program(*given, **options)]
    parts = {"parts": exact, "out": fresh(x)}
    return [*found, Program(sum_kernel, calls.sum, parts, title="experts, sum")]


KERNEL = TritonKernel(
    run=moe,
    rejects=rejects,
    workspace=workspace,
    program=program,
    programs=programs,
    launches=launches,
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
