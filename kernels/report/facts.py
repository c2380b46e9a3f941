"""Facts of a warm-up, as plain data: what runs where, what does not and why, what it costs. Loads
without torch: `from_plans.py` reads it off plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mtmd.base.text import mib
from mtmd.kernels.plan.steps import NativeFacts
from mtmd.kernels.report.machine import MachineFacts
from mtmd.kernels.trials import Learned


@dataclass(frozen=True)
class TensorFact:
    """One operand of a refused node."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class RefusedOp:
    """Nodes of one op and type that the preferred backend did not take, and where they run instead.
    `name` is the first one's.
    """

    graph: str
    op: str
    name: str
    count: int
    backend: str
    reason: str
    runs_on: str
    tensors: tuple[TensorFact, ...]


@dataclass(frozen=True)
class CopyFact:
    name: str
    source: str
    destination: str
    bytes: int


@dataclass(frozen=True)
class NativeRun:
    """A run as programs beside one node by node: NMSE of the results, and what was made ready in
    this process up to now. `folder`, where machine code is kept, is None where none can be. It
    runs with so many `threads`; `tried` are (threads, ms) of those that were measured to choose,
    and `why` says why where nothing was to be chosen.
    """

    error: float
    limit: float
    kernels: int
    from_cache: int
    compile_ms: float
    load_ms: float
    folder: str | None
    threads: int
    tried: tuple[tuple[int, float], ...]
    why: str = ""


@dataclass(frozen=True)
class GraphFacts:
    """One graph at one size. Bytes are per memory space; `compute_bytes` is the predicted peak,
    `cache_bytes` what a full cache takes. `kernels` are (op, in which way, nodes) of those for
    which the CPU has several ways; `row_blocks` (chains of nodes, rows of a block, rows).
    """

    graph: str
    label: str
    size: str
    nodes: int
    ops_by_backend: dict[str, int]
    splits: int
    copies: tuple[CopyFact, ...]
    weight_bytes: dict[str, int]
    cache_bytes: dict[str, int]
    compute_bytes: dict[str, int]
    gflop: float
    native: NativeFacts | None = None
    kernels: tuple[tuple[str, str, int], ...] = ()
    row_blocks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class KVFacts:
    """Keys and values as they are stored: in which type, bytes of one token over all layers, and of
    a full cache; `computed_bytes` is that of one token in the type that is computed in.
    `recurrent_bytes` of other states stay as they are. `warning`: why the type is a poor choice for
    this model.
    """

    type: str
    token_bytes: int
    bytes: int
    computed_bytes: int
    recurrent_bytes: int
    warning: str | None = None


@dataclass(frozen=True)
class ActivationFacts:
    """Activations rounded to a `type` in products of many rows: in `products` of one graph's, to 7
    bits in `in_7_bits` of them, where weights have 8 and the CPU no instruction for both;
    `in_16_bits` are others of such weights, which a decoder does not round so. `quantized`: the
    type that its plain weights were quantized to for that, "" where none was.
    """

    graph: str
    type: str
    products: int
    all_products: int
    in_7_bits: int = 0
    in_16_bits: int = 0
    quantized: str = ""


@dataclass(frozen=True)
class FlashFacts:
    """Attention of one graph: `setting` asked for, `state` on, off or mixed; `rebuilt` nodes are
    explicit on the same device.
    """

    graph: str
    setting: str
    state: str
    nodes: int
    rebuilt: tuple[str, ...]
    on_fallback: tuple[str, ...]


@dataclass(frozen=True)
class RankFacts:
    """One of several processes that share a model: what it is predicted to take."""

    rank: int
    share: float
    weight_bytes: int
    cache_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class SavedWholeFacts:
    """Projections of one graph that every rank has whole. `refused`: they were to be shared."""

    graph: str
    reason: str
    names: tuple[str, ...]
    refused: bool


@dataclass(frozen=True)
class CollectiveFacts:
    """Collectives of one op in one graph: how many, and the bytes of a rank's values."""

    graph: str
    label: str
    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RanksFacts:
    """Distribution of a model over several processes (tensor parallelism)."""

    ranks: tuple[RankFacts, ...]
    collectives: tuple[CollectiveFacts, ...]
    kept_whole: tuple[SavedWholeFacts, ...]

    @property
    def refused(self) -> list[SavedWholeFacts]:
        return [k for k in self.kept_whole if k.refused]


@dataclass(frozen=True)
class LayersFacts:
    """The layers, from `first` to `last`, that one device of several has; `encoder`: that, too."""

    device: str
    first: int
    last: int
    encoder: bool

    def __str__(self) -> str:
        run = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        many = "layer" if self.first == self.last else "layers"
        return f"{self.device}: {many} {run}{', encoder' if self.encoder else ''}"


@dataclass(frozen=True)
class MemoryFacts:
    """Contents that one memory needs room for, by part, and what is available for it, None where
    nobody knows.
    """

    space: str
    weights: int
    encoder: int
    cache: int
    compute: int
    available: int | None

    @property
    def needed(self) -> int:
        return self.weights + self.encoder + self.cache + self.compute

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


@dataclass(frozen=True)
class LayoutFacts:
    """One way in which a model could lie in memory. `reason` says why it cannot be, where it
    cannot; `longest_context` tokens fit, beside the largest picture, and so many answers at once of
    the context asked for; None where that was not looked for. Where no context fits with a picture,
    `longest_text` tokens do without.
    """

    name: str
    memories: tuple[MemoryFacts, ...] = ()
    layers: tuple[LayersFacts, ...] = ()
    ranks: int = 1
    cache_on_host: bool = False
    reason: str | None = None
    longest_context: int | None = None
    most_answers: int | None = None
    longest_text: int | None = None

    @property
    def fits(self) -> bool:
        return self.reason is None and all(m.fits for m in self.memories)

    @property
    def unknown(self) -> list[MemoryFacts]:
        """Memories that are needed, and of which nobody knows how large they are."""
        return [m for m in self.memories if m.available is None]

    @property
    def shortest(self) -> MemoryFacts | None:
        """The memory that lacks most."""
        lacking = [m for m in self.memories if not m.fits]
        return max(lacking, key=lambda m: m.needed - (m.available or 0), default=None)


@dataclass(frozen=True)
class FitFacts:
    """The layouts that were looked at, in order of preference, and which of them was `chosen`.
    `one_cache`: memories in which the cache of one answer of several is counted, as others wait
    for room there.
    """

    layouts: tuple[LayoutFacts, ...]
    chosen: str | None
    one_cache: tuple[str, ...] = ()

    @property
    def cache_on_host(self) -> bool:
        """Return whether keys and values lie there by the choice."""
        return any(one.cache_on_host for one in self.layouts if one.name == self.chosen)


@dataclass(frozen=True)
class OpTime:
    op: str
    count: int
    ms: float
    gflop_per_s: float
    gb_per_s: float


@dataclass(frozen=True)
class Check:
    """A real run of `graph`: `what` was done, how long it took the first time and at best, and each
    op against its reference in fp32 on the same inputs. `worst` are (op, node, NMSE), one an op,
    worst first; `ops` are the best time of each node, summed by op. `limits`: of the ops in `worst`
    that may be further off than `limit`.
    """

    graph: str
    what: str
    first_nan: str | None
    worst: tuple[tuple[str, str, float], ...]
    limit: float
    first_ms: float
    steady_ms: float
    ops: tuple[OpTime, ...]
    native: NativeRun | None = None
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def best_ms(self) -> float:
        """Return the time with the number of threads that answers are written with."""
        if self.native is None:
            return self.steady_ms
        return dict(self.native.tried).get(self.native.threads, self.steady_ms)

    @property
    def failed(self) -> tuple[str, ...]:
        """Return what is wrong with the results, empty if nothing."""
        bad = [
            f"{op} at {node}: NMSE {error:.1e}, expected at most {limit:.0e}"
            for op, node, error in self.worst
            if not error <= (limit := self.limits.get(op, self.limit))
        ]
        if self.native is not None and not self.native.error <= self.native.limit:
            bad.append(
                f"machine code against node by node: NMSE {self.native.error:.1e}, expected at "
                f"most {self.native.limit:.0e}"
            )
        return ((f"NaN first at {self.first_nan}",) if self.first_nan else ()) + tuple(bad)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled ahead of time for a GPU that is not here, and what one program of it uses.
    `name` is the first of its nodes. `head` is the head size, of attention; `spill_bytes` are per
    thread: registers that did not fit. `programs_at_once` is how many a multiprocessor holds.
    """

    graph: str
    kernel: str
    name: str
    nodes: int
    head: int | None
    target: str
    shared_bytes: int
    shared_limit: int
    registers: int
    spill_bytes: int
    instruction: str
    programs_at_once: int


@dataclass(frozen=True)
class DequantizedTensor:
    """A tensor whose block type no kernel takes as it is stored: its values are kept in memory
    instead, in the compute type.
    """

    name: str
    kind: str
    stored_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class AdapterFacts:
    """A LoRA adapter: applied to answers that choose it (`is_chosen`), or to all. `merged` weights
    have its changes in them; the products of `weights` are changed as they are computed, at ranks
    up to `rank`, by matrices that take `memory_bytes`.
    """

    name: str
    scale: float
    is_chosen: bool
    merged: int
    weights: int
    rank: int
    memory_bytes: int

    def __str__(self) -> str:
        parts = [f"merged into {self.merged} weights"] * bool(self.merged)
        if self.weights:
            size = mib(self.memory_bytes)
            parts.append(f"rank {self.rank} on {self.weights} weights, {size}")
        whose = "answers that choose it" if self.is_chosen else "all answers"
        return f"adapter {self.name}: {whose}, scale {self.scale:g}; {', '.join(parts)}"


@dataclass(frozen=True)
class SpeculationFacts:
    """Number of tokens that are proposed at once, as requested; why none are, if so; and what
    batches of several rows cost, as (rows, times that of one row), empty where nothing was run.
    """

    setting: str
    refused: str | None
    costs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GivenPrograms:
    """Number of `programs` of a folder that was given, saved for `model`, of which so many `used`
    are among those that are foreseen.
    """

    folder: str
    model: str
    programs: int
    used: int


@dataclass(frozen=True)
class ProgramFacts:
    """GPU programs made ready for `target`: so many that batches and pictures of foreseen sizes
    need, of which so many were compiled now. `compile_ms` of all of them, one after another.
    `given`: those that were to be taken from a folder.
    """

    target: str
    needed: int
    compiled: int
    compile_ms: float
    given: GivenPrograms | None = None


@dataclass(frozen=True)
class VisionAttentionFacts:
    """Kernels by which attention of the encoder runs: `setting` as asked for, `machine` what the
    measurements hold for, and the file, where they are kept, None where they are not; `left_out`,
    kernels that are not asked at all, each with the reason.
    """

    setting: str
    machine: dict[str, str]
    file: str | None
    found: Learned
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PreprocessingFacts:
    """Device on which pictures become tiles, where there is a choice: on the `device`, or on the
    host, which `why_host` says. Of a picture of `size` pixels that was tried: milliseconds on both,
    how many times it was resized on the device, whether the tiles were the same to the bit, and
    `notes`.
    """

    device: str
    setting: str
    why_host: str | None
    size: tuple[int, int] | None = None
    host_ms: float = 0.0
    device_ms: float = 0.0
    resized_there: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WarmupFacts:
    """All that `mtmd warmup` reports. `checks` is empty where nothing was run. `untried` are ops
    that a device of which only torch knows what it can do takes without having been tried, with
    the bytes of their largest operands. `weights`: what they were quantized to, "" where they are
    as stored. `could_round`: how many of the decoder's products would round activations to 8 bits
    with `--activations int8`, 0 with it. `lacks`: what kernels for the device would need, and is
    not installed, and how to have it.
    """

    model: str
    device: str
    device_name: str
    dtype: str
    flash: tuple[FlashFacts, ...]
    refused: tuple[RefusedOp, ...]
    graphs: tuple[GraphFacts, ...]
    checks: tuple[Check, ...] = ()
    dequantized: tuple[DequantizedTensor, ...] = ()
    speculation: SpeculationFacts | None = None
    ranks: RanksFacts | None = None
    layers: tuple[LayersFacts, ...] = ()
    fit: FitFacts | None = None
    programs: ProgramFacts | None = None
    vision_attention: VisionAttentionFacts | None = None
    preprocessing: PreprocessingFacts | None = None
    untried: tuple[tuple[str, int], ...] = ()
    weights: str = ""
    lacks: str | None = None
    machine: MachineFacts | None = None
    adapters: tuple[AdapterFacts, ...] = ()
    kv: KVFacts | None = None
    activations: tuple[ActivationFacts, ...] = ()
    could_round: int = 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Return where nodes are meant to run: one device, or those that have layers."""
        return tuple(dict.fromkeys((self.device, *(part.device for part in self.layers))))

    @property
    def fully_accelerated(self) -> bool:
        """Every node on the preferred backend, attention as flash attention, results sound.
        `--strict` asks for this.
        """
        return (
            not self.refused
            and not self.elsewhere
            and all(f.state == "on" and not f.on_fallback for f in self.flash if f.nodes)
            and not any(c.failed for c in self.checks)
        )

    @property
    def elsewhere(self) -> int:
        """Most nodes of one graph that run on another backend than the devices', refused or placed
        there by an override.
        """
        return max(
            (
                sum(n for name, n in g.ops_by_backend.items() if name not in self.devices)
                for g in self.graphs
            ),
            default=0,
        )

    def asdict(self) -> dict[str, Any]:
        return asdict(self) | {"fully_accelerated": self.fully_accelerated}


@dataclass(frozen=True)
class Placement:
    """Placement of one graph's nodes: how attention runs, and what the preferred backend
    refused.
    """

    flash: FlashFacts
    refused: tuple[RefusedOp, ...]
