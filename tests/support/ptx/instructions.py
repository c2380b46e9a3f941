"""What each instruction computes: a step on all lanes at once, made of it before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptx.program import Address, Immediate, Instruction, Name, Operand, Register, Special

if TYPE_CHECKING:
    from ptx.machine import Lanes

Array = NDArray[Any]
Step = Callable[["Lanes"], None]
Source = Callable[["Lanes"], Array]
Function = Callable[..., Array]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
PLAIN: dict[str, Any] = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
for _bits, _unsigned in UNSIGNED.items():
    PLAIN |= {f"b{_bits}": _unsigned, f"u{_bits}": _unsigned}
    PLAIN[f"s{_bits}"] = np.dtype(f"int{_bits}").type
PAIRS = ("bf16x2", "f16x2", "s16x2", "u16x2")
BITS = (
    {"pred": 1, "bf16": 16}
    | dict.fromkeys(PAIRS, 32)
    | {kind: np.dtype(dtype).itemsize * 8 for kind, dtype in PLAIN.items() if kind != "pred"}
)
FLOATS = ("f16", "f32", "f64", "bf16", "bf16x2", "f16x2")


def rounded_to_odd(x: Array) -> Array:
    """fp32 of fp64, cut, its last bit set where something was cut off: rounded again to fewer bits it
    is as if it was rounded once.
    """
    near = x.astype(np.float32)
    wide = near.astype(np.float64)
    inexact = (wide != x) & np.isfinite(x)
    bits = near.view(np.uint32) - (inexact & (np.abs(wide) > np.abs(x)))
    return (bits.astype(np.uint32) | inexact).view(np.float32)


def to_bf16(x: Array) -> Array:
    """Bits of bf16, to the nearest, ties to even; a NaN is 0x7FFF."""
    narrow = rounded_to_odd(x) if x.dtype == np.float64 else x
    bits = narrow.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(narrow), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _halves(bits: Array) -> Array:
    """uint16 [2, lanes], the lower ones first."""
    return np.stack([bits.astype(np.uint16), (bits >> 16).astype(np.uint16)])


def _pair(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def decode(kind: str, bits: Array) -> Array:
    """Values of a type whose bits lie in a register, maybe a wider one."""
    if kind == "pred":
        return bits
    if kind == "bf16":
        return from_bf16(bits)
    if kind in PAIRS:
        return decode(kind[:-2], _halves(bits))
    size = BITS[kind]
    if bits.dtype.itemsize * 8 != size:
        bits = bits.astype(UNSIGNED[size])
    return bits.view(PLAIN[kind])


def encode(kind: str, value: Array) -> Array:
    """Bits of a type; wider results are rounded to it."""
    if kind == "bf16":
        return to_bf16(value if value.dtype == np.float64 else value.astype(np.float32, copy=False))
    if kind in PAIRS:
        return _pair(*encode(kind[:-2], value))
    if kind == "pred":
        return value
    return value.astype(PLAIN[kind], copy=False).view(UNSIGNED[BITS[kind]])


def extended(kind: str, bits: Array, dtype: Any) -> Array:
    """Bits in a register, which may be wider: by the sign, if the type has one."""
    if bits.dtype == dtype:
        return bits
    if kind[0] == "s":
        size = np.dtype(dtype).itemsize * 8
        return bits.view(PLAIN[kind]).astype(PLAIN[f"s{size}"]).view(dtype)
    return bits.astype(dtype)


def bits_of(operand: Operand, ins: Instruction, size: int) -> Source:
    """A function that reads an operand's bits; `size`: of a constant."""
    if isinstance(operand, Register):
        number = operand.number
        return lambda lanes: lanes.read(number)
    if isinstance(operand, Immediate):
        value: Array
        if size == 1:
            value = np.array([operand.bits != 0])
        else:
            value = np.array([operand.bits % (1 << size)], UNSIGNED[size])
        return lambda lanes: lanes.spread(value)
    if isinstance(operand, Special):
        name = operand.name
        return lambda lanes: lanes.special(name)
    if isinstance(operand, Name) and size in (32, 64):
        name = operand.text
        dtype = UNSIGNED[size]
        return lambda lanes: lanes.address_of(name).astype(dtype)
    raise ins.refused(f"operand {operand}")


def value_of(operand: Operand, ins: Instruction, kind: str) -> Source:
    """A function that reads an operand as a type."""
    read = bits_of(operand, ins, BITS[kind])
    if kind == "pred":
        return read
    return lambda lanes: decode(kind, read(lanes))


def target_of(ins: Instruction, operand: Operand | None = None) -> Register:
    result = ins.operands[0] if operand is None else operand
    if not isinstance(result, Register):
        raise ins.refused(f"result {result}")
    return result


def modifiers(ins: Instruction, allowed: str, after: int = 1) -> set[str]:
    """The words between an opcode and its last one, the type. Raises Unsupported for others."""
    result = set(ins.words[after:-1])
    if result - set(allowed.split()):
        raise ins.refused()
    return result


def flushed(x: Array) -> Array:
    """fp32 whose subnormal values are zero, as `.ftz` has them."""
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def elementwise(
    ins: Instruction, kind: str, function: Function, count: int, ftz: bool = False
) -> Step:
    """d = function(a, b, ...) in a type."""
    if len(ins.operands) != count + 1:
        raise ins.refused()
    target, sources = target_of(ins), [value_of(o, ins, kind) for o in ins.operands[1:]]

    def step(lanes: Lanes) -> None:
        values = [source(lanes) for source in sources]
        if ftz:
            result = flushed(function(*map(flushed, values)).astype(np.float32, copy=False))
        else:
            result = function(*values)
        lanes.write(target, extended(kind, encode(kind, result), target.dtype))

    return step


def arithmetic(function: Function, count: int, allowed: str) -> Callable[[Instruction], Step]:
    """Of floats; `allowed`: its modifiers."""

    def make(ins: Instruction) -> Step:
        kind = ins.words[-1]
        if kind not in FLOATS:
            raise ins.refused()
        words = modifiers(ins, allowed)
        return elementwise(ins, kind, function, count, "ftz" in words)

    return make


def whole(function: Function, count: int) -> Callable[[Instruction], Step]:
    """Of integers, bits and predicates."""

    def make(ins: Instruction) -> Step:
        kind = ins.words[-1]
        if len(ins.words) != 2 or kind in FLOATS:
            raise ins.refused()
        return elementwise(ins, kind, function, count)

    return make


def bounded(function: Function) -> Callable[[Instruction], Step]:
    """`min` and `max` of integers; with `.relu` at least 0."""

    def make(ins: Instruction) -> Step:
        kind = ins.words[-1]
        if not modifiers(ins, "relu"):
            return whole(function, 2)(ins)
        return elementwise(ins, kind, lambda a, b: np.maximum(function(a, b), 0), 2)

    return make


def either(
    floats: Callable[[Instruction], Step], integers: Callable[[Instruction], Step]
) -> Callable[[Instruction], Step]:
    return lambda ins: (floats if ins.words[-1] in FLOATS else integers)(ins)


def approximate(function: Function) -> Function:
    """Of fp32, as near as fp64 gives it."""
    return lambda *x: function(*(v.astype(np.float64) for v in x)).astype(np.float32)


def fused(a: Array, b: Array, c: Array) -> Array:
    """Rounded from fp64, which differs from one rounding once in 2^29 or so."""
    return a.astype(np.float64) * b + c


def quotient(ins: Instruction) -> Step:
    if ins.words[-1] in FLOATS:
        return arithmetic(np.divide, 2, "rn full approx ftz")(ins)
    return _integer_division(ins, lambda a, b: (a - np.fmod(a, b)) // b)


def remainder(ins: Instruction) -> Step:
    return _integer_division(ins, np.fmod)


def _integer_division(ins: Instruction, function: Function) -> Step:
    kind, target = ins.words[-1], target_of(ins)
    modifiers(ins, "")
    a, b = (value_of(o, ins, kind) for o in ins.operands[1:])

    def step(lanes: Lanes) -> None:
        divisor = b(lanes)
        lanes.require(divisor != 0, "an integer is divided by zero")
        result = function(a(lanes), np.where(divisor == 0, 1, divisor).astype(divisor.dtype))
        lanes.write(target, encode(kind, result))

    return step


def product(ins: Instruction) -> Step:
    """`mul` and `mad`, of integers by `lo`, `hi` or `wide`."""
    added, kind = ins.words[0] == "mad", ins.words[-1]
    if kind in FLOATS:
        if added:
            raise ins.refused()
        return arithmetic(np.multiply, 2, "rn ftz")(ins)
    if len(ins.words) != 3 or len(ins.operands) != 3 + added:
        raise ins.refused()
    mode, target = ins.words[1], target_of(ins)
    result_kind = f"{kind[0]}{BITS[kind] * 2}" if mode == "wide" else kind
    a, b = (value_of(o, ins, kind) for o in ins.operands[1:3])
    c = value_of(ins.operands[3], ins, result_kind) if added else None
    if mode not in ("lo", "hi", "wide"):
        raise ins.refused()

    def step(lanes: Lanes) -> None:
        left, right = a(lanes), b(lanes)
        if mode == "wide":
            result = left.astype(PLAIN[result_kind]) * right.astype(PLAIN[result_kind])
        elif mode == "lo":
            result = left * right
        else:
            result = upper_half(left, right)
        lanes.write(target, encode(result_kind, result if c is None else result + c(lanes)))

    return step


def upper_half(a: Array, b: Array) -> Array:
    """The upper half of the bits of a product of integers."""
    size = a.dtype.itemsize * 8
    if size < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(size)).astype(a.dtype)
    x, y, low, by = a.view(np.uint64), b.view(np.uint64), np.uint64(0xFFFFFFFF), np.uint64(32)
    middle = (x >> by) * (y & low) + ((x & low) * (y & low) >> by)
    rest = (x & low) * (y >> by) + (middle & low)
    result = (x >> by) * (y >> by) + (middle >> by) + (rest >> by)
    if a.dtype.kind == "i":
        result = (
            result
            - np.where(a < 0, y, 0).astype(np.uint64)
            - np.where(b < 0, x, 0).astype(np.uint64)
        )
    return result.view(a.dtype)


def shift(ins: Instruction) -> Step:
    """`shl` and `shr`: amounts beyond the width count as the width."""
    kind, target, left = ins.words[-1], target_of(ins), ins.words[0] == "shl"
    modifiers(ins, "")
    a, amount = value_of(ins.operands[1], ins, kind), bits_of(ins.operands[2], ins, 32)
    size = BITS[kind]

    def step(lanes: Lanes) -> None:
        value, by = a(lanes), amount(lanes)
        beyond = by >= size
        count = np.where(beyond, size - 1, by).astype(value.dtype)
        if left:
            result = np.where(beyond, 0, value << count)
        else:
            result = value >> count
            if kind[0] != "s":
                result = np.where(beyond, 0, result)
        lanes.write(target, encode(kind, result.astype(value.dtype)))

    return step


def bit_field(ins: Instruction) -> Step:
    """`bfe` of 32 bits: `length` bits from `start`, extended by the sign if the type has one."""
    kind, target = ins.words[-1], target_of(ins)
    if kind not in ("u32", "s32"):
        raise ins.refused()
    a = value_of(ins.operands[1], ins, kind)
    start, length = (bits_of(o, ins, 32) for o in ins.operands[2:])

    def step(lanes: Lanes) -> None:
        value = a(lanes).astype(np.int64)
        at, count = (x(lanes).astype(np.int64) & 0xFF for x in (start, length))
        field = value >> np.minimum(at, 63) & (np.int64(1) << np.minimum(count, 32)) - 1
        if kind == "s32":
            sign = np.int64(1) << np.maximum(np.minimum(count, 32) - 1, 0)
            field = np.where(count > 0, (field ^ sign) - sign, 0)
        lanes.write(target, field.astype(np.uint32))

    return step


def count_bits(ins: Instruction) -> Step:
    """`popc.b32`: how many bits are set."""
    if ins.words != ("popc", "b32"):
        raise ins.refused()
    return elementwise(ins, "b32", lambda a: np.bitwise_count(a).astype(np.uint32), 1)


def permute_bytes(ins: Instruction) -> Step:
    """`prmt.b32`: each nibble of c names a byte of {b, a}, or, from 8 on, its sign in all bits."""
    if ins.words != ("prmt", "b32"):
        raise ins.refused()
    target = target_of(ins)
    a, b, c = (bits_of(o, ins, 32) for o in ins.operands[1:])

    def step(lanes: Lanes) -> None:
        both = np.stack([a(lanes), b(lanes)], 1).view(np.uint8)
        choice, result = c(lanes), np.zeros(lanes.count, np.uint32)
        for place in range(4):
            nibble = choice >> np.uint32(4 * place) & np.uint32(15)
            byte = np.take_along_axis(both, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
            byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * place)
        lanes.write(target, result)

    return step


def logic_of_three(ins: Instruction) -> Step:
    """`lop3.b32`: bits by a table of what each three give."""
    table = ins.operands[4] if len(ins.operands) == 5 else None
    if ins.words != ("lop3", "b32") or not isinstance(table, Immediate):
        raise ins.refused()
    chosen = [n for n in range(8) if table.bits >> n & 1]

    def function(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros_like(a)
        for n in chosen:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return result

    three = Instruction(ins.opcode, ins.operands[:4], ins.guard, ins.text, ins.source)
    return elementwise(three, "b32", function, 3)


COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def comparison(kind: str, word: str, ins: Instruction) -> Function:
    """Of floats false where one is NaN, or, with `u` behind, true."""
    if kind not in FLOATS:
        unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(word, word)
        if unsigned in COMPARE:
            return COMPARE[unsigned]
    elif word in ("num", "nan"):
        numbers = word == "num"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) ^ numbers
    elif word in COMPARE:
        compare = COMPARE[word]
        return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))
    elif word[-1] == "u" and word[:-1] in COMPARE:
        compare = COMPARE[word[:-1]]
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    raise ins.refused()


COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def set_predicate(ins: Instruction) -> Step:
    """Of pairs into two predicates, the lower halves' first."""
    kind, to = ins.words[-1], ins.operands[0]
    targets = [target_of(ins, o) for o in (to if isinstance(to, tuple) else (to,))]
    words = [word for word in ins.words[1:-1] if word != "ftz"]
    compare, combined = comparison(kind, words[0], ins), words[1:]
    if len(combined) > 1 or len(ins.operands) != 3 + len(combined):
        raise ins.refused()
    if any(t.dtype is not np.bool_ for t in targets) or len(targets) != 1 + (kind in PAIRS):
        raise ins.refused()
    a, b = (value_of(o, ins, kind) for o in ins.operands[1:3])
    ftz = "ftz" in ins.words
    other = bits_of(ins.operands[3], ins, 1) if combined else None

    def step(lanes: Lanes) -> None:
        left, right = a(lanes), b(lanes)
        if ftz:
            left, right = flushed(left), flushed(right)
        result = compare(left, right)
        if other is not None:
            result = COMBINE[combined[0]](result, other(lanes))
        for target, one in zip(targets, result if kind in PAIRS else [result], strict=True):
            lanes.write(target, one)

    return step


def select(ins: Instruction) -> Step:
    """d = p ? a : b, as bits."""
    modifiers(ins, "")
    size, target = BITS[ins.words[-1]], target_of(ins)
    a, b = (bits_of(o, ins, size) for o in ins.operands[1:3])
    p = bits_of(ins.operands[3], ins, 1)
    return lambda lanes: lanes.write(target, np.where(p(lanes), a(lanes), b(lanes)))


def move(ins: Instruction) -> Step:
    """Also of several registers into one and back, the lowest bits first."""
    if len(ins.words) != 2:
        raise ins.refused()
    size, (to, of) = BITS[ins.words[1]], ins.operands
    if isinstance(to, tuple):
        return unpack(ins, to, bits_of(of, ins, size), size // len(to))
    target = target_of(ins)
    if isinstance(of, tuple):
        part = size // len(of)
        sources = [bits_of(o, ins, part) for o in of]
        dtype = target.dtype

        def pack(lanes: Lanes) -> None:
            result: Array = np.zeros(lanes.count, dtype)
            for place, source in enumerate(sources):
                result |= source(lanes).astype(dtype) << dtype(place * part)
            lanes.write(target, result)

        return pack
    source = bits_of(of, ins, size)
    return lambda lanes: lanes.write(target, source(lanes))


def unpack(ins: Instruction, to: tuple[Operand, ...], source: Source, part: int) -> Step:
    targets = [
        target_of(ins, o) if not (isinstance(o, Name) and o.text == "_") else None for o in to
    ]

    def step(lanes: Lanes) -> None:
        bits = source(lanes)
        for place, target in enumerate(targets):
            if target is not None:
                lanes.write(target, (bits >> bits.dtype.type(place * part)).astype(target.dtype))

    return step


ROUND: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(ins: Instruction) -> Step:
    to, of = ins.words[-2:]
    words, target = set(ins.words[1:-2]), target_of(ins)
    if to in ("bf16x2", "f16x2") and of == "f32" and words <= {"rn"}:
        high, low = (value_of(o, ins, "f32") for o in ins.operands[1:])
        return lambda lanes: lanes.write(target, encode(to, np.stack([low(lanes), high(lanes)])))
    source = value_of(ins.operands[1], ins, of)
    function = _conversion(to, of, words)
    if function is None or len(ins.operands) != 2:
        raise ins.refused()
    return lambda lanes: lanes.write(
        target, extended(to, encode(to, function(source(lanes))), target.dtype)
    )


def _conversion(to: str, of: str, words: set[str]) -> Function | None:
    """What changes values of a type before they are encoded as another."""
    rounding = words & set(ROUND)
    if (
        of in FLOATS
        and to not in FLOATS
        and len(rounding) == 1
        and words <= {*rounding, "ftz", "sat"}
    ):
        limits, round_it = np.iinfo(PLAIN[to]), ROUND[rounding.pop()]
        # The largest integer of 64 bits is none of fp64.
        below = (
            np.float64(limits.max)
            if BITS[to] < 64
            else np.nextafter(2.0**63 * (1 + (to[0] == "u")), 0)
        )

        def integers(x: Array) -> Array:
            wide = round_it(flushed(x) if "ftz" in words else x).astype(np.float64)
            return np.clip(np.where(np.isnan(wide), 0, wide), limits.min, below).astype(PLAIN[to])

        return integers
    if of in FLOATS and to in FLOATS:
        if rounding and to == of == "f32" and words <= {*rounding, "ftz"}:
            round_it = ROUND[rounding.pop()]
            return lambda x: round_it(flushed(x) if "ftz" in words else x)
        narrow = BITS[to] < BITS[of]
        return (lambda x: x) if words == ({"rn"} if narrow else set()) else None
    if of not in FLOATS and to in FLOATS:  # numpy rounds to nearest, but in two steps to 16 bits
        return (
            (lambda x: x.astype(np.float64) if BITS[of] < 64 else x.astype(PLAIN[to]))
            if words == {"rn"} and BITS[to] >= 32
            else None
        )
    if words == {"sat"}:
        limits = np.iinfo(PLAIN[to])
        return lambda x: np.clip(x, limits.min, limits.max)
    return (lambda x: x.astype(PLAIN[to])) if not words else None


SPACES = ("param", "global", "shared", "shared::cta")


def _access(ins: Instruction) -> tuple[str, int, str]:
    """Of a load or store: space, values, type."""
    words = list(ins.words[1:])
    space, kind = words.pop(0), words.pop()
    count = int(words.pop()[1:]) if words and words[-1] in ("v2", "v4") else 1
    if space not in SPACES or words:
        raise ins.refused()
    return space.partition("::")[0], count, kind


def load(ins: Instruction) -> Step:
    space, count, kind = _access(ins)
    to, of = ins.operands
    parts = to if isinstance(to, tuple) else (to,)
    targets = [target_of(ins, o) for o in parts]
    if not isinstance(of, Address) or len(targets) != count:
        raise ins.refused()
    size = BITS[kind] // 8

    def step(lanes: Lanes) -> None:
        if space == "param":
            rows = lanes.parameter(of, size)
        else:
            rows = lanes.load(space, of, size * count)
        values = rows.view(UNSIGNED[size * 8])
        for place, target in enumerate(targets):
            lanes.write_some(target, extended(kind, values[:, place], target.dtype))

    return step


def store(ins: Instruction) -> Step:
    space, count, kind = _access(ins)
    to, of = ins.operands
    parts = of if isinstance(of, tuple) else (of,)
    sources = [bits_of(o, ins, BITS[kind]) for o in parts]
    if not isinstance(to, Address) or len(sources) != count or space == "param":
        raise ins.refused()
    dtype = UNSIGNED[BITS[kind]]

    def step(lanes: Lanes) -> None:
        values = np.stack([source(lanes).astype(dtype) for source in sources], 1)
        lanes.store(space, to, values.view(np.uint8))

    return step


def copy_later(ins: Instruction) -> Step:
    """`cp.async` of global to shared memory, zeros behind what it is to read."""
    if ins.words[2:] in (("commit_group",), ("wait_group",), ("wait_all",)):
        word = ins.words[2]
        if word == "commit_group":
            return lambda lanes: lanes.commit()
        operand = ins.operands[0] if word == "wait_group" else Immediate(0)
        if not isinstance(operand, Immediate):
            raise ins.refused()
        remaining = operand.bits
        return lambda lanes: lanes.wait_for_copies(remaining, word == "wait_all")
    if ins.words[2:] not in (("ca", "shared", "global"), ("cg", "shared", "global")):
        raise ins.refused()
    to, of, size = ins.operands[:3]
    if not (isinstance(to, Address) and isinstance(of, Address) and isinstance(size, Immediate)):
        raise ins.refused()
    count = size.bits
    read = bits_of(ins.operands[3], ins, 32) if len(ins.operands) > 3 else None

    def step(lanes: Lanes) -> None:
        lanes.copy_later(to, of, count, None if read is None else read(lanes))

    return step


def shuffle(ins: Instruction) -> Step:
    """`shfl.sync.MODE.b32` among the lanes of a warp."""
    if ins.words[:2] != ("shfl", "sync") or ins.words[3:] != ("b32",):
        raise ins.refused()
    mode, target = ins.words[2], target_of(ins)
    a, b, c, members = (bits_of(o, ins, 32) for o in ins.operands[1:])
    if mode not in ("up", "down", "bfly", "idx"):
        raise ins.refused()

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(members(lanes))
        lane = lanes.lane
        by, clamp = b(lanes).astype(np.int64) & 31, c(lanes).astype(np.int64)
        segment = clamp >> 8 & 31
        first, last = lane & segment, (lane & segment) | (clamp & 31 & ~segment)
        if mode == "up":
            of = lane - by
            inside = of >= last
        else:
            of = {"down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
            inside = of <= last
        of = np.where(inside, of, lane)
        lanes.write(target, a(lanes)[lanes.warp_begin + of])

    return step


REDUCE: dict[str, Function] = {
    "add": lambda x: x.sum(1, dtype=x.dtype), "min": lambda x: x.min(1), "max": lambda x: x.max(1),
    "and": lambda x: np.bitwise_and.reduce(x, 1), "or": lambda x: np.bitwise_or.reduce(x, 1),
}  # fmt: skip


def reduce_warp(ins: Instruction) -> Step:
    """`redux.sync.OP.TYPE`"""
    operation, kind, target = ins.words[2], ins.words[3], target_of(ins)
    if operation not in REDUCE or kind not in ("s32", "u32", "b32"):
        raise ins.refused()
    a, members = value_of(ins.operands[1], ins, kind), bits_of(ins.operands[2], ins, 32)
    function = REDUCE[operation]

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(members(lanes))
        lanes.write(target, encode(kind, np.repeat(function(a(lanes).reshape(-1, 32)), 32)))

    return step


def synchronise_warp(ins: Instruction) -> Step:
    if ins.words != ("bar", "warp", "sync"):
        raise ins.refused()
    members = bits_of(ins.operands[0], ins, 32)
    return lambda lanes: lanes.warp_barrier(members(lanes))


def extreme(number: Function, nan: Function) -> Callable[[Instruction], Step]:
    """`min` and `max`: of a number and a NaN the number, with `.NaN` the NaN."""

    def make(ins: Instruction) -> Step:
        return arithmetic(nan if "NaN" in ins.words else number, 2, "ftz NaN")(ins)

    return make
