"""Fusion rules: what one kernel can do together. Each rule looks for its nodes and says what stands
for them, and is right on its own; the order is that in which most is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from mtmd.kernels import ops
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.plan.fusion.rewrite import Graph, Match, Rule
from mtmd.kernels.quantization.kv_rows import cached_parts

WIDE = 8  # rows of a weight: columns of a joint product begin where 16 bytes do, in 16-bit types


def paged_attention(graph: Graph) -> Iterator[Match]:
    """Attention to what is gathered from a cache, where it is known whose the pages are, reads the
    pages where they lie.
    """
    for node in graph.of("attention"):
        q, k, v, mask, bounds = (*node.inputs, None, None)[:5]
        assert q is not None and k is not None and v is not None
        if not (k.op == v.op == "gather_pages") or k.inputs != v.inputs:
            continue
        cache, pages = k.inputs
        assert cache is not None and pages is not None
        values = cached_parts(cache.shape[0], k.attrs.get("quant")) - 1
        if k.attrs["which"] != 0 or {**k.attrs, "which": values} != v.attrs:
            continue
        starts = pages.attrs.get("starts")
        limited = node.attrs.get("causal") or node.attrs.get("window") is not None
        if starts is None or mask is not None or bounds is None or limited:
            continue
        if q.shape[0] != 1 or bounds.shape != (q.shape[1], 2) or v.shape != k.shape:
            continue
        made = ops.paged_attention(
            q,
            cache,
            pages,
            bounds,
            starts,
            size=k.attrs["size"],
            scale=node.attrs["scale"],
            softcap=node.attrs.get("softcap"),
            name=node.name,
            **_quantized(k),
        )
        # Gemma 3n's and Gemma 4's last layers read what an earlier one gathers
        yield Match((node,), made, {node: made}, shared=(k, v))


def turned_queries(graph: Graph) -> Iterator[Match]:
    """Queries are normalised and turned by the attention that reads them."""
    for node in graph.of("paged_attention"):
        q, *others = node.inputs
        assert q is not None
        if len(others) > 4 or q.op != "reshape" or not graph.only_for(q, node):
            continue
        source = q.inputs[0]
        assert source is not None
        turned = _turned(graph, source, q)
        # Heads as they were, and a batch of one around them
        if turned is None or q.shape != (1, *source.shape):
            continue
        heads = ops.reshape(turned.x, shape=q.shape, name=q.name)
        attrs = {**node.attrs, "eps": turned.eps, **turned.attrs}
        made = ops.paged_attention(
            heads, *others, turned.table, turned.norm, name=node.name, **attrs
        )
        yield Match((node, *turned.nodes), made, {node: made})


def stored_keys(graph: Graph) -> Iterator[Match]:
    """Keys are normalised and turned, and values normalised, on their way into the cache."""
    for node in graph.of("kv_store"):
        cache, k, v, slots = node.inputs
        assert k is not None and v is not None
        turned = _turned(graph, k, node)
        if turned is None:
            continue
        nodes, v_eps = [node, *turned.nodes], None
        if v.op == "rms_norm" and (*v.inputs, None)[1] is None and graph.only_for(v, node):
            nodes.append(v)
            v_eps, v = v.attrs["eps"], v.inputs[0]
        made = ops.rope_store(
            cache,
            turned.x,
            v,
            slots,
            turned.table,
            turned.norm,
            name=node.name,
            eps=turned.eps,
            v_eps=v_eps,
            **turned.attrs,
            **_quantized(node),
        )
        yield Match(tuple(nodes), made, {node: made})


def _quantized(node: Node) -> dict[str, str]:
    """The attribute of ops on a cache that names the type of its rows."""
    return {"quant": node.attrs["quant"]} if node.attrs.get("quant") else {}


class _Turned:
    """`rope`, and the norm of heads before it if there is one."""

    def __init__(self, rope: Node, norm: Node | None):
        self.nodes = (rope,) if norm is None else (rope, norm)
        first, self.table = rope.inputs
        self.x = first if norm is None else norm.inputs[0]
        self.norm = None if norm is None else (*norm.inputs, None)[1]
        self.eps = None if norm is None else norm.attrs["eps"]
        self.attrs = {"pairs": rope.attrs.get("pairs", "half"), "parts": rope.attrs.get("parts", 1)}


def _turned(graph: Graph, node: Node, user: Node) -> _Turned | None:
    if node.op != "rope" or len(node.shape) != 3 or not graph.only_for(node, user):
        return None
    before = node.inputs[0]
    assert before is not None
    is_normed = before.op == "rms_norm" and graph.only_for(before, node)
    return _Turned(node, before if is_normed else None)


def low_rank_residuals(graph: Graph) -> Iterator[Match]:
    """A residual beside one of low rank, each with a norm of what is added; the norm of both."""
    for norm in graph.of("rms_norm"):
        scaled, weight = (*norm.inputs, None)[:2]
        assert scaled is not None
        total = scaled.inputs[0] if scaled.op == "scale" else None
        if total is None or weight is None or scaled.attrs.get("offset"):
            continue
        if total.op != "add" or not graph.only_for(total, scaled):
            continue
        nodes, operands = [norm, scaled, total], list[Node | None]()
        eps = {norm.attrs["eps"]}
        for part in total.operands:
            added, x = part.inputs if part.op == "add" else (None, None)
            if added is None or x is None or not graph.only_for(part, total):
                break
            if not _is_added_norm(graph, added, part) or x.type.shape != added.shape:
                break
            nodes += [part, added]
            operands += [x, *added.inputs]
            eps.add(added.attrs["eps"])
        if len(operands) != 6 or len(eps) > 1:
            continue
        both = ops.laurel(
            *operands,
            weight,
            eps=norm.attrs["eps"],
            factor=scaled.attrs["factor"],
            name=f"{scaled.name}+{norm.name}",
        )
        yield Match(tuple(nodes), both, _halves(both, scaled, norm))


def residual_norms(graph: Graph) -> Iterator[Match]:
    """A sum, the norm of it, and, where there is one, the norm of what is added."""
    for norm in graph.of("rms_norm"):
        total, weight = (*norm.inputs, None)[:2]
        assert total is not None
        if total.op != "add" or weight is None:
            continue
        x, y = total.inputs
        assert x is not None and y is not None
        if x.type != y.type or not x.type.is_contiguous or x is y:
            continue
        if _is_added_norm(graph, x, total):
            x, y = y, x
        nodes, y_norm, y_eps = [norm, total], None, None
        if _is_added_norm(graph, y, total):
            nodes.append(y)
            y_eps, y_norm, y = y.attrs["eps"], y.inputs[1], y.inputs[0]
        both = ops.add_norm(
            x,
            y,
            weight,
            y_norm,
            eps=norm.attrs["eps"],
            y_eps=y_eps,
            name=f"{total.name}+{norm.name}",
        )
        yield Match(tuple(nodes), both, _halves(both, total, norm))


def _halves(both: Node, total: Node, norm: Node) -> dict[Node, Node]:
    """A sum and its norm, which one op makes, one behind the other."""
    return {n: ops.half(both, which=i, name=n.name) for i, n in enumerate((total, norm))}


def _is_added_norm(graph: Graph, node: Node, total: Node) -> bool:
    return (
        node.op == "rms_norm"
        and (*node.inputs, None)[1] is not None
        and graph.only_for(node, total)
    )


def residual_layer_norms(graph: Graph) -> Iterator[Match]:
    """A sum and the layer norm of it, and, where there is one, the scale of what is added."""
    for norm in graph.of("layer_norm"):
        total, weight, bias = (*norm.inputs, None)[:3]
        assert total is not None
        if total.op != "add":
            continue
        x, y = total.inputs
        assert x is not None and y is not None
        if x.type != y.type or not x.type.is_contiguous:
            continue
        # One that is kept for somebody further on would keep its norm, beside which it lies.
        if len(graph.users[total]) > 2:
            continue
        if _is_scaled(graph, x, total):
            x, y = y, x
        nodes, scale = [norm, total], None
        if _is_scaled(graph, y, total):
            nodes.append(y)
            y, scale = y.inputs
        both = ops.add_layer_norm(
            x, y, weight, bias, scale, eps=norm.attrs["eps"], name=f"{total.name}+{norm.name}"
        )
        yield Match(tuple(nodes), both, _halves(both, total, norm))


def _is_scaled(graph: Graph, node: Node, total: Node) -> bool:
    """Return whether it is scaled by a weight for each column."""
    value, scale = node.inputs if node.op == "mul" else (None, None)
    return (
        scale is not None
        and value is not None
        and value.type == node.type
        and scale.op == "weight"
        and scale.shape == node.shape[-1:]
        and scale.dtype == node.dtype
        and graph.only_for(node, total)
    )


def gated_norms(graph: Graph) -> Iterator[Match]:
    """The norm of heads, rounded where it was of more bits than its gate, and the gated unit."""
    for node in graph.of("silu_mul"):
        gate, normed = node.inputs
        assert gate is not None and normed is not None
        rounded = _source(graph, normed, "cast", node)
        norm = rounded or normed
        if norm.op != "rms_norm" or not graph.only_for(norm, normed if rounded else node):
            continue
        x, weight = (*norm.inputs, None)[:2]
        assert x is not None
        if weight is None or len(x.shape) != 3 or gate.dtype != normed.dtype:
            continue
        made = ops.gated_norm(x, weight, gate, eps=norm.attrs["eps"], name=node.name)
        yield Match(tuple(dict.fromkeys((node, normed, norm))), made, {node: made})


def sigmoid_gates(graph: Graph) -> Iterator[Match]:
    """Yield what a sigmoid lets through, and what it alone is added to."""
    for node in graph.of("mul"):
        x, gate = node.inputs
        assert x is not None and gate is not None
        opened = _source(graph, gate, "sigmoid", node)
        if opened is None or opened.dtype != x.dtype:
            continue
        if opened.shape not in (x.shape, (*x.shape[:-1], 1)):
            continue
        total = next(iter(graph.users.get(node, ())), node)
        added = [i for i in total.operands if i is not node]
        if (
            total.op == "add"
            and graph.only_for(node, total)
            and [i.type for i in added] == [node.type]
        ):
            made = ops.sigmoid_gate(x, opened, *added, name=total.name)
            yield Match((total, node, gate), made, {total: made})
        else:
            made = ops.sigmoid_gate(x, opened, name=node.name)
            yield Match((node, gate), made, {node: made})


def delta_gates(graph: Graph) -> Iterator[Match]:
    """Yield what each head of the gated delta rule keeps and writes, and the step of one of Mamba-2
    and what it keeps by that.
    """
    for node in graph.of("linear_attention"):
        decay, gain = node.inputs[3:5]
        assert decay is not None and gain is not None
        soft = _source(graph, decay, "mul", node)
        if soft is None or soft.op != "softplus" or soft in graph.outputs:
            continue
        total, users = soft.inputs[0], (decay, node) if gain is soft else (decay,)
        if total is None or total.op != "add" or set(graph.users[soft]) != set(users):
            continue
        if gain is not soft and (gain.op != "sigmoid" or not graph.only_for(gain, node)):
            continue
        (alpha, dt), a = total.inputs, decay.inputs[1]
        if not graph.only_for(total, soft):
            continue
        nodes = [decay, soft, total, *([gain] if gain is not soft else [])]
        inputs = [alpha, gain.inputs[0] if gain is not soft else None]
        for at, (value, user) in enumerate(zip(tuple(inputs), (total, gain), strict=True)):
            if value is not None and (wide := _source(graph, value, "cast", user)):
                nodes.append(value)
                inputs[at] = wide
        assert inputs[0] is not None and dt is not None and a is not None
        if any(w.shape != decay.shape[1:] or w.dtype != torch.float32 for w in (dt, a)):
            continue
        both = ops.delta_gates(inputs[0], dt, a, inputs[1], name=f"{decay.name}+{gain.name}")
        yield Match(tuple(nodes), both, _halves(both, decay, gain))


def _source(
    graph: Graph, node: Node, op: str, user: Node, source_op: str | None = None
) -> Node | None:
    """The first operand of a node of such an op, which is only for `user`; None of another."""
    source = node.inputs[0] if node.inputs else None
    if node.op != op or not graph.only_for(node, user) or source is None:
        return None
    return source if source_op in (None, source.op) else None


def updated_streams(graph: Graph) -> Iterator[Match]:
    """Streams of each token mixed by what a router says of the active one, or corrected by what a
    layer made of that, as much as a router says of it.
    """
    for node in graph.of("add_mixed"):
        streams, x, shares = node.inputs
        assert streams is not None and x is not None and shares is not None
        routed = _Routed.match(graph, shares, node)
        if routed is None:
            continue
        nodes, read = [node, *routed.nodes], routed.read
        y: Node | None = None
        one = read
        if x is not streams or routed.added:
            change = _source(graph, x, "reshape", node)
            if change is None or change.op != "add" or not graph.only_for(change, x):
                continue
            y, less = change.inputs
            assert y is not None and less is not None
            subtracted = _source(graph, less, "scale", change)
            if y is not read or subtracted is None or not routed.added or y.dtype != streams.dtype:
                continue
            if (less.attrs["factor"], less.attrs.get("offset", 0.0)) != (-1.0, 0.0):
                continue
            nodes += [change, less]
            one = subtracted
        active = _stream_of(one, streams)
        if active is None:
            continue
        made = ops.altup(streams, *routed.weights, y, active=active, name=node.name, **routed.attrs)
        yield Match(tuple(nodes), made, {node: made})


@dataclass(frozen=True)
class _Routed:
    """Shares of a token's streams: a product of what a router says of the rows `read`, behind their
    norm. weights: the norm's, the router's, the product's; added: 1 is, to each.
    """

    nodes: tuple[Node, ...]
    read: Node
    weights: tuple[Node, ...]
    attrs: Mapping[str, float]
    added: bool

    @classmethod
    def match(cls, graph: Graph, shares: Node, user: Node) -> _Routed | None:
        at = _source(graph, shares, "reshape", user)
        if at is None or not graph.only_for(at, shares):
            return None
        added = at.op == "scale"
        above = ("matmul", "softcap", "matmul", "scale", "rms_norm")
        chain = []
        for op in ("scale", *above) if added else above:
            chain.append(at)
            source = _source(graph, at, op, chain[-2]) if len(chain) > 1 else at.inputs[0]
            if at.op != op or source is None:
                return None
            at = source
        product, capped, router, scaled, norm = chain[added:]
        weights = (*norm.inputs, None)[1], router.inputs[1], product.inputs[1]
        plain = all(
            n.inputs[2:] in ((), (None,)) and not n.attrs.get("quant") for n in (product, router)
        )
        if not plain or None in weights or capped.attrs["cap"] != 1.0 or scaled.attrs.get("offset"):
            return None
        if added and (chain[0].attrs["factor"], chain[0].attrs.get("offset")) != (1.0, 1.0):
            return None
        attrs = {"eps": norm.attrs["eps"], "scale": scaled.attrs["factor"]}
        return cls(tuple(chain), at, weights, attrs, added)  # type: ignore[arg-type]


def _stream_of(node: Node, streams: Node) -> int | None:
    """The number of the stream that a node is, [T, D] of [T, N, D]; None if it is none."""
    flat = node.inputs[0] if node.op == "columns" else None
    if flat is None or flat.op != "reshape" or flat.inputs[0] is not streams:
        return None
    count, width = streams.shape[1:]
    start, stop = _between(node)
    if flat.shape != (streams.shape[0], count * width) or start % width or stop - start != width:
        return None
    return start // width


def activated_products(graph: Graph) -> Iterator[Match]:
    """A product and GELU of it: in any form where weights are quantized, whose products are our own
    kernels; else by the tanh approximation and with a bias, as cuBLAS has it and no other form.
    """
    for node in graph.of("gelu"):
        product = node.inputs[0]
        assert product is not None
        if product.op != "matmul" or not graph.only_for(product, node):
            continue
        x, w, bias = (*product.inputs, None)[:3]
        if not product.attrs.get("quant") and (bias is None or node.attrs["approximate"] != "tanh"):
            continue
        made = ops.matmul_gelu(x, w, bias, name=node.name, **product.attrs, **node.attrs)
        yield Match((node, product), made, {node: made})


def joint_products(graph: Graph) -> Iterator[Match]:
    """Products of one value with several weights are one product with all their rows, each a few
    columns of its result.
    """
    groups: dict[object, list[Node]] = {}
    for node in graph.of("matmul"):
        x, w, bias = (*node.inputs, None)[:3]
        assert x is not None and w is not None
        weights = [i for i in (w, bias) if i is not None]
        if any(i.op != "weight" or graph.users[i] != (node,) for i in weights):
            continue
        if w.shape[0] % WIDE or not w.type.is_contiguous or "parts" in w.attrs:
            continue
        sources = tuple(id(i.attrs["source"]) for i in weights)
        key = x, w.dtype, w.shape[1:], node.attrs.get("quant"), sources
        groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        if len(nodes) == 1:
            continue
        x, w, bias = (*nodes[0].inputs, None)[:3]
        joint = ops.matmul(
            x,
            _joint(n.inputs[1] for n in nodes),
            _joint(n.inputs[2] for n in nodes) if bias is not None else None,
            name="+".join(n.name for n in nodes),
            **nodes[0].attrs,
        )
        instead, start = {}, 0
        for node in nodes:
            stop = start + node.shape[-1]
            instead[node] = ops.columns(joint, start=start, stop=stop, name=node.name)
            start = stop
        yield Match(tuple(nodes), joint, instead)


def turned_columns(graph: Graph) -> Iterator[Match]:
    """Queries and keys that are columns of one product are turned where they lie in it, and all
    who read other columns of it read them behind that.
    """
    for nodes in _next_to_each_other(graph, "rope"):
        columns, table = _columns_of(nodes[0]), nodes[0].inputs[1]
        product, heads = columns.inputs[0], nodes[0].inputs[0]
        assert product is not None and heads is not None
        users = graph.users[product]
        if product.op != "matmul" or product in graph.outputs:
            continue
        if any(u.op != "columns" or u in graph.outputs for u in users):
            continue
        made = ops.rope_columns(
            product,
            table,
            start=_between(columns)[0],
            stop=_between(_columns_of(nodes[-1]))[1],
            head=heads.shape[-1],
            name="+".join(node.name for node in nodes),
            **nodes[0].attrs,
        )
        instead = {u: ops.columns(made, name=u.name, **u.attrs) for u in users}
        for node in nodes:
            part = instead.pop(_columns_of(node))
            instead[node] = ops.reshape(part, shape=node.shape, name=node.name)
        yield Match(tuple(nodes), made, instead)


def joint_l2_norms(graph: Graph) -> Iterator[Match]:
    """The norms of heads next to each other, as queries and keys of the delta rule are."""
    for nodes in _next_to_each_other(graph, "l2_norm"):
        locations = [_between(_columns_of(node)) for node in nodes]
        width, name = nodes[0].shape[-1], "+".join(node.name for node in nodes)
        source, first, last = _columns_of(nodes[0]).inputs[0], locations[0][0], locations[-1][1]
        both = ops.columns(source, start=first, stop=last, name=f"{name}.columns")
        shape = (*both.shape[:-1], both.shape[-1] // width, width)
        heads = ops.reshape(both, shape=shape, name=f"{name}.heads")
        made = ops.l2_norm(heads, name=name, **nodes[0].attrs)
        flat = ops.reshape(made, shape=both.shape, name=f"{name}.flat")
        instead = {}
        for node, (start, stop) in zip(nodes, locations, strict=True):
            columns = ops.columns(
                flat, start=start - first, stop=stop - first, name=f"{node.name}.columns"
            )
            instead[node] = ops.reshape(columns, shape=node.shape, name=node.name)
        yield Match(tuple(nodes), made, instead)


def _next_to_each_other(graph: Graph, op: str) -> Iterator[list[Node]]:
    """Nodes of an op that works on each head by itself, and does the same to heads that are columns
    of one value, without a gap between them.
    """
    groups: dict[object, list[Node]] = {}
    for node in graph.of(op):
        heads, *others = node.inputs
        assert heads is not None
        columns = heads.inputs[0] if heads.op == "reshape" else None
        if columns is None or columns.op != "columns" or node in graph.outputs:
            continue
        if heads.shape[:-2] != columns.shape[:-1]:
            continue
        if not graph.only_for(heads, node) or not graph.only_for(columns, heads):
            continue
        key = columns.inputs[0], *others, heads.shape[-1], tuple(node.attrs.items())
        groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        nodes.sort(key=lambda node: _between(_columns_of(node)))
        locations = [_between(_columns_of(node)) for node in nodes]
        if len(nodes) > 1 and all(a[1] == b[0] for a, b in pairwise(locations)):
            yield nodes


def _columns_of(node: Node) -> Node:
    """The columns of a product whose heads a node reads."""
    heads = node.inputs[0]
    assert heads is not None and heads.inputs[0] is not None
    return heads.inputs[0]


def gated_products(graph: Graph) -> Iterator[Match]:
    """The product with gate and up, where weights are quantized, and the gated unit of its halves;
    cuBLAS has no such end of a product.
    """
    for op in ("silu_mul", "gelu_mul"):
        for node in graph.of(op):
            gate, up = node.inputs
            assert gate is not None and up is not None
            product = gate.inputs[0] if gate.op == "columns" else None
            if product is None or product.op != "matmul" or not product.attrs.get("quant"):
                continue
            if up.op != "columns" or up.inputs != (product,):
                continue
            middle, end = node.shape[-1], product.shape[-1]
            if _between(gate) != (0, middle) or _between(up) != (middle, end):
                continue
            halves = graph.only_for(gate, node) and graph.only_for(up, node)
            if not halves or set(graph.users[product]) != {gate, up} or product in graph.outputs:
                continue
            made = ops.matmul_gated(
                *product.inputs,
                name=node.name,
                act=node.attrs.get("approximate", "silu"),
                **product.attrs,
            )
            yield Match((node, gate, up, product), made, {node: made})


def _between(columns: Node) -> tuple[int, int]:
    return columns.attrs["start"], columns.attrs["stop"]


def _joint(weights: Iterator[Node | None]) -> Node:
    """One parameter that holds several, row after row; a plan's memory has each of them once."""
    parts = [w for w in weights if w is not None]
    shape = (sum(w.shape[0] for w in parts), *parts[0].shape[1:])
    return Node(
        "weight",
        (),
        Type.contiguous(shape, parts[0].dtype),
        {"source": parts[0].attrs["source"], "parts": tuple(parts)},
        "+".join(w.name for w in parts),
    )


RULES: tuple[Rule, ...] = (
    paged_attention,
    turned_queries,
    stored_keys,
    updated_streams,
    low_rank_residuals,
    residual_norms,
    residual_layer_norms,
    gated_norms,
    delta_gates,
    sigmoid_gates,
    activated_products,
    joint_products,
    turned_columns,
    joint_l2_norms,
    gated_products,
)
