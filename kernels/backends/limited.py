"""A backend that refuses what it is told to: how a plan falls back, seen on any machine.

`--refuse attention:head=72` on the command line puts it in front of the real device, as a stand-in
for an accelerator that lacks the kernel; tests use it for every rule of placement.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mtmd.base.errors import OptionError
from mtmd.kernels.backends.backend import Backend, Run
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
FACTS = ("head", "batch", "rows", "width")
# Ops on tokens, one after another: no dimension of theirs counts as a batch.
NO_BATCH = (
    "linear_attention",
    "gated_norm",
    "gather_pages",
    "half",
    "kv_store",
    "kv_half",
    "paged_attention",
    "rope",
    "rope_columns",
    "rope_store",
    "state_store",
)
_RULE = re.compile(
    r"(?P<op>\w+|\*)(?::(?:(?P<fact>\w+)(?P<sign>[=<>])(?P<number>\d{1,9})|(?P<dtype>bf16|fp32|fp16)))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Rule:
    """`OP`, `OP:FACT=N` (also < and >), `OP:DTYPE`, or `OP:/REGEX/` on node names. OP may be
    `*`.
    """

    text: str
    op: str = "*"
    fact: str | None = None
    sign: str = "="
    number: int = 0
    dtype: str | None = None
    name: re.Pattern[str] | None = None

    @staticmethod
    def parse(text: str) -> Rule:
        op, colon, pattern = text.partition(":")
        if (
            colon
            and len(pattern) > 2
            and pattern[0] == pattern[-1] == "/"
            and (op == "*" or op in OPS)
        ):
            try:
                return Rule(text, op, name=re.compile(pattern[1:-1]))
            except (re.error, OverflowError, RecursionError) as error:
                raise OptionError(
                    f"refuse rule {text!r}: not a regular expression ({error})"
                ) from error
        match = _RULE.fullmatch(text)
        if (
            not match
            or (match["op"] != "*" and match["op"] not in OPS)
            or (match["fact"] and match["fact"] not in FACTS)
        ):
            raise OptionError(
                f"refuse rule {text!r}: expected OP, OP:FACT=N, OP:DTYPE or OP:/NAME REGEX/, with "
                "OP one of "
                f"{', '.join(sorted(OPS))} or *, and FACT one of {', '.join(FACTS)}"
            )
        return Rule(
            text,
            match["op"],
            match["fact"],
            match["sign"] or "=",
            int(match["number"] or 0),
            match["dtype"],
        )

    def refuses(self, node: Node) -> str | None:
        """Why this rule refuses the node, or None."""
        if self.op not in ("*", node.op):
            return None
        if self.name:
            return f"name matches /{self.name.pattern}/" if self.name.search(node.name) else None
        if self.dtype:
            return (
                f"dtype {self.dtype} is not supported"
                if name_of(node.dtype) == self.dtype
                else None
            )
        if self.fact is None:
            return f"op {node.op} is not supported"
        value = _fact(node, self.fact)
        if value is None or not COMPARE[self.sign](value, self.number):
            return None
        return f"{self.fact} {'size ' if self.fact == 'head' else ''}{value} is not supported"


def _fact(node: Node, fact: str) -> int | None:
    first = next(node.operands, node)
    if fact == "head":
        return (
            first.shape[-1] if node.op in ("attention", "attn_scores", "paged_attention") else None
        )
    if fact == "width":
        return first.shape[-1]
    if len(first.shape) < 3 or node.op in NO_BATCH:
        return None
    # Scores are [B, H, T, S], other operands [B, T, ...].
    if fact == "rows" and node.op in ("attn_softmax", "attn_mix"):
        return first.shape[2]
    return first.shape[0] if fact == "batch" else first.shape[1]


class Limited:
    """Runs what `inner` runs, in a memory space of its own, less what the rules refuse."""

    native = False

    def __init__(self, inner: Backend, rules: Iterable[str | Rule]):
        self.inner = inner
        self.rules = tuple(r if isinstance(r, Rule) else Rule.parse(r) for r in rules)
        self.name, self.device, self.space = "limited", inner.device, "limited"
        self.fuses, self.blocks, self.recorder = inner.fuses, inner.blocks, inner.recorder
        self.side_streams, self.records = inner.side_streams, inner.records
        self.large_batches = inner.large_batches

    @property
    def queue_bytes(self) -> int:
        return self.inner.queue_bytes

    def rejects(self, node: Node) -> str | None:
        refused = (rule.refuses(node) for rule in self.rules)
        return next((reason for reason in refused if reason), None) or self.inner.rejects(node)

    def lower(self, node: Node, in_place: bool = False) -> Run:
        return self.inner.lower(node, in_place)

    def workspace(self, node: Node, exact: bool = True) -> int:
        return self.inner.workspace(node, exact)

    def side_stream(self, use: str) -> SideStream | None:
        return self.inner.side_stream(use)

    def synchronize(self) -> None:
        self.inner.synchronize()
