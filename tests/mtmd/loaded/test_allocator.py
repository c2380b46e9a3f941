"""Freed memory goes back to the system."""

import subprocess
import sys

# Large pieces with small ones between them that stay: what a trimmed end of the heap cannot give back.
PROGRAM = """
import ctypes, sys
from mtmd.loaded.allocator import return_freed_memory

taken = return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def piece(size):
    address = libc.malloc(size)
    libc.memset(address, 1, size)
    return address

def held():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmRSS:"))
    return int(line.split()[1]) >> 10

before = held()
libc.free(piece(30 << 20))  # by default, glibc now keeps pieces of up to 30 MiB
pieces = [(piece(20 << 20), piece(4096)) for _ in range(10)]
for large, _ in pieces:
    libc.free(large)
print(taken, held() - before)
"""


def test_freed_pieces_go_back_though_small_ones_lie_between_them():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    taken, kept = result.stdout.split()
    assert taken == "True" and int(kept) < 20
