"""Tests of native kernels share how kernels are called."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
