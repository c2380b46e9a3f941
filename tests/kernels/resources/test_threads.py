"""Work that wakes no other threads."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, threading, torch
import numpy as np
from mtmd.clip.image.tensor_resize import resize_tensor
from mtmd.kernels.resources.threads import one_thread
from mtmd.llm.sampling.sampler import Sampler, Sampling

torch.set_num_threads(3)
logits = torch.randn(1 << 18)
with one_thread():
    rounded = logits.bfloat16()
pixels = np.zeros((999, 999, 3), np.uint8)

def tasks():
    return len(os.listdir("/proc/self/task"))

before = tasks()
sampling = Sampling(1.0, 50, 0.9, 0.1, 1.2)
Sampler(sampling)(rounded, [1, 2])
Sampler(sampling)(logits, [1, 2])
resize_tensor(pixels, 800, 800, "bicubic")
with one_thread():
    logits.exp()
print(tasks() - before, torch.get_num_threads())
logits.exp()
print(tasks() - before)
"""


def test_no_pool_for_a_sampler_or_a_picture() -> None:
    """In a process of its own (1.5 s to import torch): others have pools already."""
    if not sys.platform.startswith("linux"):  # threads are counted as Linux lists them
        return
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    mine, afterwards = done.stdout.splitlines()
    assert mine == "0 3"
    assert afterwards == "2"  # what torch does by itself
