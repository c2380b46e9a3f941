"""transformers with the same GGUF file, dequantized: what it reads, writes and computes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


class Oracle:
    """In fp32, but where another type is named."""

    def __init__(self, path: Path):
        transformers.utils.logging.disable_progress_bar()
        location = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**location)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **location, dtype=torch.float32
        ).eval()
        self.ends = {self.model.generation_config.eos_token_id}

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Of a text as it is, or of messages by the chat template."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        return list(rendered["input_ids"])

    def greedy(self, ids: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """The most probable tokens, at most `count`, without the one that ends the answer. Those of
        a `guess` that are right are read in one forward, which is many times as fast.
        """
        tokens: list[int] = []
        guess = list(guess)[:count]
        while len(tokens) < count:
            ahead = guess[len(tokens) :] if guess[: len(tokens)] == tokens else []
            saved = len(ahead) + 1
            with torch.no_grad():
                read = torch.tensor([ids + tokens + ahead])
                logits = self.model(read, logits_to_keep=saved).logits[0, -saved:]
            for best, guessed in zip_longest(logits.argmax(-1).tolist(), ahead):
                if best in self.ends or len(tokens) == count:
                    return tokens
                tokens.append(best)
                if best != guessed:
                    break
        return tokens

    def generated(self, ids: list[int], count: int) -> list[int]:
        """The same by transformers' own loop."""
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        result = self.model.generate(
            torch.tensor([ids]), attention_mask=mask, max_new_tokens=count, do_sample=False
        )
        tokens: list[int] = result[0, len(ids) :].tolist()
        return tokens[:-1] if tokens[-1] in self.ends else tokens

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def log_probabilities(self, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """[T, V], of the token after each of `ids`."""
        model = self.model if dtype == torch.float32 else deepcopy(self.model).to(dtype)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        return logits.log_softmax(-1)
