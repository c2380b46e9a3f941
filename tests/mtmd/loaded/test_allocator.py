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

def stored():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmRSS:"))
    return int(line.split()[1]) >> 10

before = stored()
libc.free(piece(30 << 20))  # by default, glibc now keeps pieces of up to 30 MiB
pieces = [(piece(20 << 20), piece(4096)) for _ in range(10)]
for large, _ in pieces:
    libc.free(large)
print(taken, stored() - before)
"""


def test_freed_pieces_go_back_though_small_ones_lie_between_them():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    taken, saved = result.stdout.split()
    assert taken == "True" and int(saved) < 20


# Each thread takes memory while all the others are alive: none can have the heap of one that ended.
HEAPS_PROGRAM = """
import ctypes, tempfile, threading
from mtmd.loaded.allocator import HEAPS, return_freed_memory

return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
met = threading.Barrier(16)

def work():
    libc.malloc(100_000)
    met.wait()

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="), HEAPS)
"""


def test_many_threads_share_a_few_heaps():
    result = subprocess.run(
        [sys.executable, "-c", HEAPS_PROGRAM], capture_output=True, text=True, check=True
    )
    heaps, maximum = map(int, result.stdout.split())
    assert 0 < heaps <= maximum
