"""Rules for each op: how its operands have to be shared out over ranks, and how its result then is.

A value is whole (every rank has all of it), split along an axis, or partial: the ranks' values add
up to it. A rule says what it asks of each operand; who rewrites the graph brings operands there (a
sum over ranks makes a partial value whole, a whole one is cut for nothing). An op without a rule
asks for whole operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any, TypeAlias

from mtmd.kernels.graph import Node
from mtmd.kernels.parallel.dims import Conflict, Dims, Segments
from mtmd.kernels.quantization.blocks import BLOCKS


@dataclass(frozen=True)
class Whole:
    """Every rank has all of it."""


@dataclass(frozen=True)
class Partial:
    """The ranks' values add up to it."""


@dataclass(frozen=True)
class Split:
    """`segments` count values along the axis; of rows of quantized `block`s, which are bytes, the
    values that they stand for.
    """

    axis: int
    segments: Segments
    block: str | None = None


State: TypeAlias = "Whole | Partial | Split"
WHOLE, PARTIAL = Whole(), Partial()


@dataclass(frozen=True)
class Located:
    """Result of a rule: what it requires of each operand, and what the op's result is then. `once`:
    operands that only the first rank adds. `notes`: what the rewriter needs to know to change
    attributes.
    """

    operands: tuple[State, ...]
    result: State
    once: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Dims, Node, "list[State]"], Located]
RULES: dict[str, Rule] = {}
GATED = ("silu_mul", "gelu_mul")


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def all_whole(node: Node) -> Located:
    return Located((WHOLE,) * len(node.inputs), WHOLE)


def settled(dims: Dims, axis: int, segments: Segments) -> State:
    """A split, or whole where no part of the axis is cut."""
    seen = dims.see(segments)
    return WHOLE if all(dim is None for _, dim in seen) else Split(axis, seen)


def _others(node: Node, first: State, result: State) -> Located:
    """Operand 0 as said, the others whole."""
    return Located((first, *(WHOLE,) * (len(node.inputs) - 1)), result)


def _size(node: Node, index: int, axis: int) -> int:
    operand = node.inputs[index]
    assert operand is not None
    return operand.shape[axis]


def _rank(node: Node, index: int = 0) -> int:
    operand = node.inputs[index]
    assert operand is not None
    return len(operand.shape)


@rule("matmul")
def _matmul(dims: Dims, node: Node, states: list[State]) -> Located:
    """Split by the outputs where x is whole; where its columns are split, by the inputs: partial
    sums.
    """
    quant = node.attrs.get("quant")
    x, last = states[0], _rank(node) - 1
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    more = (WHOLE,) * (len(node.inputs) - 2)
    if isinstance(x, Split) and x.axis != last:
        return Located((x, WHOLE, *more), x)
    if isinstance(x, Split):
        if any(dim is None for _, dim in dims.flat(x.segments)):
            raise Conflict(
                [d for _, d in x.segments], "a product reads columns of which some are whole"
            )
        inner = _in_blocks(dims, x.segments, quant, f"{node.name} is {quant}")
        for _, dim in inner:
            assert dim is not None
            dim.root.exact = True
        return Located((x, Split(1, inner, quant), *more), PARTIAL, once=(2,) if bias else ())
    size = node.shape[-1]
    segments = dims.see([(Fraction(size), dims.fresh(node.name, size))])
    out = settled(dims, last, segments)
    if not isinstance(out, Split):
        return all_whole(node)
    rows = Split(0, segments)
    return Located((WHOLE, rows, *((rows,) if bias else more)), out)


@rule("head_matmul")
def _head_matmul(dims: Dims, node: Node, states: list[State]) -> Located:
    """Split by heads: as x is, or, where all heads read the same, each rank's own."""
    x = states[0]
    if isinstance(x, Split):
        if x.axis != 1:
            raise Conflict(_dims(x), "a product reads whole heads")
        return Located((x, Split(0, x.segments)), x)
    size = _size(node, 1, 0)
    if _size(node, 0, 1) == size:
        return all_whole(node)
    heads = settled(dims, 1, ((Fraction(size), dims.fresh(node.name, size)),))
    if not isinstance(heads, Split):
        return all_whole(node)
    return Located((WHOLE, Split(0, heads.segments)), heads)


@rule("add_mixed")
def _add_mixed(dims: Dims, node: Node, states: list[State]) -> Located:  # noqa: ARG001
    """Whole, and so are the few numbers by which streams are mixed: each rank has its own rather
    than wait for the others.
    """
    names, at = set[str](), node.inputs[2]
    while at is not None and at.op in ("reshape", "scale", "softcap", "matmul"):
        names |= {at.name} if at.op == "matmul" else set()
        at = at.inputs[0]
    shared = [d for d in dims.made if not d.whole and any(key[0] in names for key in d.keys)]
    if shared:
        raise Conflict(shared, "it says how streams are mixed")
    return all_whole(node)


@rule("lora")
def _lora(dims: Dims, node: Node, states: list[State]) -> Located:  # noqa: ARG001
    """Split as the product that it is added to. Its sum is partial, too, where x is split by
    columns: then it takes the rank's columns of a, and all of b.
    """
    y, x = states[:2]
    last = _rank(node) - 1
    if isinstance(x, Split) and x.axis == last:
        return Located((PARTIAL, x, Split(1, x.segments), WHOLE, WHOLE), PARTIAL)
    if isinstance(y, Split) and y.axis == last:
        return Located((y, WHOLE, WHOLE, Split(0, y.segments), WHOLE), y)
    return all_whole(node)


def _in_blocks(dims: Dims, segments: Segments, quant: str | None, what: str) -> Segments:
    """Boundaries fall on blocks of quantized rows."""
    flat = dims.flat(segments)
    if quant is None:
        return dims.see(flat)
    block = BLOCKS[quant].values
    counts = tuple((size / block, dim) for size, dim in flat)
    if any(size.denominator != 1 for size, _ in counts):
        sizes = ", ".join(str(int(size)) for size, _ in flat)
        raise Conflict(
            [d for _, d in flat],
            f"{what}: parts of {sizes} columns in blocks of {block}",
            refused=True,
        )
    dims.see(counts)
    return flat


@rule("embed")
def _embed(dims: Dims, node: Node, states: list[State]) -> Located:  # noqa: ARG001
    """Split by rows of the table: a token's row is on one rank, the others have zeros."""
    size = _size(node, 1, 0)
    segments = dims.see([(Fraction(size), dims.fresh(node.name, size))])
    table = settled(dims, 0, segments)
    if not isinstance(table, Split):
        return all_whole(node)
    for _, dim in segments:
        assert dim is not None
        dim.root.exact = True
    return Located((WHOLE, table), PARTIAL, notes={"embed": segments})


@rule("gelu", "silu", "relu", "sigmoid", "softplus", "softcap", "cast")
def _each_element(dims: Dims, node: Node, states: list[State]) -> Located:  # noqa: ARG001
    x = states[0] if isinstance(states[0], Split) else WHOLE
    return _others(node, x, x)


@rule("scale")
def _scale(dims: Dims, node: Node, states: list[State]) -> Located:
    if states[0] is PARTIAL and not node.attrs.get("offset"):
        return Located((PARTIAL,), PARTIAL)
    return _each_element(dims, node, states)


@rule("clamp")
def _clamp(dims: Dims, node: Node, states: list[State]) -> Located:
    return _each_element(dims, node, states)


@rule("add", "mul", *GATED)
def _two(dims: Dims, node: Node, states: list[State]) -> Located:
    a, b = states
    first, second = node.inputs
    assert first is not None and second is not None
    if PARTIAL in (a, b):
        if node.op == "add" and a is PARTIAL and b is PARTIAL and first.shape == second.shape:
            return Located((PARTIAL, PARTIAL), PARTIAL)
        if node.op == "add" and a is PARTIAL and b is WHOLE:
            return Located((PARTIAL, WHOLE), PARTIAL, once=(1,))
        if node.op == "add" and a is WHOLE and b is PARTIAL and first.shape == second.shape:
            return Located((WHOLE, PARTIAL), PARTIAL, once=(0,))
        if node.op == "mul" and a is PARTIAL and b is WHOLE:
            return Located((PARTIAL, WHOLE), PARTIAL)
        a, b = (WHOLE if s is PARTIAL else s for s in (a, b))
    if isinstance(a, Split):
        axis = a.axis - (len(first.shape) - len(second.shape))
        if axis < 0 or second.shape[axis] == 1:
            return Located((a, WHOLE), a)
        if isinstance(b, Split):
            if b.axis != axis:
                raise Conflict(_dims(a, b), f"{node.op} of values split along two axes")
            both = dims.unify(a.segments, b.segments)
        else:
            both = a.segments
        state = settled(dims, a.axis, both)
        return Located((state, Split(axis, both) if isinstance(state, Split) else WHOLE), state)
    if isinstance(b, Split):
        axis = b.axis + (len(first.shape) - len(second.shape))
        if second.shape[b.axis] != first.shape[axis]:
            raise Conflict(_dims(b), f"{node.op} broadcasts it")
        return Located((Split(axis, b.segments), b), Split(axis, b.segments))
    return all_whole(node)


def _dims(*states: State) -> list[Any]:
    return [d for s in states if isinstance(s, Split) for _, d in s.segments]


@rule("rms_norm", "layer_norm", "l2_norm")
def _norm(dims: Dims, node: Node, states: list[State]) -> Located:
    x = states[0]
    if not isinstance(x, Split) or x.axis != len(node.shape) - 1:
        return _each_element(dims, node, states)
    source, parts = node.inputs[0], dims.flat(x.segments)
    if source is None or source.op not in GATED or len(parts) > 1:
        raise Conflict(_dims(x), f"{node.op} reads all of a row")
    # Gated rows lie between two products, which are worth more than to bring the parts together.
    return _whole_rows(dims, x, states)


def _whole_rows(dims: Dims, x: Split, states: list[State]) -> Located:
    """The parts of rows brought together for the op, and cut again behind it."""
    for _, dim in dims.flat(x.segments):
        assert dim is not None
        dim.root.exact = True
    return Located((x, *(WHOLE,) * (len(states) - 1)), x, notes={"gathered": True})


@rule("gaussian_topk")
def _gaussian_topk(dims: Dims, node: Node, states: list[State]) -> Located:
    """Rows that a gate's product gives are brought together for it."""
    x = states[0]
    if not isinstance(x, Split) or x.axis != len(node.shape) - 1:
        return _each_element(dims, node, states)
    if len(dims.flat(x.segments)) > 1:
        raise Conflict(_dims(x), f"{node.op} reads all of a row")
    return _whole_rows(dims, x, states)


@rule("rope")
def _rope(dims: Dims, node: Node, states: list[State]) -> Located:
    if isinstance(states[0], Split) and states[0].axis in (
        len(node.shape) - 1,
        len(node.shape) - 3,
    ):
        raise Conflict(_dims(states[0]), "rope turns whole heads of whole rows")
    return _each_element(dims, node, states)


@rule("reshape")
def _reshape(dims: Dims, node: Node, states: list[State]) -> Located:
    x = states[0]
    if x is PARTIAL:
        return Located((PARTIAL,), PARTIAL)
    if not isinstance(x, Split):
        return all_whole(node)
    source = node.inputs[0]
    assert source is not None
    axis, ratio = _axis_after(source.shape, node.shape, x)
    segments = tuple((size * ratio, dim) for size, dim in dims.flat(x.segments))
    result = settled(dims, axis, segments)
    return Located((x if isinstance(result, Split) else WHOLE,), result)


def _axis_after(before: tuple[int, ...], after: tuple[int, ...], x: Split) -> tuple[int, Fraction]:
    """Return which axis of the new shape the split axis is cut along, and its size there by that
    here.
    """
    if len(before) > 2 and after == (1, *before):  # a batch of one
        return x.axis + 1, Fraction(1)
    i = j = 0
    while i < len(before) and j < len(after):
        i_end, j_end = i + 1, j + 1
        while (a := prod(before[i:i_end])) != (b := prod(after[j:j_end])):
            if a < b:
                i_end += 1
            else:
                j_end += 1
        if i <= x.axis < i_end:
            if prod(before[i : x.axis]) != 1:
                break  # rows of several would lie between its parts
            return j, Fraction(after[j], before[x.axis])
        i, j = i_end, j_end
    raise Conflict(_dims(x), f"reshaped from {list(before)} to {list(after)}")


@rule("columns")
def _columns(dims: Dims, node: Node, states: list[State]) -> Located:
    x = states[0]
    if not isinstance(x, Split) or x.axis != len(node.shape) - 1:
        return _each_element(dims, node, states)
    start, stop = node.attrs["start"], node.attrs["stop"]
    part = dims.between(x.segments, start, stop)
    return Located(
        (x,), settled(dims, x.axis, part), notes={"before": dims.between(x.segments, 0, start)}
    )


@rule("rows")
def _rows(dims: Dims, node: Node, states: list[State]) -> Located:
    if states[0] is PARTIAL:
        return Located((PARTIAL,), PARTIAL)
    if isinstance(states[0], Split) and states[0].axis == 0:
        raise Conflict(_dims(states[0]), "some rows of it are looked at")
    return _each_element(dims, node, states)


@rule("take_rows")
def _take_rows(dims: Dims, node: Node, states: list[State]) -> Located:
    if states[0] is PARTIAL:
        return Located((PARTIAL, WHOLE), PARTIAL)
    x = states[0]
    if not isinstance(x, Split) or x.axis != len(node.shape) - 2:
        return _each_element(dims, node, states)
    before, at = _size(node, 0, x.axis), node.inputs[1]
    locations = at.attrs.get("values") if at is not None else None
    step = before // len(locations) if locations else 0
    if not locations or not step or list(locations) != list(range(locations[0], before, step)):
        raise Conflict(_dims(x), "some rows of it are taken")
    segments = tuple((size / step, dim) for size, dim in dims.flat(x.segments))
    return Located(
        (x, WHOLE), settled(dims, x.axis, segments), notes={"every": (locations[0], step)}
    )


@rule("place_rows", "add_rows")
def _location_rows(dims: Dims, node: Node, states: list[State]) -> Located:
    x, rows = states[:2]
    axis = 1
    for state in (x, rows):
        if isinstance(state, Split) and state.axis != axis:
            raise Conflict(_dims(state), "rows of it are replaced")
    split = [s.segments for s in (x, rows) if isinstance(s, Split)]
    if not split:
        return all_whole(node)
    state = settled(dims, axis, split[0] if len(split) == 1 else dims.unify(*split))
    return Located((state, state, WHOLE), state)


@rule("concat")
def _concat(dims: Dims, node: Node, states: list[State]) -> Located:
    along = node.attrs["axis"]
    split = [s for s in states if isinstance(s, Split)]
    if not split:
        return all_whole(node)
    if any(s.axis != split[0].axis for s in split):
        raise Conflict(_dims(*states), "values split along two axes are put together")
    axis = split[0].axis
    if axis != along:
        segments = (
            split[0].segments if len(split) == 1 else dims.unify(*(s.segments for s in split))
        )
        state = settled(dims, axis, segments)
        return Located((state, state), state)
    parts: list[Segments] = []
    operands: list[State] = []
    for index, state in enumerate(states):
        whole = ((Fraction(_size(node, index, axis)), None),)
        parts.append(state.segments if isinstance(state, Split) else whole)
        operands.append(state if isinstance(state, Split) else WHOLE)
    return Located(tuple(operands), settled(dims, axis, (*parts[0], *parts[1])))


@rule("kv_store")
def _kv_store(dims: Dims, node: Node, states: list[State]) -> Located:
    """The cache is split as the keys and values are, by their groups of heads."""
    cache, k, v = states[:3]
    if k is PARTIAL or v is PARTIAL or not any(isinstance(s, Split) for s in (cache, k, v)):
        return all_whole(node)
    segments = [s.segments for s in (k, v) if isinstance(s, Split) and s.axis == 1]
    segments += [cache.segments] if isinstance(cache, Split) else []
    if sum(isinstance(s, Split) for s in (cache, k, v)) != len(segments) or len(segments) < 2:
        raise Conflict(_dims(cache, k, v), "keys or values are whole")
    both = segments[0]
    for other in segments[1:]:
        both = dims.unify(both, other)
    state = settled(dims, 1, both)
    if not isinstance(state, Split):
        return all_whole(node)
    rows = Split(1, state.segments)
    return Located((Split(2, state.segments), rows, rows, WHOLE), Split(2, state.segments))


@rule("gather_pages", "kv_half")
def _pages(dims: Dims, node: Node, states: list[State]) -> Located:
    if isinstance(states[0], Split) and states[0].axis != 2:
        raise Conflict(_dims(states[0]), "a cache is split by heads")
    return _each_element(dims, node, states)


def _heads(
    dims: Dims, node: Node, heads: tuple[State, int, int], groups: tuple[State, int, int]
) -> tuple[Segments, Segments] | None:
    """Segments of an axis of heads, and of that of the groups they read; None where both are whole.
    Each is a state, the axis of heads and its size.
    """
    (a, a_axis, a_size), (b, b_axis, b_size) = heads, groups
    for state, axis in ((a, a_axis), (b, b_axis)):
        if isinstance(state, Split) and state.axis != axis:
            raise Conflict(_dims(a, b), f"{node.op} of values that are not split by heads")
    if not isinstance(a, Split) and not isinstance(b, Split):
        return None
    if not isinstance(a, Split) or (not isinstance(b, Split) and a_size != b_size):
        raise Conflict(_dims(a, b), "heads that read it, or groups that they read, are whole")
    if not isinstance(b, Split):
        return a.segments, a.segments
    if a_size == b_size:
        both = dims.unify(a.segments, b.segments)
        return both, both
    ratio = Fraction(a_size, b_size)
    edges, at = [], Fraction(0)
    for size, _ in dims.flat(b.segments):
        at += size
        edges.append(at)
    fine = dims.cut_at(a.segments, [e * ratio for e in edges])
    coarse, at = [], Fraction(0)
    for size, _ in fine:
        at += size
        coarse.append(at / ratio)
    several = dims.cut_at(b.segments, coarse)
    for (_, one), (_, other) in zip(fine, several, strict=True):
        if (one is None) != (other is None):
            raise Conflict([one, other], "heads that read it, or groups that they read, are whole")
        if one is not None and other is not None:
            dims.link(one, other)
    return fine, several


def _one_group(node: Node, heads: State, axis: int) -> bool:
    """Return whether heads are split that all read one group, which every rank can have."""
    return isinstance(heads, Split) and heads.axis == axis and _size(node, 1, 2) == 1


@rule("attention")
def _attention(dims: Dims, node: Node, states: list[State]) -> Located:
    q, k, v = states[:3]
    if k == v == WHOLE and _one_group(node, q, 2):
        _check_mask(node, (q, k, v))
        return _others(node, q, q)
    if isinstance(k, Split) and isinstance(v, Split) and k.axis == v.axis:
        dims.unify(k.segments, v.segments)
    elif isinstance(k, Split) or isinstance(v, Split):
        raise Conflict(_dims(q, k, v), "keys or values are whole")
    result = _heads(dims, node, (q, 2, _size(node, 0, 2)), (k, 2, _size(node, 1, 2)))
    if result is None:
        return all_whole(node)
    fine, coarse = result
    masks = _mask_states(node, states, 3, fine)
    return Located(
        (Split(2, fine), Split(2, coarse), Split(2, coarse), *masks), settled(dims, 2, fine)
    )


@rule("channel_attention")
def _channel_attention(dims: Dims, node: Node, states: list[State]) -> Located:
    """Each group by itself."""
    if not any(isinstance(state, Split) for state in states):
        return all_whole(node)
    split = [state for state in states if isinstance(state, Split)]
    if len(split) < len(states) or any(state.axis != 2 for state in split):
        raise Conflict(_dims(*states), "attention of channels that are not split by groups")
    segments = dims.unify(dims.unify(split[0].segments, split[1].segments), split[2].segments)
    state = settled(dims, 2, segments)
    return Located((state, state, state), state)


@rule("relative_queries", "relative_keys")
def _relative(dims: Dims, node: Node, states: list[State]) -> Located:
    """Each head by itself; tables are whole, but those that each head has one of."""
    x = states[0]
    if isinstance(x, Split) and x.axis != 2:
        raise Conflict(_dims(x), "distances are those of whole grids and heads")
    segments = x.segments if isinstance(x, Split) else ()
    own = [at for at in range(1, len(states)) if node.inputs[at] and _rank(node, at) == 3]
    for at in own:
        table = states[at]
        if isinstance(table, Split) and not (segments and table.axis == 1):
            raise Conflict(_dims(x, table), "heads and their tables of distances are cut otherwise")
        if isinstance(table, Split):
            segments = dims.unify(segments, table.segments)
    state = settled(dims, 2, segments) if segments else WHOLE
    split = isinstance(state, Split)
    tables = (Split(1, segments) if split and at in own else WHOLE for at in range(1, len(states)))
    return Located((state, *tables), state)


@rule("attn_scores")
def _attn_scores(dims: Dims, node: Node, states: list[State]) -> Located:
    q = states[0]
    if isinstance(q, Split) and states[1] == WHOLE and _one_group(node, q, 2):
        _check_mask(node, states[:2])
        return _others(node, q, Split(1, q.segments))
    result = _heads(
        dims, node, (states[0], 2, _size(node, 0, 2)), (states[1], 2, _size(node, 1, 2))
    )
    if result is None:
        return all_whole(node)
    return Located(
        (Split(2, result[0]), Split(2, result[1]), *_mask_states(node, states, 2, result[0])),
        settled(dims, 1, result[0]),
    )


def _mask_states(node: Node, states: list[State], index: int, heads: Segments) -> tuple[State, ...]:
    """Return what is required of the operands from the mask on: of one for each head a part,
    which is cut from the whole.
    """
    result: list[State] = [WHOLE] * (len(states) - index)
    mask = node.inputs[index] if result else None
    if mask is not None and len(mask.shape) > 2 and mask.shape[-3] > 1:
        if isinstance(states[index], Split):
            raise Conflict(_dims(states[index]), "a mask that is split before it is read")
        result[0] = Split(len(mask.shape) - 3, heads)
    return tuple(result)


def _check_mask(node: Node, states: Any) -> None:
    mask = node.inputs[3 if node.op == "attention" else 2] if len(node.inputs) > 2 else None
    if node.op == "attention" and len(node.inputs) <= 3:
        mask = None
    if mask is not None and len(mask.shape) > 2 and mask.shape[-3] > 1:
        raise Conflict(_dims(*states), "a mask of its own for each head")


@rule("attn_softmax")
def _attn_softmax(dims: Dims, node: Node, states: list[State]) -> Located:
    if isinstance(states[0], Split) and states[0].axis != 1:
        raise Conflict(_dims(states[0]), "scores are split by heads")
    return _each_element(dims, node, states)


@rule("attn_mix")
def _attn_mix(dims: Dims, node: Node, states: list[State]) -> Located:
    weights = states[0]
    if isinstance(weights, Split) and states[1] == WHOLE and _one_group(node, weights, 1):
        return _others(node, weights, Split(2, weights.segments))
    result = _heads(
        dims, node, (states[0], 1, _size(node, 0, 1)), (states[1], 2, _size(node, 1, 2))
    )
    if result is None:
        return all_whole(node)
    return Located((Split(1, result[0]), Split(2, result[1])), settled(dims, 2, result[0]))


@rule("moe")
def _moe(dims: Dims, node: Node, states: list[State]) -> Located:
    """Inside every expert: each rank has some of its neurons, and sums are partial."""
    gate = node.inputs[2]
    assert gate is not None
    size = gate.shape[1]
    segments = dims.see([(Fraction(size), dims.fresh(node.name, size))])
    if not isinstance(settled(dims, 1, segments), Split):
        return all_whole(node)
    quant = node.attrs.get("down_quant")
    inner = _in_blocks(dims, segments, quant, f"{node.name} is {quant}")
    for _, dim in inner:
        assert dim is not None
        dim.root.exact = True
    rows = Split(1, segments)
    shares = (WHOLE,) * (len(states) - 5)
    return Located((WHOLE, WHOLE, rows, rows, Split(2, inner, quant), *shares), PARTIAL)


@rule("short_conv")
def _short_conv(dims: Dims, node: Node, states: list[State]) -> Located:
    """Split by channels."""
    x = states[0]
    if not isinstance(x, Split):
        return all_whole(node)
    if x.axis != 1:
        raise Conflict(_dims(x), "a convolution reads all rows")
    segments = x.segments
    if isinstance(states[2], Split):
        segments = dims.unify(segments, states[2].segments)
    state = settled(dims, 1, segments)
    if not isinstance(state, Split):
        return all_whole(node)
    s = state.segments
    bias = (
        (Split(0, s),)
        if len(node.inputs) > 5 and node.inputs[5] is not None
        else (WHOLE,) * (len(states) - 5)
    )
    return Located((state, Split(0, s), Split(2, s), WHOLE, WHOLE, *bias), state)


@rule("linear_attention")
def _linear_attention(dims: Dims, node: Node, states: list[State]) -> Located:
    """Split by heads of values; a head of keys goes with those that read it."""
    q, k, v, decay, beta, state = states[:6]
    keys: State = WHOLE
    if q == k == WHOLE and isinstance(v, Split) and v.axis == 1 and _size(node, 0, 1) == 1:
        fine = v.segments  # of one group, which every rank has
    else:
        if isinstance(q, Split) and isinstance(k, Split):
            dims.unify(q.segments, k.segments)
        elif isinstance(q, Split) or isinstance(k, Split):
            raise Conflict(_dims(q, k), "queries or keys are whole")
        match = _heads(dims, node, (v, 1, _size(node, 2, 1)), (q, 1, _size(node, 0, 1)))
        if match is None:
            return all_whole(node)
        fine, coarse = match
        keys = Split(1, coarse)
    for other, axis in ((decay, 1), (beta, 1), (state, 2)):
        if isinstance(other, Split):
            if other.axis != axis:
                raise Conflict(_dims(v, other), "it is not split by heads")
            fine = dims.unify(fine, other.segments)
    result = settled(dims, 1, fine)
    if not isinstance(result, Split):
        return all_whole(node)
    s = Split(1, result.segments)
    return Located((keys, keys, s, s, s, Split(2, result.segments), WHOLE, WHOLE), result)


@rule("state_store")
def _state_store(dims: Dims, node: Node, states: list[State]) -> Located:
    """state [N, R, ...], rows [S R, ...]: an axis of one is the next of the other."""
    state, rows = states[:2]
    if not isinstance(rows, Split):
        if isinstance(state, Split):
            raise Conflict(_dims(state), "what is stored is whole")
        return all_whole(node)
    if rows.axis == 0:
        raise Conflict(_dims(rows), "rows are stored whole")
    segments = rows.segments
    if isinstance(state, Split):
        if state.axis != rows.axis + 1:
            raise Conflict(_dims(state, rows), "a state split along another axis")
        segments = dims.unify(segments, state.segments)
    result = settled(dims, rows.axis + 1, segments)
    if not isinstance(result, Split):
        return all_whole(node)
    return Located((result, Split(rows.axis, result.segments), WHOLE), result)
