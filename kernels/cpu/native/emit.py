"""Kernels are written with this: a thin layer over llvmlite's IR.

A `Value` wraps an IR value and computes with Python's operators; numbers and scalars are spread to
the lanes of the other side. Whole numbers are signed in comparisons and in `//`; `>>` is logical.
Control flow are context managers, variables are `Var`s (memory that LLVM turns into registers).
Vectors are as wide as the kernel says: LLVM cuts them to what the CPU has.

Every kernel is `void kernel(i64* args, i64 first, i64 last, i8* scratch)`: it does the units first
to last and writes nothing but their results, so that any thread may do any unit.
"""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from llvmlite import ir

PTR = ir.PointerType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat, which llvmlite has no name for; only for arguments of intrinsics."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()
DTYPES = ("f32", "bf16")  # how values are stored; kernels compute in float32
SIZES = {"f32": 4, "bf16": 2}

# 2^x for x from 0 to 1, by degree: coefficients of the least relative error, by Remez' exchange
POWERS_OF_TWO = {
    3: (0.9999252186, 0.6958335405, 0.2260671554, 0.07802452264),
    5: (0.9999999251, 0.6931530732, 0.240153617, 0.05582631805, 0.008989340091, 0.001877576675),
}

Number = int | float


def vec(scalar: ir.Type, lanes: int) -> ir.Type:
    """The vector type; a scalar type for one lane."""
    return scalar if lanes == 1 else ir.VectorType(scalar, lanes)


def size_of(type_: ir.Type) -> int:
    """Bytes of one element of a type."""
    scalar = scalar_of(type_)
    if scalar in (PTR, F64):
        return 8
    return 4 if scalar == F32 else max(scalar.width // 8, 1)


def scalar_of(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def lanes_of(type_: ir.Type) -> int:
    return type_.count if isinstance(type_, ir.VectorType) else 1


class Value:
    """A value of the kernel that is being written."""

    __slots__ = ("e", "ir")

    def __init__(self, e: Emitter, value: Any):
        self.e, self.ir = e, value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        return lanes_of(self.type)

    @property
    def is_float(self) -> bool:
        return scalar_of(self.type) in (F32, F64)

    def _with(self, other: Operand) -> tuple[Any, Any, Value]:
        """Both sides with as many lanes as the wider one."""
        if not isinstance(other, Value):
            other = self.e.const(scalar_of(self.type), other)
        a, b = self, other
        if a.lanes < b.lanes:
            a = a.splat(b.lanes)
        elif b.lanes < a.lanes:
            b = b.splat(a.lanes)
        return a.ir, b.ir, a

    def _op(self, other: Operand, whole: str, real: str | None, swap: bool = False) -> Value:
        a, b, side = self._with(other)
        name = real if side.is_float else whole
        assert name is not None
        if swap:
            a, b = b, a
        flags = ("contract",) if side.is_float and self.e.contract else ()
        return Value(self.e, getattr(self.e.b, name)(a, b, flags=flags))

    def __add__(self, other: Operand) -> Value:
        return self._op(other, "add", "fadd")

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Value:
        return self._op(other, "sub", "fsub")

    def __rsub__(self, other: Operand) -> Value:
        return self._op(other, "sub", "fsub", swap=True)

    def __mul__(self, other: Operand) -> Value:
        return self._op(other, "mul", "fmul")

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Value:
        return self._op(other, "", "fdiv")

    def __rtruediv__(self, other: Operand) -> Value:
        return self._op(other, "", "fdiv", swap=True)

    def __floordiv__(self, other: Operand) -> Value:
        return self._op(other, "sdiv", None)

    def __mod__(self, other: Operand) -> Value:
        return self._op(other, "srem", None)

    def __and__(self, other: Operand) -> Value:
        a, b, _ = self._with(other)
        return Value(self.e, self.e.b.and_(a, b))

    def __or__(self, other: Operand) -> Value:
        a, b, _ = self._with(other)
        return Value(self.e, self.e.b.or_(a, b))

    def __xor__(self, other: Operand) -> Value:
        a, b, _ = self._with(other)
        return Value(self.e, self.e.b.xor(a, b))

    def __lshift__(self, other: Operand) -> Value:
        return self._op(other, "shl", None)

    def __rshift__(self, other: Operand) -> Value:
        return self._op(other, "lshr", None)

    def ashr(self, other: Operand) -> Value:
        """Shifted right, the sign kept."""
        return self._op(other, "ashr", None)

    def __neg__(self) -> Value:
        return Value(self.e, self.e.b.fneg(self.ir)) if self.is_float else 0 - self

    def _compare(self, sign: str, other: Operand) -> Value:
        a, b, side = self._with(other)
        if side.is_float:  # false where either side is NaN, but for !=
            call = self.e.b.fcmp_unordered if sign == "!=" else self.e.b.fcmp_ordered
        else:
            call = self.e.b.icmp_signed
        return Value(self.e, call(sign, a, b))

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Operand) -> Value:
        return self._compare("==", other)

    def ne(self, other: Operand) -> Value:
        return self._compare("!=", other)

    def splat(self, lanes: int) -> Value:
        """A scalar in every lane."""
        assert self.lanes == 1
        if lanes == 1:
            return self
        vector = ir.VectorType(self.type, lanes)
        if isinstance(self.ir, ir.Constant) and self.ir.constant not in (None, ir.Undefined):
            return self.e.const(vector, self.ir.constant)
        b = self.e.b
        one = b.insert_element(ir.Constant(vector, ir.Undefined), self.ir, _whole(0))
        return Value(self.e, b.shuffle_vector(one, one, _lanes((0,) * lanes)))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Lanes of this vector, and of `other` counted on, in any order."""
        second = other.ir if other is not None else ir.Constant(self.type, ir.Undefined)
        result = self.e.b.shuffle_vector(self.ir, second, _lanes(tuple(lanes)))
        return Value(self.e, result) if len(lanes) > 1 else Value(self.e, result)[0]

    def __getitem__(self, lane: int | Value) -> Value:
        index = lane.ir if isinstance(lane, Value) else _whole(lane)
        return Value(self.e, self.e.b.extract_element(self.ir, index))

    def insert(self, lane: int, value: Value) -> Value:
        return Value(self.e, self.e.b.insert_element(self.ir, value.ir, _whole(lane)))

    def concat(self, other: Value) -> Value:
        """This vector's lanes, then the other's."""
        return self.shuffle(range(self.lanes + other.lanes), other)

    def _cast(self, name: str, scalar: ir.Type) -> Value:
        return Value(self.e, getattr(self.e.b, name)(self.ir, vec(scalar, self.lanes)))

    def zext(self, scalar: ir.Type) -> Value:
        return self._cast("zext", scalar)

    def sext(self, scalar: ir.Type) -> Value:
        return self._cast("sext", scalar)

    def trunc(self, scalar: ir.Type) -> Value:
        return self._cast("trunc", scalar)

    def uitofp(self) -> Value:
        return self._cast("uitofp", F32)

    def sitofp(self) -> Value:
        return self._cast("sitofp", F32)

    def fptosi(self, scalar: ir.Type = I32) -> Value:
        return self._cast("fptosi", scalar)

    def widen(self) -> Value:
        """Float32 to float64."""
        return self._cast("fpext", F64)

    def narrow(self) -> Value:
        """Float64 to float32."""
        return self._cast("fptrunc", F32)

    def half_to_f32(self) -> Value:
        """Convert the bits of an IEEE half."""
        if self.e.without_halves:
            return self._half_in_steps()
        halves = self.e.b.bitcast(self.ir, vec(ir.HalfType(), self.lanes))
        return Value(self.e, self.e.b.fpext(halves, vec(F32, self.lanes)))

    def f32_to_half(self) -> Value:
        """The bits of an IEEE half, to the nearest even."""
        if self.e.without_halves:
            return self._to_half_in_steps()
        halves = self.e.b.fptrunc(self.ir, vec(ir.HalfType(), self.lanes))
        return Value(self.e, self.e.b.bitcast(halves, vec(I16, self.lanes)))

    def _half_in_steps(self) -> Value:
        """`half_to_f32` by whole numbers."""
        e, wide = self.e, vec(F32, self.lanes)
        bits = self.zext(I32)
        size = bits & 0x7FFF
        tiny = Value(e, e.b.sitofp(size.ir, wide)) * 2.0**-24
        normal = (size << 13) + (112 << 23)
        number = e.select(size > 0x7BFF, (size << 13) | 0x7F800000, normal)
        number = e.select(size < 0x400, tiny.bits(vec(I32, self.lanes)), number)
        return (number | ((bits & 0x8000) << 16)).bits(wide)

    def _to_half_in_steps(self) -> Value:
        """`f32_to_half` by whole numbers."""
        e, whole = self.e, vec(I32, self.lanes)
        bits = self.bits(whole)
        size = bits & 0x7FFFFFFF
        # The unit of the last place of 0.5 is the smallest half: the sum is rounded to it.
        tiny = (size.bits(vec(F32, self.lanes)) + 0.5).bits(whole) - 0x3F000000
        normal = (size + 0xFFF + ((size >> 13) & 1) - (112 << 23)) >> 13
        half = e.select(size < 0x38800000, tiny, normal)
        half = e.select(size > 0x477FEFFF, e.const(I32, 0x7C00), half)  # infinite
        half = e.select(size > 0x7F800000, e.const(I32, 0x7E00), half)
        return (half | ((bits >> 16) & 0x8000)).trunc(I16)

    def bf16_to_f32(self) -> Value:
        """Convert the bits of a bfloat16."""
        return (self.zext(I32) << 16).bits(vec(F32, self.lanes))

    def f32_to_bf16(self) -> Value:
        """Return it to the bits of a bfloat16, to the nearest even as torch rounds; NaN stays
        NaN.
        """
        bits = self.bits(vec(I32, self.lanes))
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        nan = self.e.select(self.ne(self), (bits >> 16) | 0x40, rounded)
        return nan.trunc(I16)

    def bits(self, type_: ir.Type) -> Value:
        """The same bits as another type of the same size."""
        return Value(self.e, self.e.b.bitcast(self.ir, type_))

    def to_ptr(self) -> Value:
        return Value(self.e, self.e.b.inttoptr(self.ir, PTR))

    def at(self, index: Operand, scalar: ir.Type = I8) -> Value:
        """This pointer, `index` elements of `scalar` on."""
        number = index.ir if isinstance(index, Value) else ir.Constant(I64, index)
        return Value(self.e, self.e.b.gep(self.ir, [number], source_etype=scalar))


Operand = Value | int | float


class Var:
    """A variable: memory of the kernel, which LLVM keeps in a register."""

    def __init__(self, e: Emitter, type_: ir.Type):
        self.e, self.type = e, type_
        with e.b.goto_entry_block():
            self.slot = e.b.alloca(type_)

    def get(self) -> Value:
        return Value(self.e, self.e.b.load(self.slot, typ=self.type))

    def set(self, value: Operand) -> None:
        if not isinstance(value, Value):
            value = self.e.const(self.type, value)
        if value.lanes < lanes_of(self.type):
            value = value.splat(lanes_of(self.type))
        self.e.b.store(value.ir, self.slot)

    def add(self, value: Operand) -> None:
        self.set(self.get() + value)


class Emitter:
    """Writes one function of one module. `args`, `first`, `last`, `scratch` are a kernel's."""

    def __init__(
        self,
        name: str,
        params: Sequence[ir.Type] = (PTR, I64, I64, PTR),
        has: Callable[[str], bool] = lambda _: False,
    ):
        self.has = has  # whether the CPU has a feature, by LLVM's name
        self.contract = True  # whether a product and the sum that it is part of are rounded once
        # There LLVM would call a function that is not there.
        self.without_halves = platform.machine() in ("x86_64", "AMD64") and not has("f16c")
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(VOID, params), name)
        self.function.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.params = [Value(self, a) for a in self.function.args]
        self._tables = 0
        self._constants: dict[Any, ir.Constant] = {}
        """Those of `const`: a kernel has few and uses them often, and each is long as a text."""
        if len(params) == 4:
            self.args, self.first, self.last, self.scratch = self.params

    def finish(self) -> str:
        """The module's text."""
        if not self.b.block.is_terminated:
            self.b.ret_void()
        return str(self.module)

    # Arguments -------------------------------------------------------------------------------

    def arg(self, index: int) -> Value:
        """A whole number of the arguments, 64 bits."""
        return self.load(self.args, I64, index)

    def arg_ptr(self, index: int) -> Value:
        return self.arg(index).to_ptr()

    def arg_f32(self, index: int) -> Value:
        """A float32 whose bits are the argument's lower half."""
        return self.arg(index).trunc(I32).bits(F32)

    # Values ----------------------------------------------------------------------------------

    def const(self, type_: ir.Type, value: Number | Sequence[Number]) -> Value:
        """A number in every lane, or a number each."""
        scalar, lanes = scalar_of(type_), lanes_of(type_)
        each = (value,) if isinstance(value, (int, float)) else tuple(value)
        # Tells -0.0 from 0.0, which are equal
        key = type_, each, tuple(math.copysign(1.0, v) for v in each if v == 0)
        constant = self._constants.get(key)
        if constant is None:
            numbers = [ir.Constant(scalar, _fit(scalar, v)) for v in each]
            numbers = numbers * lanes if len(numbers) == 1 else numbers
            constant = numbers[0] if lanes == 1 else ir.Constant(type_, numbers)
            self._constants[key] = constant
        return Value(self, constant)

    def i64(self, value: Operand) -> Value:
        return value if isinstance(value, Value) else self.const(I64, int(value))

    def f32(self, value: float, lanes: int = 1) -> Value:
        return self.const(vec(F32, lanes), float(value))

    def var(self, type_: ir.Type, value: Operand | None = None) -> Var:
        var = Var(self, type_)
        if value is not None:
            var.set(value)
        return var

    def local(self, scalar: ir.Type, count: int, align: int = 64) -> Value:
        """Memory of the call: a pointer to `count` elements."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(scalar, ir.Constant(I32, count))
            slot.align = align
            slot.type = PTR  # any type may be stored there
        return Value(self, slot)

    def table(self, scalar: ir.Type, values: Sequence[Number]) -> Value:
        """A pointer to constants."""
        array = ir.ArrayType(scalar, len(values))
        name = f"{self.function.name}.table{self._tables}"
        self._tables += 1
        data = ir.GlobalVariable(self.module, array, name)
        data.linkage, data.global_constant, data.align = "internal", True, 64
        data.type = PTR
        data.initializer = ir.Constant(
            array, [ir.Constant(scalar, _fit(scalar, v)) for v in values]
        )
        return Value(self, data)

    # Memory ----------------------------------------------------------------------------------

    def load(
        self, ptr: Value, type_: ir.Type, index: Operand = 0, align: int | None = None
    ) -> Value:
        """A value or a vector that begins at element `index`, aligned as one element is unless
        told more (or less: 1 inside of blocks).
        """
        where = ptr.at(index, scalar_of(type_))
        return Value(self, self.b.load(where.ir, typ=type_, align=align or size_of(type_)))

    def store(self, ptr: Value, value: Value, index: Operand = 0, align: int | None = None) -> None:
        where = ptr.at(index, scalar_of(value.type))
        self.b.store(value.ir, where.ir, align=align or size_of(value.type))

    def prefetch(self, ptr: Value, near: int = 3) -> None:
        """Asks for the cache line at an address, which may be anywhere. `near`: 3 to every cache,
        2 to the second.
        """
        options = [ir.Constant(I32, n) for n in (0, near, 1)]  # to read, where to, data
        self.call("llvm.prefetch.p0", VOID, ptr, *options)

    def read_anew(self) -> None:
        """Have what was read before read once more from here on, as if it had changed."""
        kind = ir.FunctionType(VOID, [])
        self.b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    def masked_load(self, ptr: Value, type_: ir.Type, index: Operand, mask: Value) -> Value:
        """Do what `load` does, zeros where the mask is off; nothing is touched there."""
        where = ptr.at(index, scalar_of(type_))
        zero = ir.Constant(type_, None)
        name = f"llvm.masked.load.{_suffix(type_)}.p0"
        align = ir.Constant(I32, size_of(type_))
        return self.call(name, type_, where, align, mask, Value(self, zero))

    def masked_store(self, ptr: Value, value: Value, index: Operand, mask: Value) -> None:
        where = ptr.at(index, scalar_of(value.type))
        align = ir.Constant(I32, size_of(value.type))
        self.call(f"llvm.masked.store.{_suffix(value.type)}.p0", VOID, value, where, align, mask)

    def read(
        self, ptr: Value, dtype: str, index: Operand, lanes: int = 1, mask: Value | None = None
    ) -> Value:
        """Stored values from element `index` on, as float32; 0 where the mask is off."""
        type_ = vec(F32 if dtype == "f32" else I16, lanes)
        if mask is None:
            result = self.load(ptr, type_, index)
        else:
            result = self.masked_load(ptr, type_, index, mask)
        return result if dtype == "f32" else result.bf16_to_f32()

    def write(
        self, ptr: Value, dtype: str, index: Operand, value: Value, mask: Value | None = None
    ) -> None:
        """Float32 to stored values from element `index` on, where the mask is on."""
        stored = value if dtype == "f32" else value.f32_to_bf16()
        if mask is None:
            self.store(ptr, stored, index)
        else:
            self.masked_store(ptr, stored, index, mask)

    def rounded(self, value: Value, dtype: str) -> Value:
        """Return what reading gives after writing: the value as `dtype` holds it."""
        return value if dtype == "f32" else value.f32_to_bf16().bf16_to_f32()

    # Control flow ----------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)`, with a step above 0."""
        begin, end, by = self.i64(start), self.i64(stop), self.i64(step)
        before = self.b.block
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(begin.ir, before)
        self.b.cbranch(self.b.icmp_signed("<", index, end.ir), body, after)
        self.b.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(self.b.add(index, by.ir, flags=("nsw",)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)

    def spans(
        self, start: Operand, stop: Operand, lanes: int
    ) -> Iterator[tuple[Value, Value | None]]:
        """`for i, mask in e.spans(...)`: the body is written twice, once in a loop over whole
        vectors (mask None) and once for the rest, where the mask tells the lanes there are.
        """
        begin, end = self.i64(start), self.i64(stop)
        whole = begin + (end - begin) // lanes * lanes
        with self.loop(begin, whole, lanes) as i:
            yield i, None
        if lanes == 1:
            return
        with self.when(whole < end):
            yield whole, self.mask(end - whole, lanes)

    def mask(self, count: Value, lanes: int) -> Value:
        """Return a mask that is on in the first `count` lanes."""
        return self.const(vec(I32, lanes), list(range(lanes))) < count.trunc(I32).splat(lanes)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.ir):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """`with e.either(c) as (yes, no):`, then `with yes:` and `with no:`."""
        with self.b.if_else(condition.ir) as (yes, no):
            yield yes, no

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """A loop that is left by calling what it gives with a condition."""
        body, after = (self.function.append_basic_block() for _ in range(2))
        self.b.branch(body)
        self.b.position_at_end(body)

        def leave(condition: Value) -> None:
            on = self.function.append_basic_block()
            self.b.cbranch(condition.ir, after, on)
            self.b.position_at_end(on)

        yield leave
        self.b.branch(body)
        self.b.position_at_end(after)

    # Functions -------------------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *args: Any) -> Value:
        """A call of an LLVM intrinsic or of a function of the process, by name."""
        values = [a.ir if isinstance(a, Value) else a for a in args]
        results = self.module.globals.get(name)
        if results is None:
            kind = ir.FunctionType(result, [v.type for v in values])
            results = ir.Function(self.module, kind, name)
        return Value(self, self.b.call(results, values))

    def call_address(self, address: Value, *args: Value) -> None:
        """A call of a function that returns nothing, by its address."""
        kind = ir.FunctionType(VOID, [a.type for a in args])
        typed = self.b.inttoptr(address.ir, kind.as_pointer())
        self.b.call(typed, [a.ir for a in args])

    def _unary(self, name: str, x: Value) -> Value:
        return self.call(f"llvm.{name}.{_suffix(x.type)}", x.type, x)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        lanes = max(condition.lanes, yes.lanes, no.lanes)
        yes, no = (v.splat(lanes) if v.lanes < lanes else v for v in (yes, no))
        return Value(self, self.b.select(condition.ir, yes.ir, no.ir))

    def fma(self, a: Value, b: Operand, c: Value) -> Value:
        """a * b + c, rounded once."""
        lanes = max(v.lanes for v in (a, b, c) if isinstance(v, Value))
        values = [
            v if isinstance(v, Value) else self.const(scalar_of(a.type), v) for v in (a, b, c)
        ]
        values = [v.splat(lanes) if v.lanes < lanes else v for v in values]
        return self.call(f"llvm.fma.{_suffix(values[0].type)}", values[0].type, *values)

    def maximum(self, a: Value, b: Operand) -> Value:
        """The larger one; `b` where one is NaN."""
        x, y, _ = a._with(b)
        return self.select(a > b, Value(self, x), Value(self, y))

    def minimum(self, a: Value, b: Operand) -> Value:
        """The smaller one; `b` where one is NaN."""
        x, y, _ = a._with(b)
        return self.select(a < b, Value(self, x), Value(self, y))

    def sqrt(self, x: Value) -> Value:
        return self._unary("sqrt", x)

    def abs(self, x: Value) -> Value:
        return self._unary("fabs", x)

    def floor(self, x: Value) -> Value:
        return self._unary("floor", x)

    def _reduce(self, x: Value, both: Callable[[Value, Value], Value]) -> Value:
        """Return the reduce by halves, so that the order is the same on every CPU."""
        while x.lanes > 1:
            half = x.lanes // 2
            low, high = x.shuffle(range(half)), x.shuffle(range(half, 2 * half))
            x = both(low, high)
        return x

    def sum(self, x: Value) -> Value:
        """Return the sum of a vector's lanes, a power of two of them."""
        return self._reduce(x, lambda a, b: a + b)

    def largest(self, x: Value) -> Value:
        return self._reduce(x, self.maximum)

    def exp(self, x: Value) -> Value:
        """e to the x, relative error below 2e-7; 0 below -87.3, infinity above 88.72, NaN stays."""
        bounded = self.maximum(self.f32(-87.3, x.lanes), x)  # x where x is NaN
        bounded = self.minimum(self.f32(88.72, x.lanes), bounded)
        magic = 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number in the low bits
        shifted = self.fma(bounded, 1.4426950408889634, self.f32(magic, x.lanes))
        n = shifted - magic
        r = self.fma(n, -0.693359375, bounded)
        r = self.fma(n, 2.12194440e-4, r)
        p = self.f32(1.9875691500e-4, x.lanes)  # Cephes' expf
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            p = self.fma(p, r, self.f32(c, x.lanes))
        p = self.fma(p, r * r, r) + 1.0
        whole = vec(I32, x.lanes)
        y = (p.bits(whole) + (shifted.bits(whole) << 23)).bits(p.type)
        y = self.select(x < -87.3, self.f32(0.0, x.lanes), y)
        return self.select(x > 88.72, self.f32(float("inf"), x.lanes), y)

    def exp2(self, x: Value, degree: int) -> Value:
        """2 to the x, relative error by the polynomial's degree: 8e-5 for 3, 1e-7 for 5; 0 below
        -126, infinity from 128 on, NaN stays.
        """
        if x.lanes == 16 and self.has("avx512dq"):
            keep, near = self.const(I16, -1), self.const(I32, 4)
            zero = self.f32(0.0, 16)
            name = "llvm.x86.avx512.mask.{}.ps.512"
            down = self.const(I32, 9)  # what is left by rounding down, as scalef does
            rest = self.call(name.format("reduce"), x.type, x, down, zero, keep, near)
            p = self._polynomial(rest, POWERS_OF_TWO[degree])
            return self.call(name.format("scalef"), x.type, p, x, zero, keep, near)
        bounded = self.maximum(self.f32(-126.0, x.lanes), x)  # x where x is NaN
        bounded = self.minimum(self.f32(127.99999, x.lanes), bounded)
        magic = 12582912.0  # 1.5 * 2^23, as in exp
        shifted = bounded - 0.5 + magic
        p = self._polynomial(bounded - (shifted - magic), POWERS_OF_TWO[degree])
        whole = vec(I32, x.lanes)
        y = (p.bits(whole) + (shifted.bits(whole) << 23)).bits(p.type)
        y = self.select(x < -126.0, self.f32(0.0, x.lanes), y)
        return self.select(x >= 128.0, self.f32(float("inf"), x.lanes), y)

    def _polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Coefficients from that of x^0 on."""
        result = self.f32(coefficients[-1], x.lanes)
        for c in coefficients[-2::-1]:
            result = self.fma(result, x, self.f32(c, x.lanes))
        return result

    def sigmoid(self, x: Value) -> Value:
        return 1.0 / (self.exp(-x) + 1.0)

    def silu(self, x: Value) -> Value:
        return x / (self.exp(-x) + 1.0)

    def tanh(self, x: Value) -> Value:
        """Relative error below 5e-7: a polynomial near 0 (Cephes' tanhf), else by exp."""
        positive = self.abs(x)
        far = 1.0 - 2.0 / (self.exp(positive + positive) + 1.0)
        z = x * x
        p = self.f32(-5.70498872745e-3, x.lanes)
        for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            p = self.fma(p, z, self.f32(c, x.lanes))
        near = self.fma(p * z, x, x)
        signed = self.select(x < 0.0, -far, far)
        return self.select(positive < 0.625, near, signed)

    def log(self, x: Value) -> Value:
        """The natural logarithm of a normal number above 0, relative error below 3e-7 away from 1
        (Cephes' logf).
        """
        whole = vec(I32, x.lanes)
        bits = x.bits(whole)
        # x = m 2^n with m from sqrt(1/2) to sqrt(2)
        shifted = bits - 0x3F3504F3
        n = shifted.ashr(23)
        m = (bits - (n << 23)).bits(x.type) - 1.0
        z, power = m * m, n.sitofp()
        p = self.f32(7.0376836292e-2, x.lanes)
        for c in (
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ):
            p = self.fma(p, m, self.f32(c, x.lanes))
        y = self.fma(p * m, z, power * -2.12194440e-4)
        y = self.fma(z, -0.5, y) + m
        return self.fma(power, 0.693359375, y)

    def softplus(self, x: Value) -> Value:
        """log(1 + exp(x)), relative error below 1e-6."""
        y = self.exp(-self.abs(x))
        u = y + 1.0  # what log(u) misses by rounding, y / (u - 1) puts back
        grown = self.select(u.eq(1.0), y, self.log(u) * (y / (u - 1.0)))
        return self.select(x > 0.0, x + grown, grown)

    def erf(self, x: Value) -> Value:
        """The error function, error below 2e-7 (Abramowitz and Stegun, 7.1.26)."""
        size = self.abs(x)
        t = 1.0 / self.fma(size, 0.3275911, self.f32(1.0, x.lanes))
        p = self.f32(1.061405429, x.lanes)
        for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            p = self.fma(p, t, self.f32(c, x.lanes))
        y = 1.0 - p * t * self.exp(-size * size)
        return self.select(x < 0.0, -y, y)

    def sin_cos(self, x: Value) -> tuple[Value, Value]:
        """Return the sin cos of float32 angles up to about 1e9, as exact as float32 is: reduced in
        float64.
        """
        wide = x.widen()
        n = self.floor(wide * 0.6366197723675814 + 0.5)
        r = self.fma(n, -1.5707963267948966, wide)
        r = self.fma(n, -6.123233995736766e-17, r)
        z = r * r
        sine = self.const(r.type, 1.5897e-10)
        for c in (-2.5050747762e-8, 2.7557313621e-6, -1.984126982e-4, 8.3333333333e-3, -1 / 6):
            sine = self.fma(sine, z, self.const(r.type, c))
        sine = self.fma(sine * z, r, r)
        cosine = self.const(r.type, 2.0875723e-9)
        for c in (-2.7557314e-7, 2.480158728947e-5, -1.38888888888e-3, 1 / 24, -0.5):
            cosine = self.fma(cosine, z, self.const(r.type, c))
        cosine = self.fma(cosine, z, self.const(r.type, 1.0))
        quarter = n.fptosi(I64)
        odd, half = (quarter & 1).ne(0), (quarter & 2).ne(0)
        y, x = self.select(odd, cosine, sine), self.select(odd, sine, cosine)
        y, x = self.select(half, -y, y), self.select((quarter + 1 & 2).ne(0), -x, x)
        return y.narrow(), x.narrow()

    def gelu(self, x: Value, approximate: str) -> Value:
        """Compute the op of that name."""
        if approximate == "quick":
            return x * self.sigmoid(x * 1.702)
        if approximate == "tanh":
            inner = self.fma(x * x * x, 0.044715, x) * 0.7978845608028654
            return x * 0.5 * (self.tanh(inner) + 1.0)
        return x * 0.5 * (self.erf(x * 0.7071067811865476) + 1.0)

    def sums(self, vectors: Sequence[Value]) -> Value:
        """The sum of each vector's lanes, as one vector."""
        return self.folded(vectors, lambda a, b: a + b)

    def folded(self, vectors: Sequence[Value], both: Callable[[Value, Value], Value]) -> Value:
        """Each vector's lanes put together, as one vector: by folding two vectors into one, which
        takes a quarter of what one after another does. As many vectors as lanes, or a power of two
        fewer.
        """
        result, lanes = list(vectors), vectors[0].lanes
        width = lanes  # over which each vector's sum is spread
        while width > 1:
            starts = range(0, result[0].lanes, width)
            low = [start + i for start in starts for i in range(width // 2)]
            high = [i + width // 2 for i in low]
            if len(result) > 1:
                far = [lanes + i for i in low], [lanes + i for i in high]
                result = [
                    both(a.shuffle([*low, *far[0]], b), a.shuffle([*high, *far[1]], b))
                    for a, b in zip(result[0::2], result[1::2], strict=True)
                ]
            else:
                result = [both(result[0].shuffle(low), result[0].shuffle(high))]
            width //= 2
        return result[0]

    def dot_bf16(self, a: Value, b: Value, total: Value) -> Value:
        """Products of bf16 numbers, whose bits are int16 [32], added in pairs to fp32 [16]."""
        if self.has("avx512bf16"):
            kind = vec(BF16, 32)
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.call(name, total.type, total, a.bits(kind), b.bits(kind))
        even, odd = (
            [
                (side.bits(vec(I32, 16)) << 16 if half else side.bits(vec(I32, 16)) & ~0xFFFF)
                for side in (a, b)
            ]
            for half in (True, False)
        )
        for x, y in (even, odd):
            total = self.fma(x.bits(total.type), y.bits(total.type), total)
        return total

    def pairs_of_bf16(self, low: Value, high: Value) -> Value:
        """Float32 [L] twice to the bits of bfloat16 [2 L], to the nearest even; where the CPU does
        that, numbers below 1.2e-38 become 0.
        """
        if low.lanes == 16 and self.has("avx512bf16"):
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return self.call(name, vec(BF16, 32), high, low).bits(vec(I16, 32))
        return low.f32_to_bf16().concat(high.f32_to_bf16())

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose as many vectors as lanes."""
        result, lanes = list(rows), rows[0].lanes
        assert len(result) == lanes
        width = 1  # what is exchanged between two rows: runs of so many lanes
        while width < lanes:
            low = [i if not i & width else i - width + lanes for i in range(lanes)]
            high = [i + width if not i & width else i + lanes for i in range(lanes)]
            for i in range(lanes):
                if not i & width:
                    a, b = result[i], result[i + width]
                    result[i], result[i + width] = a.shuffle(low, b), a.shuffle(high, b)
            width *= 2
        return result

    # Tiles of AMX: eight registers of 16 rows of 64 bytes -----------------------------------------

    def tiles_begin(self) -> None:
        """Before the first tile of a call."""
        setup = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]
        self.call("llvm.x86.ldtilecfg", VOID, self.table(I8, setup))

    def tiles_end(self) -> None:
        """After the last: what is left in tiles costs at every switch of threads."""
        self.call("llvm.x86.tilerelease", VOID)

    def tile_zero(self, tile: int) -> None:
        self.call("llvm.x86.tilezero", VOID, self.const(I8, tile))

    def tile_load(self, tile: int, ptr: Value, stride: Operand = 64) -> None:
        """16 rows of 64 bytes, `stride` bytes apart."""
        self.call("llvm.x86.tileloadd64", VOID, self.const(I8, tile), ptr, self.i64(stride))

    def tile_store(self, tile: int, ptr: Value, stride: Operand = 64) -> None:
        self.call("llvm.x86.tilestored64", VOID, self.const(I8, tile), ptr, self.i64(stride))

    def tile_dot(self, total: int, a: int, b: int) -> None:
        """total[m, n] += sum_k a[m, k] b[k, n]: fp32 [16, 16], bf16 [16, 32], and bf16 [32, 16]
        with rows 2i and 2i + 1 of a column side by side.
        """
        tiles = [self.const(I8, tile) for tile in (total, a, b)]
        self.call("llvm.x86.tdpbf16ps", VOID, *tiles)

    def bytes_of_lanes(self, value: Value, index: Sequence[int]) -> Value:
        """Bytes of each 16 of a vector in another order, the same for all of them where there are
        16 indices; 0 for -1.
        """
        size, each = value.lanes, list(index) * (value.lanes // len(index))
        if size == 64 and self.has("avx512bw"):
            order = self.const(value.type, [at if at >= 0 else -128 for at in each])
            return self.call("llvm.x86.avx512.pshuf.b.512", value.type, value, order)
        lanes = [at + i // 16 * 16 if at >= 0 else size for i, at in enumerate(each)]
        return value.shuffle(lanes, self.const(value.type, 0))

    def lookup16(self, numbers: Sequence[int], index: Value) -> Value:
        """Look up in a table of 16 signed bytes the one that each byte 0 to 15 names."""
        for lanes, feature, name in (
            (64, "avx512bw", "llvm.x86.avx512.pshuf.b.512"),
            (32, "avx2", "llvm.x86.avx2.pshuf.b"),
            (16, "ssse3", "llvm.x86.ssse3.pshuf.b.128"),
        ):
            if index.lanes == lanes and self.has(feature):
                table = self.const(index.type, list(numbers) * (lanes // 16))
                return self.call(name, index.type, table, index)
        if index.lanes > 16 and self.has("ssse3"):
            half = index.lanes // 2
            low, high = index.shuffle(range(half)), index.shuffle(range(half, 2 * half))
            return self.lookup16(numbers, low).concat(self.lookup16(numbers, high))
        result = self.const(index.type, numbers[0])
        for at, number in enumerate(numbers[1:], 1):
            result = self.select(index.eq(at), self.const(index.type, number), result)
        return result

    def gather(self, table: Value, index: Value) -> Value:
        """Numbers of a table of int32 or int64, those that the index names: each of its lanes is
        as wide as a number, and none is negative.
        """
        if index.lanes == 1:
            return self.load(table, index.type, index.zext(I64) if index.type == I32 else index)
        for scalar, lanes, name in ((I64, 8, "qpq"), (I32, 16, "dpi")):
            if index.type == vec(scalar, lanes) and self.has("avx512f"):
                all_lanes = self.const(vec(I1, lanes), 1)
                size = self.const(I32, size_of(scalar))
                name = f"llvm.x86.avx512.mask.gather.{name}.512"
                nothing = self.const(index.type, 0)
                return self.call(name, index.type, nothing, table, index, all_lanes, size)
        result = self.const(index.type, 0)
        for lane in range(index.lanes):
            at = index[lane]
            number = self.load(table, at.type, at if at.type == I64 else at.zext(I64))
            result = result.insert(lane, number)
        return result

    def lookup16_f32(self, numbers: Sequence[float], index: Value) -> Value:
        """Look up in a table of 16 float32 the one that the lower 4 bits of each int32 name."""
        if index.lanes == 16 and self.has("avx512f"):
            table = self.const(vec(F32, 16), list(numbers))
            return self.call("llvm.x86.avx512.permvar.sf.512", table.type, table, index)
        table, result = self.table(F32, numbers), self.const(vec(F32, index.lanes), 0)
        for lane in range(index.lanes):
            number = self.load(table, F32, (index[lane] & 15).zext(I64))
            result = result.insert(lane, number)
        return result

    # Threads ---------------------------------------------------------------------------------

    def atomic_add(self, ptr: Value, value: Operand, ordering: str = "acq_rel") -> Value:
        """Adds to a 64-bit number that threads share; gives what it was."""
        return Value(self, self.b.atomic_rmw("add", ptr.ir, self.i64(value).ir, ordering))

    def atomic_or(self, ptr: Value, value: Operand, ordering: str = "acq_rel") -> Value:
        """Sets bits of a 64-bit number that threads share; gives what it was."""
        return Value(self, self.b.atomic_rmw("or", ptr.ir, self.i64(value).ir, ordering))

    def atomic_load(self, ptr: Value, ordering: str = "acquire") -> Value:
        return Value(self, self.b.load_atomic(ptr.ir, ordering, 8, typ=I64))


def _fit(scalar: ir.Type, value: Number) -> Number:
    """A constant as the type has it: float32 is written as a double that it can hold."""
    if scalar == F32:
        number = float(value)
        return float(struct.unpack("f", struct.pack("f", number))[0])
    return float(value) if scalar == F64 else int(value)


@lru_cache(maxsize=1024)
def _whole(number: int) -> ir.Constant:
    """Return the number of a lane."""
    return ir.Constant(I32, number)


@lru_cache(maxsize=1024)
def _lanes(numbers: tuple[int, ...]) -> ir.Constant:
    """Return the numbers of several lanes."""
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def _suffix(type_: ir.Type) -> str:
    """Return the suffix of the names of LLVM's intrinsics: v16f32."""
    scalar = scalar_of(type_)
    name = {F32: "f32", F64: "f64"}.get(scalar) or f"i{scalar.width}"
    return f"v{type_.count}{name}" if isinstance(type_, ir.VectorType) else name
