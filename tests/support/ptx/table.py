"""Who makes the step of an instruction: by the first word of its opcode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ptx.instructions import (
    Step,
    approximate,
    arithmetic,
    bit_field,
    bounded,
    convert,
    copy_later,
    count_bits,
    either,
    extreme,
    fused,
    load,
    logic_of_three,
    move,
    permute_bytes,
    product,
    quotient,
    reduce_warp,
    remainder,
    select,
    set_predicate,
    shift,
    shuffle,
    store,
    synchronise_warp,
    whole,
)
from ptx.products import fence, load_matrices, multiply_by_groups, multiply_matrices, store_matrices
from ptx.program import Instruction

MAKERS: Mapping[str, Callable[[Instruction], Step]] = {
    "abs": either(arithmetic(np.abs, 1, "ftz"), whole(np.abs, 1)),
    "add": either(arithmetic(np.add, 2, "rn ftz"), whole(np.add, 2)),
    "and": whole(np.bitwise_and, 2),
    "bar": synchronise_warp,
    "bfe": bit_field,
    "cp": copy_later,
    "cvt": convert,
    "div": quotient,
    "ex2": arithmetic(approximate(np.exp2), 1, "approx ftz"),
    "fence": fence,
    "fma": arithmetic(fused, 3, "rn ftz"),
    "ld": load,
    "ldmatrix": load_matrices,
    "lg2": arithmetic(approximate(np.log2), 1, "approx ftz"),
    "lop3": logic_of_three,
    "mad": product,
    "max": either(extreme(np.fmax, np.maximum), bounded(np.maximum)),
    "min": either(extreme(np.fmin, np.minimum), bounded(np.minimum)),
    "mma": multiply_matrices,
    "mov": move,
    "mul": product,
    "neg": either(arithmetic(np.negative, 1, "ftz"), whole(np.negative, 1)),
    "not": whole(np.invert, 1),
    "or": whole(np.bitwise_or, 2),
    "popc": count_bits,
    "prmt": permute_bytes,
    "rcp": arithmetic(approximate(np.reciprocal), 1, "approx rn ftz"),
    "redux": reduce_warp,
    "rem": remainder,
    "rsqrt": arithmetic(approximate(lambda x: 1 / np.sqrt(x)), 1, "approx ftz"),
    "selp": select,
    "setp": set_predicate,
    "shfl": shuffle,
    "shl": shift,
    "shr": shift,
    "sqrt": arithmetic(approximate(np.sqrt), 1, "approx rn ftz"),
    "st": store,
    "stmatrix": store_matrices,
    "sub": either(arithmetic(np.subtract, 2, "rn ftz"), whole(np.subtract, 2)),
    "tanh": arithmetic(approximate(np.tanh), 1, "approx"),
    "wgmma": multiply_by_groups,
    "xor": whole(np.bitwise_xor, 2),
}


def step_of(ins: Instruction) -> Step:
    """What an instruction does. Raises Unsupported."""
    maker = MAKERS.get(ins.words[0])
    if maker is None:
        raise ins.refused()
    step = maker(ins)
    if ins.guard is None:
        return step
    register, expected = ins.guard
    return lambda lanes: lanes.guarded(register.number, expected, step)
