"""Waits for weights, counted in machine code."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels"
LOOP = """
        /*0000*/                   LDC.64 R2, c[0x0][0x218] ;
        /*0010*/                   LDC.64 R4, c[0x0][0x210] ;
.L_x_1:
        /*0020*/                   IADD3 R6, P0, R2, R20, RZ ;
        /*0030*/                   LDG.E.U16 R8, desc[UR4][R6.64] ;
        /*0040*/                   LDG.E.64 R10, desc[UR4][R4.64] ;
        /*0050*/                   IMAD.MOV.U32 R12, RZ, RZ, R10 ;
        /*0060*/              @!P1 LDG.E.64 R14, desc[UR4][R2.64+0x90] ;
        /*0070*/                   LOP3.LUT R16, R15, 0xf, RZ, 0xc0, !PT ;
        /*0080*/                   LOP3.LUT R17, R8, 0xf, RZ, 0xc0, !PT ;
        /*0090*/                   LDG.E.U16 R9, desc[UR4][R6.64+0x2] ;
        /*00a0*/                   PRMT R18, R9, 0x5410, R8 ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("waits")


def test_what_is_read_together_is_waited_for_once(waits: ModuleType) -> None:
    """Two loads from w before the first that is used, and one after; x is not counted."""
    codes, begin, end = waits.listing(LOOP)
    assert (len(codes), begin, end) == (13, 2, 11)
    assert waits.loads_of_w(codes) == {3, 6, 9}
    assert waits.waits(codes, begin, end) == 2


def test_a_warp_waits_once_for_all_that_a_step_multiplies() -> None:
    """Before all was read first, it was twice for half as much. Compiles two kernels: seconds."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, FOLDER / "waits.py", "Q4_0", "Q4_K"],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["Q4_0", "Q4_K"]
    for row in rows:  # a row of 4,096 in four steps; a multiprocessor needs 25 KiB for all it has
        assert int(row[5]) == 4 and float(row[6]) > 15, row
