"""Which tokens end an answer, from a GGUF's metadata: it names some of them, and some are known by
their spelling alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtmd.llm.tokenizer.gguf_vocabulary import CONTROL, Vocabulary

# Ends of a turn that files do not name with an id: the control tokens among llama.cpp's list
# (src/llama-vocab.cpp, special_eog_ids) that chat models write at the end of an answer. Its further
# ones, of tool calls and of fill-in-the-middle, stop no chat.
TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
)


def stop_tokens(metadata: Mapping[str, Any], where: str) -> frozenset[int]:
    """The ids that end an answer: those the file names, and control tokens spelled as ends of a
    turn. `where` names the file, for errors. Raises ModelError naming a key that is missing or
    broken.
    """
    vocabulary = Vocabulary(metadata, where)
    named = {vocabulary.id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")} - {
        None
    }
    spelled = {vocabulary.ids[text] for text in TURN_ENDS if text in vocabulary.ids}
    return frozenset(i for i in named if i is not None) | {
        i for i in spelled if vocabulary.types[i] == CONTROL
    }
