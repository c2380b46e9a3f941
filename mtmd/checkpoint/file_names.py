"""Names of a model's files, and what they tell: which are weights, parts, projectors, and of what
type. Loads without torch.
"""

from __future__ import annotations

import re

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PART = re.compile(r"-(?P<part>\d{5})-of-\d{5}\.gguf", re.I)
# The word of a GGUF's name, or of its folder's, that tells its type.
_TYPE = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4)(?![A-Za-z0-9_])", re.I
)


def is_projector(file: str) -> bool:
    """Return whether a GGUF's path names a projector (mmproj)."""
    return "mmproj" in file.rpartition("/")[2].lower()


def type_of(file: str) -> str:
    """The type that a GGUF's path names, "" where it names none."""
    result = _TYPE.findall(PART.sub(".gguf", file))
    return result[-1].upper() if result else ""
