"""The emulator of PTX on programs by hand, whose results follow from the PTX ISA: what instructions
compute, where values of matrices lie, how lanes part and meet, and each fault that it is there for.
"""

from __future__ import annotations

import pytest
import torch
from ptx.kernels import execute
from ptx.machine import prepare
from ptx.memory import Fault
from ptx.program import Unsupported, parse

# r, rd, rs, p: registers; %r0 is the thread, %rd0 + 4 %r0 where its number of `a` lies.
PROGRAM = """
.version 8.4
.target sm_80
.extern .shared .align 16 .b8 smem[];
.visible .entry program({parameters})
.reqntid {threads}
{{
.reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<60>; .reg .b64 %rd<20>;
mov.u32 %r0, %tid.x;
{pointers}
mul.wide.u32 %rd10, %r0, 4;
{body}
ret;
}}
"""


def program(body: str, count: int, threads: int = 32):
    names = [f"program_param_{n}" for n in range(count)]
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 {name}" for name in names)
    pointers = "\n".join(f"ld.param.b64 %rd{n}, [{name}];" for n, name in enumerate(names))
    text = PROGRAM.format(parameters=parameters, threads=threads, pointers=pointers, body=body)
    return parse(text)


def run(body, *tensors, threads=32, grid=(1, 1), shared=0):
    """Parameters are the tensors' addresses, in %rd0, %rd1 and so on."""
    pointers = {f"operand {n}": tensor for n, tensor in enumerate(tensors)}
    text = program(body, len(tensors), threads)
    execute(text, list(pointers), pointers, {}, grid, shared, {})


def numbers(count=32, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)


def bits(x: torch.Tensor) -> list[int]:
    return [int(v) & 0xFFFFFFFF for v in x.view(torch.int32).tolist()]


NAN, INF, ONE = 0x7FC00000, 0x7F800000, 0x3F800000
TWO_31, TWO_33, HALF_UP = 0x4F000000, 0x50000000, 0x40200000  # 2.5
COMPUTED = [  # instruction of %r3 and %r4, their bits, bits of the result in %r5
    ("max.f32 %r5, %r3, %r4", NAN, ONE, ONE),
    ("max.NaN.f32 %r5, %r3, %r4", NAN, ONE, NAN),
    ("min.f32 %r5, %r3, %r4", ONE, NAN, ONE),
    ("min.s32 %r5, %r3, %r4", 0xFFFFFFFF, 1, 0xFFFFFFFF),
    ("min.u32 %r5, %r3, %r4", 0xFFFFFFFF, 1, 1),
    ("min.relu.s32 %r5, %r3, %r4", 0xFFFFFFFF, 1, 0),
    ("max.relu.s32 %r5, %r3, %r4", 5, 1, 5),
    ("add.s16x2 %r5, %r3, %r4", 0x7FFFFFFF, 0x00010002, 0x80000001),
    ("cvt.rzi.s32.f32 %r5, %r3", NAN, 0, 0),
    ("cvt.rzi.s32.f32 %r5, %r3", TWO_33, 0, 0x7FFFFFFF),
    ("cvt.rzi.s32.f32 %r5, %r3", 0xC0200000, 0, 0xFFFFFFFE),
    ("cvt.rni.s32.f32 %r5, %r3", HALF_UP, 0, 2),
    ("cvt.rmi.f32.f32 %r5, %r3", 0xC0200000, 0, 0xC0400000),
    ("cvt.rn.f32.s32 %r5, %r3", 0x01000001, 0, 0x4B800000),  # 2^24 + 1, to even
    ("cvt.rn.f32.u32 %r5, %r3", 0x80000000, 0, TWO_31),
    ("cvt.rn.bf16x2.f32 %r5, %r3, %r4", 0x3F808000, 0x3F818000, 0x3F803F82),  # ties to even
    ("cvt.rn.bf16x2.f32 %r5, %r3, %r4", NAN, 0x7F7FFFFF, 0x7FFF7F80),
    ("fma.rn.bf16x2 %r5, %r3, %r4, %r3", 0x3F803F81, 0x3F803F81, 0x40004002),
    ("setp.lt.f32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", NAN, ONE, 0),
    ("setp.geu.f32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", NAN, ONE, 1),
    ("setp.ne.f32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", NAN, ONE, 0),
    ("setp.neu.f32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", NAN, ONE, 1),
    ("setp.num.f32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", NAN, ONE, 0),
    ("setp.num.bf16x2 %p1|%p2, %r3, %r4; selp.b32 %r5, 1, 0, %p1", 0x7FC03F80, 0x3F803F80, 1),
    ("setp.num.bf16x2 %p1|%p2, %r3, %r4; selp.b32 %r5, 1, 0, %p2", 0x7FC03F80, 0x3F803F80, 0),
    ("setp.lt.u32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", 0xFFFFFFFF, 1, 0),
    ("setp.lt.s32 %p1, %r3, %r4; selp.b32 %r5, 1, 0, %p1", 0xFFFFFFFF, 1, 1),
    ("popc.b32 %r5, %r3", 0xF00F0001, 0, 9),
    ("shl.b32 %r5, %r3, %r4", 1, 32, 0),
    ("shr.u32 %r5, %r3, %r4", 0x80000000, 40, 0),
    ("shr.s32 %r5, %r3, %r4", 0x80000000, 40, 0xFFFFFFFF),
    ("bfe.u32 %r5, %r3, 4, 8", 0xABCD, 0, 0xBC),
    ("bfe.s32 %r5, %r3, 4, 4", 0xABCD, 0, 0xFFFFFFFC),
    ("prmt.b32 %r5, %r3, %r4, 0x7041", 0x33221180, 0x77665544, 0x77804411),
    ("prmt.b32 %r5, %r3, 0, 0x8888", 0x33221180, 0, 0xFFFFFFFF),
    ("mul.hi.s32 %r5, %r3, %r4", 0xFFFFFFFE, 0x40000000, 0xFFFFFFFF),
    ("mul.hi.u32 %r5, %r3, %r4", 0xFFFFFFFE, 0x40000000, 0x3FFFFFFF),
    ("mad.lo.s32 %r5, %r3, %r4, %r4", 0xFFFFFFFF, 5, 0),
    ("div.s32 %r5, %r3, %r4", 0xFFFFFFF9, 2, 0xFFFFFFFD),
    ("rem.s32 %r5, %r3, %r4", 0xFFFFFFF9, 2, 0xFFFFFFFF),
    ("mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r5, {%rs2, %rs1}", 0x12345678, 0, 0x56781234),
    ("cvt.u16.u32 %rs1, %r3; cvt.s32.s16 %r5, %rs1", 0x1234FFFE, 0, 0xFFFFFFFE),
    ("cvt.s8.s32 %rs1, %r3; cvt.u32.u16 %r5, %rs1", 0x180, 0, 0xFF80),
    ("lop3.b32 %r5, %r3, %r4, 0, 0x30", 0b1100, 0b1010, 0b0100),  # a & ~b
    ("ex2.approx.ftz.f32 %r5, %r3", 0xC3140000, 0, 0),  # 2^-148 is subnormal
    ("ex2.approx.f32 %r5, %r3", 0xC3140000, 0, 2),
    ("ex2.approx.f32 %r5, %r3", 0xFF800000, 0, 0),
    ("rsqrt.approx.f32 %r5, %r3", 0x40800000, 0, 0x3F000000),
    ("mul.ftz.f32 %r5, %r3, %r4", 0x00000001, INF, NAN),
]


@pytest.mark.parametrize(("instruction", "a", "b", "expected"), COMPUTED)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_an_instruction_computes(instruction, a, b, expected):
    out = numbers()
    body = f"mov.b32 %r3, 0x{a:x}; mov.b32 %r4, 0x{b:x}; {instruction};"
    run(body + "add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r5;", out)
    result = set(bits(out))
    if expected == NAN:
        assert out.view(torch.float32).isnan().all()
    else:
        assert result == {expected}, [hex(r) for r in result]


@pytest.mark.parametrize(
    ("a", "b"), [(-3, 5 << 60), (2**63 - 1, -(2**63)), (-1, -1), (7 << 50, 9 << 40)]
)
def test_upper_halves_of_64_bits(a, b):
    x, out = torch.tensor([a, b]), numbers(2, torch.int64)
    run(
        "ld.global.v2.b64 {%rd4, %rd5}, [%rd0]; mul.hi.s64 %rd6, %rd4, %rd5; mul.hi.u64 %rd7, %rd4, %rd5;"
        "st.global.v2.b64 [%rd1], {%rd6, %rd7};",
        x,
        out,
    )
    unsigned = (a % 2**64) * (b % 2**64) >> 64
    assert out.tolist() == [a * b >> 64, unsigned - (unsigned >> 63 << 64)]


SHUFFLES = {  # where lane i takes its value from
    "bfly.b32 %r5, %r0, 3, 31": lambda i: i ^ 3,
    "up.b32 %r5, %r0, 2, 0": lambda i: i - 2 if i >= 2 else i,
    "down.b32 %r5, %r0, 2, 31": lambda i: i + 2 if i + 2 < 32 else i,
    "idx.b32 %r5, %r0, 5, 31": lambda i: i // 32 * 32 + 5,
    "idx.b32 %r5, %r0, 1, 6175": lambda i: i // 8 * 8 + 1,  # 0x181f: segments of eight
    "up.b32 %r5, %r0, 1, 6144": lambda i: i - 1 if i % 8 else i,
}


@pytest.mark.parametrize("form", SHUFFLES)
def test_lanes_exchange(form):
    out = numbers(64)
    run(
        f"shfl.sync.{form}, -1; add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r5;",
        out,
        threads=64,
    )
    expected = [SHUFFLES[form](i % 32) + i // 32 * 32 for i in range(64)]
    assert out.tolist() == expected


def test_a_warp_is_reduced():
    out = numbers(64)
    body = (
        "redux.sync.max.s32 %r5, %r0, -1; add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r5;"
    )
    run(body, out, threads=64)
    assert out.tolist() == [31] * 32 + [63] * 32


PRODUCTS = [("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32")]


def fragment_a(shape: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of value i, as the ISA has it (9.7.14.5, "Matrix Fragments for mma.m16n8k16" and
    "mma.m16n8k8").
    """
    group, within = lane >> 2, lane % 4
    if shape == "m16n8k16":
        row = group if i < 2 or 4 <= i < 6 else group + 8
        return row, within * 2 + (i & 1) + (8 if i >= 4 else 0)
    return group + 8 * (i & 1), within + 4 * (i >> 1)


def fragment_b(shape: str, lane: int, i: int) -> tuple[int, int]:
    group, within = lane >> 2, lane % 4
    if shape == "m16n8k16":
        return within * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return within + 4 * i, group


@pytest.mark.parametrize(("shape", "kind"), PRODUCTS)
def test_matrices_are_multiplied(shape, kind):
    depth, dtype = (
        (16, getattr(torch, {"bf16": "bfloat16"}.get(kind, "float16")))
        if kind != "tf32"
        else (8, torch.float32)
    )
    rng = torch.Generator().manual_seed(1)
    a, b, c = (
        torch.randint(-9, 9, s, generator=rng).float() for s in ((16, depth), (depth, 8), (16, 8))
    )
    values_a, values_b = (8, 4) if depth == 16 else (4, 2)
    in_a = torch.stack(
        [
            torch.stack([a[fragment_a(shape, lane, i)] for i in range(values_a)])
            for lane in range(32)
        ]
    )
    in_b = torch.stack(
        [
            torch.stack([b[fragment_b(shape, lane, i)] for i in range(values_b)])
            for lane in range(32)
        ]
    )
    places = [
        [(lane >> 2) + 8 * (i >> 1), lane % 4 * 2 + (i & 1)] for lane in range(32) for i in range(4)
    ]
    row, column = torch.tensor(places).T
    in_c = c[row, column].reshape(32, 4).contiguous()
    out = torch.full((32, 4), torch.nan)
    run(
        "mul.wide.u32 %rd11, %r0, 16; mul.wide.u32 %rd12, %r0, 8; add.s64 %rd4, %rd0, %rd11; add.s64 %rd5, %rd1, %rd12;"
        "add.s64 %rd6, %rd2, %rd11; add.s64 %rd7, %rd3, %rd11;"
        "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4]; ld.global.v2.b32 {%r14, %r15}, [%rd5];"
        "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd6];"
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};"
        "st.global.v4.b32 [%rd7], {%r30, %r31, %r32, %r33};",
        in_a.to(dtype).contiguous(),
        in_b.to(dtype).contiguous(),
        in_c,
        out,
    )
    assert torch.equal(out.reshape(-1), (a @ b + c)[row, column])


FILL = (  # 16 bytes of shared memory for each of 32 lanes: the two-byte numbers 8 i to 8 i + 7
    "shl.b32 %r1, %r0, 4; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1; shl.b32 %r4, %r0, 3;"
    "mul.lo.s32 %r5, %r4, 65537; add.s32 %r5, %r5, 65536; add.s32 %r6, %r5, 131074; add.s32 %r7, %r6, 131074;"
    "add.s32 %r8, %r7, 131074; st.shared.v4.b32 [%r3], {%r5, %r6, %r7, %r8};"
)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded(transposed):
    """Four of 8 x 8; lane i gives the row of numbers i."""
    out, trans = numbers(128), ".trans" if transposed else ""
    run(
        FILL + "bar.sync 0;"
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];"
        "mul.wide.u32 %rd11, %r0, 16; add.s64 %rd4, %rd0, %rd11; st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};",
        out,
        shared=512,
    )
    result = out.view(torch.int16).reshape(32, 4, 2)
    for lane in range(32):
        for number in range(4):
            for i in range(2):
                row, column = lane // 4, lane % 4 * 2 + i
                if transposed:
                    row, column = column, row
                assert result[lane, number, i] == number * 64 + row * 8 + column


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_stored(transposed):
    """What `ldmatrix` takes apart, `stmatrix` puts together."""
    out, trans = numbers(128), ".trans" if transposed else ""
    run(
        FILL + "bar.sync 0;"
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];"
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3+512], {{%r10, %r11, %r12, %r13}}; bar.sync 0;"
        "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3+512];"
        "mul.wide.u32 %rd11, %r0, 16; add.s64 %rd4, %rd0, %rd11; st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};",
        out,
        shared=1024,
    )
    assert out.view(torch.int16).tolist() == list(range(256))


# Products of four warps: a matrix of 16-bit values [rows, 16] lies in runs of 16 bytes, "Asynchronous
# Warpgroup Level Matrix Shared Memory Layout" of the PTX ISA. By mode: bytes of a row of an atom.
ATOM = {0: 16, 1: 128, 2: 64, 3: 32}


def strides(mode: int, along: bool, rows: int) -> tuple[int, int]:
    """Leading and stride bytes of atoms of eight rows that lie one behind the other."""
    size = 8 * ATOM[mode]
    if along:
        return (size, 2 * size) if mode == 0 else (16, size)
    return (size * rows // 8, size) if mode == 0 else (2 * size, size)


def placed(mode: int, along: bool, rows: int, row: int, k: int) -> int:
    """The byte of a value; along: sixteen of a row are neighbours, else the rows."""
    leading, stride = strides(mode, along, rows)
    values = ATOM[mode] // 2
    if mode == 0:
        inside = (row % 8 * 8 + k % 8) * 2 if along else (k % 8 * 8 + row % 8) * 2
        return inside + k // 8 * leading + row // 8 * stride
    if along:
        line, at = row % 8, k * 2
        begin = row // 8 * stride
    else:
        line, at = k % 8, row % values * 2
        begin = row // values * leading + k // 8 * stride
    run = at // 16 ^ line * ATOM[mode] // 128 % (ATOM[mode] // 16)
    return begin + line * ATOM[mode] + run * 16 + at % 16


def laid_out(x: torch.Tensor, mode: int, along: bool) -> torch.Tensor:
    """The bytes of shared memory that have x [rows, 16]: 8 KiB."""
    result = torch.zeros(4096, dtype=x.dtype)
    for row in range(len(x)):
        for k in range(16):
            result[placed(mode, along, len(x), row, k) // 2] = x[row, k]
    return result


def descriptor(start: int, mode: int, along: bool, rows: int) -> int:
    leading, stride = strides(mode, along, rows)
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


D = ", ".join(f"%r{n}" for n in range(20, 52))
WRITE_16_KIB = "shl.b32 %r1, %r0, 4; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1; mul.wide.u32 %rd11, %r0, 16; add.s64 %rd4, %rd0, %rd11;" + "".join(
    f"ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4+{at}]; st.shared.v4.b32 [%r3+{at}], {{%r10, %r11, %r12, %r13}};"
    for at in range(0, 16384, 2048)
)  # fmt: skip
VISIBLE = "fence.proxy.async.shared::cta; bar.sync 0;"
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
STORE_D = "mul.wide.u32 %rd11, %r0, 128; add.s64 %rd4, %rd1, %rd11;" + "".join(
    f"st.global.v4.b32 [%rd4+{n * 4}], {{%r{20 + n}, %r{21 + n}, %r{22 + n}, %r{23 + n}}};" for n in range(0, 32, 4)
)  # fmt: skip


def wide(
    mode: int = 1, a_along: bool = True, b_along: bool = True, adds: int = 0, b_at: int = 8192
) -> str:
    a, b = descriptor(0, mode, a_along, 64), descriptor(b_at, mode, b_along, 64)
    return (
        f"mov.b64 %rd5, 0x{a:x}; mov.b64 %rd6, 0x{b:x}; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
        f" {{{D}}}, %rd5, %rd6, {adds}, 1, 1, {1 - a_along}, {1 - b_along};"
    )


def d_of(x: torch.Tensor) -> torch.Tensor:
    """Registers [threads, 32] of a result [64, 64], "Register Fragments for wgmma.mma_async.m64nNk16"."""
    places = [
        (t // 32 * 16 + t % 32 // 4 + (i // 2 % 2) * 8, i // 4 * 8 + t % 4 * 2 + i % 2)
        for t in range(128)
        for i in range(32)
    ]
    row, column = torch.tensor(places).T
    return x[row, column].reshape(128, 32)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-9, 9, (64, 16), generator=rng).bfloat16() for _ in range(2))
    return a, b


@pytest.mark.parametrize("mode", ATOM)
@pytest.mark.parametrize("a_along", [True, False])
@pytest.mark.parametrize("b_along", [True, False])
def test_matrices_are_multiplied_by_four_warps(mode, a_along, b_along):
    """Twice, the second product added to the first."""
    a, b = factors()
    memory = torch.cat([laid_out(a, mode, a_along), laid_out(b, mode, b_along)])
    out = torch.full((128, 32), torch.nan)
    product = "wgmma.fence.sync.aligned;" + wide(mode, a_along, b_along)
    product += wide(mode, a_along, b_along, adds=1)
    run(WRITE_16_KIB + VISIBLE + product + WAIT + STORE_D, memory, out, threads=128, shared=16384)
    assert torch.equal(out, d_of(a.float() @ b.float().T * 2))


def test_a_matrix_among_registers_is_multiplied():
    a, b = factors()
    memory = torch.cat([torch.zeros(4096).bfloat16(), laid_out(b, 1, True)])
    fragments = torch.stack(
        [
            torch.stack(
                [
                    a[t // 32 * 16 + row, column]
                    for row, column in (fragment_a("m16n8k16", t % 32, i) for i in range(8))
                ]
            )
            for t in range(128)
        ]
    )
    out = torch.full((128, 32), torch.nan)
    load = "mul.wide.u32 %rd11, %r0, 16; add.s64 %rd4, %rd2, %rd11; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];"
    product = wide().replace(
        "%rd5, %rd6, 0, 1, 1, 0, 0;", "{%r10, %r11, %r12, %r13}, %rd6, 0, 1, 1, 0;"
    )
    fence = "wgmma.fence.sync.aligned;"
    body = WRITE_16_KIB + VISIBLE + load + fence + product + WAIT + STORE_D
    run(body, memory, out, fragments, threads=128, shared=16384)
    assert torch.equal(out, d_of(a.float() @ b.float().T))
    for wrong, words in (
        (body.replace(fence, ""), "no fence follows"),
        (body.replace(WAIT, "mov.b32 %r11, 0;" + WAIT), "written that a product still uses"),
    ):
        with pytest.raises(Fault, match=words):
            run(wrong, memory, out, fragments, threads=128, shared=16384)


WIDE = WRITE_16_KIB + VISIBLE + wide() + WAIT
WIDE_FAULTS = [
    (WIDE.replace("fence.proxy.async.shared::cta;", ""), "what no fence made visible"),
    (WIDE.replace("bar.sync 0;", ""), "a read races with a write"),
    (WIDE.replace("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;") + "mov.b32 %r1, %r20;", "read that a product still uses"),
    (WIDE.replace(WAIT, "mov.b32 %r51, 0;" + WAIT), "written that a product still uses"),
    (WIDE.replace(WAIT, "st.shared.b32 [%r3], %r0;" + WAIT), "a write to what a product still reads"),
    (WIDE + "st.shared.b32 [%r3], %r0;", "a write races with a read"),
    (WRITE_16_KIB + VISIBLE + wide(adds=1), "adds to what nothing was written to"),
    (WRITE_16_KIB + VISIBLE + wide(b_at=9216) + WAIT, "out of bounds of shared memory"),
    (WRITE_16_KIB + VISIBLE + "setp.lt.u32 %p1, %r0, 32; @%p1 bra end;" + wide() + WAIT + "end:", "a warp of a group is elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), WIDE_FAULTS)
def test_a_fault_of_a_product_of_four_warps_is_found(body, words):
    memory, out = torch.zeros(8192).bfloat16(), torch.zeros(128, 32)
    with pytest.raises(Fault, match=words):
        run(body, memory, out, threads=128, shared=16384)


@pytest.mark.parametrize(
    "body",
    [
        WIDE + "bar.sync 0; st.shared.b32 [%r3], %r0;",
        WRITE_16_KIB + "bar.sync 0; fence.proxy.async.shared::cta;" + wide() + WAIT,
        WIDE + "mov.b32 %r20, 0; wgmma.fence.sync.aligned;" + wide(adds=1) + WAIT,
    ],
    ids=range(3),
)
def test_what_is_no_fault_of_a_product_of_four_warps(body):
    """A fence by who reads does as well as one by who wrote."""
    memory, out = torch.zeros(8192).bfloat16(), torch.zeros(128, 32)
    run(body, memory, out, threads=128, shared=16384)


def test_lanes_part_and_meet():
    """A loop that each lane leaves at its own time, two ways behind it, and a shuffle where all are."""
    out = numbers(64)
    run(
        "mov.b32 %r1, 0; mov.b32 %r2, 0;"
        "loop: add.s32 %r1, %r1, %r2; add.s32 %r2, %r2, 1; setp.le.s32 %p1, %r2, %r0; @%p1 bra loop;"
        "and.b32 %r3, %r0, 1; setp.eq.s32 %p2, %r3, 0; @%p2 bra even;"
        "neg.s32 %r4, %r1; bra.uni join;"
        "even: mov.b32 %r4, %r1;"
        "join: shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;"
        "add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11], %r5;",
        out,
        threads=64,
    )
    sums = [sum(range(i + 1)) * (-1 if i % 2 else 1) for i in range(64)]
    assert out.tolist() == [sums[i ^ 1] for i in range(64)]


def test_blocks_have_shared_memory_of_their_own():
    out = numbers(3 * 2 * 64)
    run(
        "shl.b32 %r1, %r0, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y;"
        "mad.lo.s32 %r6, %r5, 3, %r4; mad.lo.s32 %r7, %r6, 64, %r0; st.shared.b32 [%r3], %r7; bar.sync 0;"
        "xor.b32 %r8, %r3, 252; ld.shared.b32 %r9, [%r8]; mul.wide.u32 %rd11, %r7, 4; add.s64 %rd12, %rd0, %rd11;"
        "st.global.b32 [%rd12], %r9;",
        out,
        threads=64,
        grid=(3, 2),
        shared=256,
    )
    assert out.tolist() == [block * 64 + 63 - i for block in range(6) for i in range(64)]


SHARED = "shl.b32 %r1, %r0, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1;"
COPY = "shl.b32 %r1, %r0, 4; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1; mul.wide.u32 %rd11, %r0, 16; add.s64 %rd4, %rd0, %rd11;"
ASYNC = COPY + "cp.async.cg.shared.global [%r3], [%rd4], 16; cp.async.commit_group;"
READ = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];"
OTHERS = "xor.b32 %r4, %r3, 1008;"  # what the last lane of 64 writes, for the first
FAULTS = [
    ("add.s64 %rd11, %rd0, %rd10; ld.global.b32 %r5, [%rd11+4];", "out of bounds: byte 256 of operand 0"),
    ("add.s64 %rd11, %rd0, %rd10; st.global.b32 [%rd11+-4], %r0;", "out of bounds: byte -4 of operand 0"),
    ("mul.wide.u32 %rd11, %r0, 4; add.s64 %rd11, %rd0, %rd11; ld.global.v2.b32 {%r5, %r6}, [%rd11];", "misaligned: byte 4"),
    ("ld.global.b32 %r5, [%rd10];", "out of bounds"),
    (SHARED + "ld.shared.b32 %r5, [%r3+1000];", "byte 1000 is out of bounds of shared memory"),
    (SHARED + "ld.shared.b32 %r5, [%r3];", "nobody wrote: byte 0"),
    ("add.s32 %r5, %r6, 1;", "a register is read that nothing was written to"),
    ("mov.b32 {%rs1, %rs2}, %r0; mov.b32 %r5, {%rs1, %rs3}; mov.b32 {%rs4, %rs5}, %r5;", "a register is read that nothing was written to"),
    ("mov.b32 {%rs1, %rs2}, %r0; mov.b32 %r5, {%rs1, %rs3}; mov.b32 {_, %rs5}, %r5;", "a register is read that nothing was written to"),
    ("setp.lt.s32 %p1, %r0, 7; @%p1 mov.b32 %r6, 1; add.s32 %r5, %r6, 1;", "written to; block 0, thread 7; 57 threads"),
    (SHARED + "st.shared.b32 [%r3], %r0; xor.b32 %r4, %r3, 252; ld.shared.b32 %r5, [%r4];", "a read races with a write"),
    (SHARED + "st.shared.b32 [%r3], %r0; xor.b32 %r4, %r3, 4; ld.shared.b32 %r5, [%r4];", "a read races with a write"),
    (SHARED + "st.shared.b32 [%r3], %r0; bar.sync 0; xor.b32 %r4, %r3, 252; ld.shared.b32 %r5, [%r4]; st.shared.b32 [%r3], %r1;", "a write races with a read"),
    (SHARED + "st.shared.b32 [%r2], %r0; bar.sync 0; ld.shared.b32 %r5, [%r2];", "two writes of one instruction race"),
    (SHARED + "setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r0, 40; @%p1 st.shared.b32 [%r2], 1; @%p2 st.shared.b32 [%r2], 2;", "two writes race"),
    (SHARED + "st.shared.b32 [%r3], %r0; bar.sync 0; ld.shared.b32 %r5, [%r2]; bar.warp.sync -1; setp.eq.s32 %p1, %r0, 1; @%p1 st.shared.b32 [%r2], 7;", "a write races with a read"),
    (ASYNC + READ, "still being copied"),
    (ASYNC + ASYNC.partition("cp.")[0] + "cp.async.cg.shared.global [%r3+1024], [%rd4], 16; cp.async.commit_group; cp.async.wait_group 2;" + READ, "still being copied"),
    (ASYNC + "cp.async.wait_group 0;" + OTHERS + READ.replace("[%r3]", "[%r4]"), "a read races with a write"),
    (ASYNC + "st.shared.b32 [%r3], %r0;", "a write to what is still being copied"),
    (ASYNC + "cp.async.wait_group 0; bar.sync 0;" + OTHERS + READ.replace("[%r3]", "[%r4]") + "cp.async.cg.shared.global [%r3], [%rd4], 16;", "a write races with a read"),
    (ASYNC.replace("16; cp.async.c", "16, 5; cp.async.c"), "a copy of 16 bytes reads some of them"),
    ("setp.lt.s32 %p1, %r0, 16; @%p1 bra over; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1; over:", "some lanes of a warp are elsewhere"),
    ("shfl.sync.bfly.b32 %r5, %r0, 1, 31, 255;", "some lanes of a warp are left out"),
    ("setp.lt.s32 %p1, %r0, 32; @%p1 bra over; bar.sync 0; bra.uni end; over: bar.sync 0; end:", "wait at different barriers"),
    ("and.b32 %r5, %r0, 3; div.s32 %r6, %r0, %r5;", "an integer is divided by zero"),
    ("st.global.b32 [%rd0], %r0;", "two writes of one instruction race: byte 0 of operand 0"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), FAULTS)
def test_a_fault_is_found(body, words):
    x = torch.arange(256, dtype=torch.int32)
    size = 256 if not body.startswith(COPY) else 1024
    with pytest.raises(Fault, match=words):
        run(body, x[: size // 4], threads=64, shared=2048 if size == 1024 else size)


RIGHT = [
    "mov.b32 {%rs1, %rs2}, %r0; mov.b32 %r5, {%rs1, %rs3}; mov.b32 {%rs4, _}, %r5; cvt.u32.u16 %r6, %rs4;",
    SHARED + "st.shared.b32 [%r3], %r0; bar.sync 0; xor.b32 %r4, %r3, 252; ld.shared.b32 %r5, [%r4]; bar.sync 0; st.shared.b32 [%r3], %r1;",
    SHARED + "st.shared.b32 [%r3], %r0; bar.warp.sync -1; xor.b32 %r4, %r3, 4; ld.shared.b32 %r5, [%r4]; bar.warp.sync -1; st.shared.b32 [%r3], %r1;",
    SHARED + "st.shared.b32 [%r2], 5; bar.sync 0; ld.shared.b32 %r5, [%r2];",
    SHARED + "st.shared.b32 [%r3], %r0; ld.shared.b32 %r5, [%r3]; st.shared.b32 [%r3], %r5;",
    ASYNC + "cp.async.wait_group 0;" + READ + "bar.sync 0;" + OTHERS + READ.replace("[%r3]", "[%r4]"),
    ASYNC + "cp.async.cg.shared.global [%r3+1024], [%rd4], 16; cp.async.commit_group; cp.async.wait_group 1;" + READ,
    "setp.lt.s32 %p1, %r0, 32; @%p1 bra over; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1; over: bar.sync 0;",
    "st.global.b32 [%rd0], 5;",
]  # fmt: skip


@pytest.mark.parametrize("body", RIGHT, ids=range(len(RIGHT)))
def test_what_is_no_fault(body):
    run(body, torch.arange(256, dtype=torch.int32), threads=64, shared=2048)


def test_zeros_are_copied_where_nothing_is_read():
    x, out = torch.arange(4, dtype=torch.int32), numbers(4 * 32)
    run(
        COPY
        + "setp.eq.s32 %p1, %r0, 0; selp.b32 %r9, 16, 0, %p1; cp.async.cg.shared.global [%r3], [%rd4], 16, %r9;"
        "cp.async.commit_group; cp.async.wait_group 0;" + READ + "add.s64 %rd5, %rd1, %rd11;"
        "st.global.v4.b32 [%rd5], {%r10, %r11, %r12, %r13};",
        x,
        out,
        shared=512,
    )
    assert out.tolist() == [0, 1, 2, 3] + [0] * 124


def test_blocks_are_not_in_any_order():
    """What one block wrote, another may not read; nor may both write different values."""
    first = "mov.u32 %r4, %ctaid.x; setp.eq.s32 %p1, %r4, 0; @%p1 st.global.b32 [%rd11], %r0;"
    second = "setp.eq.s32 %p2, %r4, 1; @%p2 ld.global.b32 %r5, [%rd11];"
    for body, words in (
        (first + second, "a read races with a write"),
        ("mov.u32 %r4, %ctaid.x; st.global.b32 [%rd11], %r4;", "two writes"),
    ):
        with pytest.raises(Fault, match=words):
            run("add.s64 %rd11, %rd0, %rd10;" + body, numbers(), grid=(2, 1))


@pytest.mark.parametrize(
    "text",
    ["tcgen05.wait::ld.sync.aligned", "add.rz.f32 %r1, %r2, %r3", "ld.global.v8.b32 %r1, [%rd0]", "bra nowhere",
     "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2", "bar.sync 1, 64", "mov.b32 %r1, $x"],
)  # fmt: skip
def test_an_unknown_instruction_is_refused_by_its_text(text):
    """Also where nothing would run it."""
    with pytest.raises(Unsupported) as refused:
        prepare(program(f"bra.uni end; {text}; end:", 1))
    assert text.split()[-1] in str(refused.value)
