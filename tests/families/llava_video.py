"""LLaVA-NeXT-Video, Video-LLaVA and ViP-LLaVA: LLaVA-NeXT whose frames are averaged, LLaVA 1.5 with
a second tower for frames, LLaVA 1.5 with features of several depths.
"""

from __future__ import annotations

from common import Row
from llava import INST, llava
from published import published

# Those published put all pictures before the videos, which conversations of tests do not
IN_ORDER = INST.replace(
    "{{ '<image>\\n' }}{% else %}",
    "{{ '<image>\\n' }}{% elif c.type == 'video' %}{{ '<video>\\n' }}{% else %}",
)
ROW = Row(
    "LLaVA-NeXT-Video, Video-LLaVA, ViP-LLaVA",
    {
        "next, llama, as published": published(
            lambda f: llava(
                f,
                kind="LlavaNextVideo",
                seed=11,
                template=IN_ORDER,
                vision={"image_size": 28, "patch_size": 7},
            ),
            tower=True,
        ),
        "two towers, llama, as published": published(
            lambda f: llava(
                f, kind="VideoLlava", seed=12, template=IN_ORDER, vision={"image_size": 42}
            ),
            tower=True,
        ),
        "vip, four depths": lambda f: llava(f, kind="VipLlava", seed=13, layer=[-2, -4, 0, 2]),
    },
    notes="frames averaged over neighbours or in a tower of their own; features of several depths",
)
