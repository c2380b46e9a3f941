"""PTX text into a program: registers numbered, instructions with their operands, and the stretches
of them that are entered at their first and left at their last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

WIDTHS = {"pred": np.bool_, "16": np.uint16, "32": np.uint32, "64": np.uint64}
SPECIAL = re.compile(r"%(?:n?tid|n?ctaid)\.[xyz]|%laneid|%warpid")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
STATEMENT = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>%?[\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<rest>.*)", re.S
)
ADDRESS = re.compile(r"\[\s*(?P<base>[%$\w]+)\s*(?:\+\s*(?P<plus>-?\w+)|(?P<minus>-\s*\d+))?\s*\]")
BRANCHES = ("bra", "ret", "exit", "bar")  # what ends a stretch


class Unsupported(Exception):
    """An instruction, or a form of one, that the emulator does not know."""


@dataclass(frozen=True)
class Register:
    number: int
    dtype: type

    @property
    def bits(self) -> int:
        return 1 if self.dtype is np.bool_ else np.dtype(self.dtype).itemsize * 8


@dataclass(frozen=True)
class Immediate:
    """Bits of a constant, as two's complement where it is negative; of a float as they are."""

    bits: int


@dataclass(frozen=True)
class Special:
    """A register that the hardware sets, `%tid.x` for one."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; the base is a register, or the name of a parameter or variable."""

    base: Register | str
    offset: int


@dataclass(frozen=True)
class Name:
    """A label, or a variable whose address is meant."""

    text: str


Operand = Register | Immediate | Special | Address | Name | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """opcode: with all that stands behind it, `setp.lt.s32`. guard: the predicate it depends on, and
    the value that this has to have. source: the file and line that it was compiled from.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str
    source: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    def refused(self, why: str = "not supported") -> Unsupported:
        return Unsupported(f"{self.text} ({self.source}): {why}")


@dataclass
class Stretch:
    """Instructions that run one after the other, and what follows: a branch, `bar` or `ret` as the
    last one; else the next stretch.
    """

    instructions: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None


@dataclass(frozen=True)
class Program:
    """parameters: name to the place and the size of its bytes. labels: of stretches. variables: names
    of shared memory, all of which begin at its start.
    """

    name: str
    parameters: dict[str, tuple[int, int]]
    registers: int
    threads: int
    labels: dict[str, int]
    stretches: list[Stretch]
    variables: frozenset[str]

    def instructions(self) -> Iterator[Instruction]:
        for stretch in self.stretches:
            yield from stretch.instructions


PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)?\.align\s+\d+\s+)?([\w$]+)"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
SHARED = re.compile(r"\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[\];")


class _Registers:
    """Numbers by name: those of the function, and of scopes inside it, whose names may be the same."""

    def __init__(self) -> None:
        self.prefixes: dict[str, type] = {}
        self.scopes: list[dict[str, Register]] = [{}]
        self.count = 0

    def declare(self, text: str) -> None:
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()  # type: ignore[union-attr]
        dtype = WIDTHS[kind if kind == "pred" else kind[1:] if kind[0] in "busf" else kind]
        for name in re.split(r"\s*,\s*", names.strip()):
            if match := re.fullmatch(r"(%?[\w$]*?)<(\d+)>", name):
                self.prefixes[match[1]] = dtype
            else:
                self.scopes[-1][name] = self._new(dtype)

    def _new(self, dtype: type) -> Register:
        self.count += 1
        return Register(self.count - 1, dtype)

    def find(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        prefix = name.rstrip("0123456789")
        if prefix == name or prefix not in self.prefixes:
            return None
        return self.scopes[0].setdefault(name, self._new(self.prefixes[prefix]))


class _Reader:
    def __init__(self) -> None:
        self.registers, self.source = _Registers(), "?"

    def operand(self, text: str) -> Operand:
        if text[0] == "{":
            return tuple(self.operand(part) for part in OPERAND.findall(text[1:-1]))
        if text[0] == "[":
            match = ADDRESS.fullmatch(text)
            if match is None:
                raise Unsupported(f"address {text} ({self.source})")
            offset = match["plus"] or (match["minus"] or "0").replace(" ", "")
            return Address(self.registers.find(match["base"]) or match["base"], int(offset, 0))
        if "|" in text:
            return tuple(self.operand(part) for part in text.split("|"))
        if SPECIAL.fullmatch(text):
            return Special(text)
        if register := self.registers.find(text):
            return register
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            return Name(text)
        raise Unsupported(f"operand {text} ({self.source})")

    def instruction(self, text: str) -> Instruction:
        match = STATEMENT.fullmatch(text)
        if match is None:
            raise Unsupported(f"statement {text} ({self.source})")
        guard = None
        if match["guard"]:
            register = self.registers.find(match["guard"])
            if register is None:
                raise Unsupported(f"predicate of {text} ({self.source})")
            guard = register, not match["negated"]
        operands = tuple(map(self.operand, OPERAND.findall(match["rest"])))
        return Instruction(match["opcode"], operands, guard, " ".join(text.split()), self.source)

    def statements(self, body: str) -> Iterator[str | Instruction]:
        """Labels, and instructions."""
        depth, pending = 1, ""
        for line in body.splitlines():
            code, _, comment = line.partition("//")
            if code.strip().startswith(".loc"):
                self.source = comment.strip() or code.strip()
                continue
            pending += code + " "
            while pending := pending.lstrip():
                if match := re.match(r"([\w$]+):", pending):
                    yield match[1]
                    pending = pending[match.end() :]
                elif pending[0] in "{}":
                    depth += 1 if pending[0] == "{" else -1
                    if pending[0] == "{":
                        self.registers.scopes.append({})
                    elif depth:
                        self.registers.scopes.pop()
                    else:
                        return
                    pending = pending[1:]
                elif ";" in pending:
                    statement, _, pending = pending.partition(";")
                    if statement.startswith(".reg"):
                        self.registers.declare(statement)
                    elif statement.startswith(".pragma"):
                        continue
                    else:
                        yield self.instruction(statement.strip())
                else:
                    break


def _registers(operands: Iterable[Operand]) -> Iterator[Register]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, tuple):
            yield from _registers(operand)
        elif isinstance(operand, Address) and isinstance(operand.base, Register):
            yield operand.base


def _fill_what_nobody_reads(stretches: Sequence[Stretch]) -> None:
    """Put a zero where the compiler packs a register that nothing is ever written to, into one of
    which others take the other parts alone.
    """
    every = [ins for stretch in stretches for ins in stretch.instructions]
    written = {r for ins in every for r in _registers(ins.operands[:1])}
    reads: dict[Register, list[Instruction]] = {}
    for ins in (*every, *(stretch.end for stretch in stretches if stretch.end)):
        for register in (*_registers(ins.operands[1:]), *([ins.guard[0]] if ins.guard else [])):
            reads.setdefault(register, []).append(ins)

    def taken(ins: Instruction, place: int) -> bool:
        to = ins.operands[0]
        unpacks = ins.words[0] == "mov" and isinstance(to, tuple)
        return not (unpacks and to[place] == Name("_"))

    for stretch in stretches:
        for number, ins in enumerate(stretch.instructions):
            to, *of = ins.operands[:2] or (None,)
            if ins.words[0] != "mov" or not (of and isinstance(of[0], tuple)):
                continue
            parts = tuple(
                Immediate(0)
                if part not in written and not any(taken(r, place) for r in reads.get(to, ()))
                else part
                for place, part in enumerate(of[0])
            )
            stretch.instructions[number] = replace(ins, operands=(to, parts))


def parse(text: str) -> Program:
    """Raises Unsupported for what is no statement of a kernel."""
    entry = ENTRY.search(text)
    if entry is None or len(ENTRY.findall(text)) != 1:
        raise Unsupported("expected a text with one .entry")
    parameters, at = {}, 0
    for bits, name in PARAMETER.findall(entry[2]):
        size = int(bits) // 8
        at = -(-at // size) * size
        parameters[name] = at, size
        at += size
    if entry[2].count(".param") != len(parameters):
        raise Unsupported(f"parameters {entry[2]}")
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[3])
    if threads is None:
        raise Unsupported(f"{entry[1]}: no .reqntid")
    reader, stretches, labels = _Reader(), [Stretch()], dict[str, int]()
    for statement in reader.statements(text[entry.end() :]):
        if isinstance(statement, str):
            if statement.startswith("$L__tmp"):  # of debugging information
                continue
            if stretches[-1].instructions:
                stretches.append(Stretch())
            labels[statement] = len(stretches) - 1
            continue
        if statement.words[0] in BRANCHES and statement.words[:2] != ("bar", "warp"):
            stretches[-1].end = statement
            stretches.append(Stretch())
        else:
            stretches[-1].instructions.append(statement)
    names = frozenset(SHARED.findall(text[: entry.start()]))
    _fill_what_nobody_reads(stretches)
    return Program(
        entry[1], parameters, reader.registers.count, int(threads[1]), labels, stretches, names
    )
