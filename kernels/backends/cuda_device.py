"""Facts of a device of CUDA or HIP: its architecture, and the workspaces of the libraries that
multiply matrices there, which torch allocates beside all tensors.
"""

from __future__ import annotations

import torch

KIB, MIB = 1 << 10, 1 << 20


def target_of(device: torch.device) -> str:
    """Return its architecture, as the compiler names it: cuda:90, hip:gfx942."""
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return f"hip:{name.partition(':')[0]}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{major}{minor}"


def queue_bytes(target: str) -> int:
    """Return the bytes of workspace that torch gives cuBLAS and cuBLASLt, or hipBLAS and
    hipBLASLt, on an architecture. It keeps as much for each stream on which matrices are
    multiplied, and streams of captures are others (torch 2.11,
    aten/src/ATen/cuda/CublasHandlePool.cpp, unless CUBLAS_WORKSPACE_CONFIG says otherwise).
    """
    kind, _, version = target.partition(":")
    if kind == "hip":
        return (128 if version.startswith(("gfx94", "gfx95")) else 32) * MIB + 76 * MIB
    return (32 * MIB if int(version) >= 90 else 2 * 4 * MIB + 8 * 16 * KIB) + MIB
