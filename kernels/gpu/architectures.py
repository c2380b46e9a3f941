"""Describes what the multiprocessor of a GPU has, and how many programs of a kernel it holds at
once. Plain arithmetic, no Triton.

NVIDIA: CUDA Programming Guide, "Compute Capabilities", technical specifications by capability.
AMD: the instruction set guides of CDNA 3 and RDNA 3, and LLVM's AMDGPUBaseInfo.cpp for how
registers are handed out. Of an AMD card a "multiprocessor" is a compute unit.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from mtmd.base.errors import OptionError

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """shared_per_program, shared: bytes of shared memory that one program may ask for, and that a
    multiprocessor has; `shared_saved` of it goes to the system for each program. registers: 32-bit
    ones of a lane of a `warp`, which it is given `granule` at a time, and as many warps as those of
    one of `parts` hold run at once there, `warps` in all the parts at most.
    """

    target: str
    warp: int
    parts: int
    warps: int
    programs: int
    registers: int
    granule: int
    shared_per_program: int
    shared: int
    shared_saved: int = KIB

    def programs_at_once(self, warps: int, registers: int, shared_bytes: int) -> int:
        """Programs of so many warps, registers a lane and bytes of shared memory that one
        multiprocessor holds at once; 0 for one that does not fit.
        """
        if shared_bytes > self.shared_per_program:
            return 0
        handed = -(-max(registers, 1) // self.granule) * self.granule
        by_registers = min(self.registers // handed, self.warps // self.parts) * self.parts
        by_shared = self.programs
        if shared_bytes + self.shared_saved:
            by_shared = self.shared // (shared_bytes + self.shared_saved)
        return min(self.programs, min(by_registers, self.warps) // warps, by_shared)


def _cuda(capability: int, warps: int, programs: int, shared_kib: int) -> Architecture:
    """Four parts of 16,384 registers, of which a warp is given 256 at a time: 8 a lane."""
    return Architecture(
        f"cuda:{capability}",
        32,
        4,
        warps,
        programs,
        512,
        8,
        (shared_kib - 1 if capability >= 80 else shared_kib) * KIB,
        shared_kib * KIB,
        KIB if capability >= 80 else 0,
    )


def _cdna(name: str, shared_kib: int) -> Architecture:
    """Four parts with 512 registers a lane of 64, accumulation registers among them."""
    size = shared_kib * KIB
    return Architecture(f"hip:{name}", 64, 4, 32, 32, 512, 8, size, size, 0)


def _rdna(name: str, registers: int) -> Architecture:
    """Two parts with warps of 32; a compute unit's half of the memory that two of them share."""
    granule = registers // 64
    return Architecture(f"hip:{name}", 32, 2, 32, 32, registers, granule, 64 * KIB, 64 * KIB, 0)


ARCHITECTURES = {
    a.target: a
    for a in (
        _cuda(75, 32, 16, 64),
        _cuda(80, 64, 32, 164),
        _cuda(86, 48, 16, 100),
        _cuda(87, 48, 16, 164),
        _cuda(89, 48, 24, 100),
        _cuda(90, 64, 32, 228),
        _cuda(100, 64, 32, 228),
        _cuda(103, 64, 32, 228),
        _cuda(120, 48, 24, 100),
        _cuda(121, 48, 24, 100),
        _cdna("gfx90a", 64),
        _cdna("gfx942", 64),
        _cdna("gfx950", 160),
        _rdna("gfx1100", 1536),
        _rdna("gfx1101", 1536),
        _rdna("gfx1102", 1024),
        _rdna("gfx1200", 1536),
        _rdna("gfx1201", 1536),
    )
}


def architecture(target: str) -> Architecture:
    """Return the architecture of `cuda:90` (compute capability 9.0) or `hip:gfx942`. Raises
    OptionError for one that is not in the table.
    """
    result = ARCHITECTURES.get(target)
    if result is None:
        known = ", ".join(ARCHITECTURES)
        if re.fullmatch(r"cuda:\d{2,3}|hip:gfx\w{3,5}", target):
            near = difflib.get_close_matches(target, ARCHITECTURES, 3, 0.7)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise OptionError(f"target {target!r}: found none of {known}{hint}")
        raise OptionError(f"target {target!r:.60}: expected a card's name, or one of {known}")
    return result
