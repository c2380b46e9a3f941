"""Templates by name are those of the models that they are named after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import PromptError
from mtmd.chat_template.built_in_templates import (
    BUILT_IN,
    built_in_file,
    end_of_turn,
    how_to_give_one,
    template_file,
)
from mtmd.chat_template.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM, ASK = {"role": "system", "content": "S"}, {"role": "user", "content": "a"}
TURNS = [ASK, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
# As their model cards and reference code write them.
EXPECTED = {
    "chatml": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<s><|header_start|>user<|header_end|>\n\na<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nb<|eot|>"
    "<|header_start|>user<|header_end|>\n\nc<|eot|><|header_start|>assistant<|header_end|>\n\n",
    "gemma": "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n",
    "zephyr": "<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n",
    "mistral": "<s>[INST]a[/INST]b</s>[INST]c[/INST]",
    "deepseek": "<s><｜User｜>a<｜Assistant｜>b<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜>",
    "granite": "<|start_of_role|>user<|end_of_role|>a<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>b<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>c<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "vicuna": "USER: a ASSISTANT: b</s>USER: c ASSISTANT:",
    "alpaca": "### Instruction:\na\n\n### Response:\nb</s>\n\n### Instruction:\nc\n\n### Response:\n",
}
PUBLISHED = {  # those that add nothing of their own to a conversation with a system text
    "chatml": "Qwen-Qwen2.5-7B-Instruct.jinja",
    "deepseek": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
    "granite": "ibm-granite-granite-4.0.jinja",
}


def built_in(name: str) -> ChatTemplate:
    return ChatTemplate.from_file(built_in_file(name), SPECIAL)


def test_every_one_is_here() -> None:
    assert set(EXPECTED) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_turns(name: str) -> None:
    assert built_in(name).render(TURNS) == EXPECTED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    path = Path(__file__).parents[4] / "shared" / "templates" / PUBLISHED[name]
    if not path.exists():
        pytest.skip("PUBLISHED TEMPLATES ARE MISSING: there is no ../shared/templates")
    messages: list[Any] = [SYSTEM, *TURNS]
    expected = ChatTemplate.from_file(path, SPECIAL).render(messages)
    # One of them writes the beginning of the answer as well: a thought that is over.
    assert built_in(name).render(messages) == expected.removesuffix("<think>\n</think>")


@pytest.mark.parametrize("name", [name for name, one in BUILT_IN.items() if one.marks])
def test_a_vocabulary_tells_which_one_fits(name: str) -> None:
    marks = BUILT_IN[name].marks
    assert f"--chat-template {name} " in how_to_give_one(lambda token: token in marks)


def test_what_to_do_where_the_vocabulary_tells_nothing() -> None:
    reported = how_to_give_one({"<s>"}.__contains__)
    assert all(name in reported for name in BUILT_IN) and "/v1/completions" in reported
    with pytest.raises(PromptError, match=r"^x$"):
        ChatTemplate.none("x").render(TURNS)


def test_a_file_of_that_name_is_meant_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert template_file("gemma") == built_in_file("gemma")
    assert end_of_turn(built_in_file("gemma")) == "<end_of_turn>"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma").write_text("x")
    assert template_file("gemma") == Path("gemma")
    assert end_of_turn(Path("gemma")) is None
    assert template_file("other.jinja") == Path("other.jinja")
