"""An emulator of PTX, NVIDIA's virtual instruction set: kernels as the compiler leaves them run on a
CPU, every thread of a block in numpy, and what Triton's interpreter hides is a `Fault`: memory
outside an operand, values that nobody wrote, misaligned vectors, races between barriers, data of
asynchronous copies that nobody waited for, what products under way still use.

Semantics are those of NVIDIA's "Parallel Thread Execution ISA"; sections are named where it matters.
An instruction that is not supported is refused by its text when a program is read, run or not.

    program.py       text into instructions and blocks
    instructions.py  what each instruction computes
    products.py      products of matrices, by a warp or by four
    table.py         who makes the step of an instruction
    memory.py        bytes, and who may read and write them when
    matrix.py        fragments of matrices among the lanes of a warp
    machine.py       lanes, divergence, barriers
    kernels.py       our kernels compiled for a card and run here
"""
