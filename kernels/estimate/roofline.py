"""Estimate of the time that a plan would take on a card: a roofline for each node, and the host
that launches them.

    device = sum over nodes of max(bytes / (bandwidth x eb), FLOPs / (rate x ef),
                                   cycles / (threads' cycles a second x ei), launches x FLOOR)
    host   = torch launches x t + Triton launches x u + nodes x STEP, or REPLAY + outputs x t
    time   = max(host, device)

`cycles` are those of threads that unpack quantized weights (`unpacking.py`), of a card of which a
kernel with fewer programs than multiprocessors uses a part. A collective of several ranks takes the
device as long as `links.py` says, and the host `host`. Kernels are launched one after another by
the host while the device works, so the slower of the two is what one waits for. A plan that can be
recorded (`kernels/plan/graph_replay.py`) is replayed from its third run on, which costs the host
the same whatever is in it, and a copy of each output that lies in no state. Bytes, FLOPs, cycles
and launches are counted from the plan; eb, ef, ei, t, u, FLOOR, STEP and REPLAY are the `Factors`
below. **None of this was run on a GPU**: each has a middle and a range, and so has the time.
docs/gpu.md says where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import Card
from mtmd.kernels.estimate.launches import Cost, copied_out, cost
from mtmd.kernels.estimate.links import PARTS, REACHED, Link, exchange_s
from mtmd.kernels.estimate.unpacking import UNPACKS
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.graph_replay import why_not
from mtmd.kernels.plan.scheduler import Plan

UNCONFIRMED = "not confirmed by a run"  # of all times, until those of a card were compared with one
BANDWIDTH, FLOPS, LAUNCHES, EXCHANGE = "bandwidth", "FLOPs", "launches", "exchange"
UNPACKING = "unpacking"
PRODUCTS = (
    "attention",
    "paged_attention",
    "attn_scores",
    "attn_mix",
    "channel_attention",
    "linear_attention",
)


@dataclass(frozen=True)
class Factors:
    """Parts of the published rates that are reached, and seconds.

    bandwidth: of reading and writing; quantized: the same, in products with quantized weights;
    instructions: of the rate of instructions, in unpacking those, None where they were not counted;
    product: of the rate of matrix products; attention: the same, of attention kernels.
    torch_launch, triton_launch: the host's time for one; floor: the least a kernel takes on the
    device; step: the host's time for a node beside its launches; replay: its time for a whole plan
    that is recorded, with the copy of its inputs.
    """

    bandwidth: float
    quantized: float
    instructions: float | None
    product: float
    attention: float
    torch_launch: float
    triton_launch: float
    floor: float
    step: float
    replay: float


US = 1e-6
MIDDLE, SLOW, FAST = "middle", "slow", "fast"
# Sources: docs/gpu.md, "Where the factors come from".
NVIDIA = {
    SLOW: Factors(0.55, 0.20, 0.30, 0.40, 0.20, 8 * US, 60 * US, 3 * US, 0.5 * US, 150 * US),
    MIDDLE: Factors(0.75, 0.60, 0.53, 0.60, 0.32, 5 * US, 25 * US, 2 * US, 0.33 * US, 60 * US),
    FAST: Factors(0.90, 0.85, 0.84, 0.80, 0.46, 3 * US, 10 * US, 1.5 * US, 0.2 * US, 30 * US),
}
AMD = {
    SLOW: Factors(0.45, 0.10, None, 0.25, 0.08, 12 * US, 70 * US, 5 * US, 0.5 * US, 200 * US),
    MIDDLE: Factors(0.65, 0.20, None, 0.45, 0.20, 7 * US, 30 * US, 3 * US, 0.33 * US, 80 * US),
    FAST: Factors(0.85, 0.30, None, 0.60, 0.35, 4 * US, 12 * US, 2 * US, 0.2 * US, 40 * US),
}


def factors_of(card: Card) -> dict[str, Factors]:
    return AMD if card.target.startswith("hip") else NVIDIA


@dataclass(frozen=True)
class OpShare:
    """All nodes of one op that run the same way. `ms` is device time, in the middle of its range;
    `bound` is what takes most of it.
    """

    op: str
    kernel: str
    nodes: int
    launches: int
    gflop: float
    mib: float
    ms: float
    bound: str


@dataclass(frozen=True)
class Estimate:
    """Estimate for one run of a plan. `ms` lies between `fast_ms` and `slow_ms`; `host_ms` and
    `device_ms` are the two that it is the larger of. `bound`: bandwidth, FLOPs, unpacking, launches
    or exchange. `exchange_ms` of `device_ms` are collectives'.
    """

    ms: float
    fast_ms: float
    slow_ms: float
    bound: str
    host_ms: float
    device_ms: float
    launches: int
    gflop: float
    gib: float
    exchange_ms: float = 0.0

    def plus(self, other: Estimate, times: int = 1) -> Estimate:
        """This run and then `times` that one."""
        longer = self if self.ms >= other.ms * times else other
        return Estimate(
            self.ms + times * other.ms,
            self.fast_ms + times * other.fast_ms,
            self.slow_ms + times * other.slow_ms,
            longer.bound,
            self.host_ms + times * other.host_ms,
            self.device_ms + times * other.device_ms,
            self.launches + times * other.launches,
            self.gflop + times * other.gflop,
            self.gib + times * other.gib,
            self.exchange_ms + times * other.exchange_ms,
        )


def estimate(plan: Plan, target: Target, card: Card, link: Link | None = None) -> Estimate | None:
    """Return how long one run of `plan` takes on `card`, where it is one rank's of several over
    `link`; None where the card's rates are not known, or where some of the plan runs elsewhere,
    which this says nothing of.
    """
    if not card.is_known or any(step.backend is not target for step in plan.steps):
        return None
    if link is None and any(step.node.op in PARTS for step in plan.steps):
        return None
    costs = [(step.node, cost(step, target)) for step in plan.steps]
    factors = factors_of(card)
    copies = copied_out(plan) if _is_replayed(plan, target) else None
    times = {name: _times(costs, card, f, copies, link, name) for name, f in factors.items()}
    host, device, causes = times[MIDDLE]
    return Estimate(
        max(host, device) * 1e3,
        max(times[FAST][:2]) * 1e3,
        max(times[SLOW][:2]) * 1e3,
        LAUNCHES if host > device else max(causes, key=lambda cause: causes[cause]),
        host * 1e3,
        device * 1e3,
        sum(c.torch + c.triton for _, c in costs) + len(copies or ()),
        plan.flops / 1e9,
        sum(c.bytes for c in (*(c for _, c in costs), *(copies or ()))) / 2**30,
        causes[EXCHANGE] * 1e3,
    )


def _is_replayed(plan: Plan, target: Target) -> bool:
    return why_not(plan, lambda node: target.choose(node).kernel is None) is None


def shares(plan: Plan, target: Target, card: Card | None) -> tuple[OpShare, ...]:
    """The plan's nodes by op and kernel, most time first; without a card whose rates are known,
    most launches first, and no times. Copies of a replayed run's outputs are a row of their own.
    """
    rows: dict[tuple[str, str], list[tuple[Node, Cost]]] = {}
    for step in plan.steps:
        if step.node.alias and OPS.get(step.node.op) and OPS[step.node.op].is_view:
            continue
        rows.setdefault((step.node.op, _kernel(step.node, step.backend, target)), []).append(
            (step.node, cost(step, target))
        )
    result = []
    for (op, kernel), costs in rows.items():
        device, causes = 0.0, {LAUNCHES: 0.0}
        if card is not None and card.is_known:
            _, device, causes = _times(costs, card, factors_of(card)[MIDDLE])
        result.append(
            OpShare(
                op,
                kernel,
                len(costs),
                sum(c.torch + c.triton for _, c in costs),
                sum(OPS[n.op].flops(n) for n, _ in costs if n.op != "copy") / 1e9,
                sum(c.bytes for _, c in costs) / 2**20,
                device * 1e3,
                max(causes, key=lambda cause: causes[cause]) if device else "",
            )
        )
    if plan.copied_out and _is_replayed(plan, target):
        result.append(_copies(copied_out(plan), card))
    return tuple(sorted(result, key=lambda r: (-r.ms, -r.launches)))


def _copies(copies: list[Cost], card: Card | None) -> OpShare:
    device, causes = 0.0, dict[str, float]()
    if card is not None and card.is_known:
        _, device, causes = _times([], card, factors_of(card)[MIDDLE], copies)
    return OpShare(
        "output",
        "copy",
        len(copies),
        sum(c.torch for c in copies),
        0.0,
        sum(c.bytes for c in copies) / 2**20,
        device * 1e3,
        max(causes, key=lambda cause: causes[cause]) if device else "",
    )


def _kernel(node: Node, backend: object, target: Target) -> str:
    if node.op == "copy":
        return "copy"
    if backend is not target:
        return f"on {getattr(backend, 'name', backend)}"
    return f"{target.choose(node).name} (Triton)" if target.choose(node).kernel else "torch"


def _times(
    costs: list[tuple[Node, Cost]],
    card: Card,
    factors: Factors,
    copies: list[Cost] | None = None,
    link: Link | None = None,
    range_: str = MIDDLE,
) -> tuple[float, float, dict[str, float]]:
    """Seconds of the host, of the device, and of the device by what holds it up. `copies`: of the
    outputs, where the run is replayed.
    """
    causes: dict[str, float] = dict.fromkeys((BANDWIDTH, FLOPS, UNPACKING, LAUNCHES, EXCHANGE), 0.0)
    launched = 0.0
    for node, used in costs:
        if node.op in PARTS and link is not None:
            reached, ranks = REACHED[range_], node.attrs["group"].size
            causes[EXCHANGE] += exchange_s(node.op, node.type.bytes, ranks, link, reached)
            launched += reached.host + factors.step
            continue
        launched += (
            used.torch * factors.torch_launch + used.triton * factors.triton_launch + factors.step
        )
        if node.op != "copy":
            seconds, cause = node_time(node, used, card, factors)
            causes[cause] += seconds
    if copies is None:
        return launched, sum(causes.values()), causes
    for used in copies:
        assert card.bandwidth is not None
        seconds, cause = max(
            (used.bytes / (card.bandwidth * factors.bandwidth), BANDWIDTH),
            (factors.floor, LAUNCHES),
        )
        causes[cause] += seconds
    # Of few nodes it is less
    host = min(launched, factors.replay) + len(copies) * factors.torch_launch
    return host, sum(causes.values()), causes


def unpacking_s(used: Cost, card: Card, factors: Factors) -> float:
    """Seconds for which kernels unpack quantized weights; 0 where that was not counted."""
    if factors.instructions is None or not used.unpacking:
        return 0.0
    assert card.flops_32 is not None and card.multiprocessors is not None
    # Of threads, a second: a multiply-add counts twice, and of compute capability 8.0 every second
    # instruction may be one
    rate = card.flops_32 / 2 * (2 if card.target == "cuda:80" else 1)
    return (
        sum(
            kernel.cycles / (rate * min(1, kernel.programs / card.multiprocessors))
            for kernel in used.unpacking
        )
        / factors.instructions
    )


def node_time(node: Node, used: Cost, card: Card, factors: Factors) -> tuple[float, str]:
    """Seconds that one node takes on the device, and what holds it up."""
    assert card.bandwidth is not None
    quantized = node.op in UNPACKS and any(
        value is not None for name, value in node.attrs.items() if name.endswith("quant")
    )
    part = factors.quantized if quantized else factors.bandwidth
    first = next(node.operands, node)
    reached = factors.attention if node.op in PRODUCTS else factors.product
    return max(
        (used.bytes / (card.bandwidth * part), BANDWIDTH),
        (OPS[node.op].flops(node) / (card.flops(first.dtype) * reached), FLOPS),
        (unpacking_s(used, card, factors), UNPACKING),
        ((used.torch + used.triton) * factors.floor, LAUNCHES),
    )
