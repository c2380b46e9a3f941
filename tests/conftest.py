"""GPU kernels run in Triton's interpreter, which must be asked for before anything (transformers does) imports Triton."""
import os

os.environ["TRITON_INTERPRET"] = "1"
