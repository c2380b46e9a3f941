"""Machine code for decoding on the CPU: kernels written as LLVM IR, and programs of them."""
