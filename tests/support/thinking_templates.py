"""Chat templates with the ways of writing thoughts that published ones have, and no more than that;
`EXPECTED` is what is known of each.
"""

from __future__ import annotations

from mtmd.chat_template.template import ChatTemplate
from mtmd.thinking.probe import ThinkingTemplate, read_thinking

_TEXT = """{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for c in content if c.type == 'text' -%}{{ c.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}
"""


def _turns(assistant: str, begin: str, first: str = "") -> str:
    """ChatML with what an assistant's message and the beginning of an answer have."""
    return (
        _TEXT
        + first
        + """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' -%}"""
        + assistant
        + """{%- else -%}{{ text(m.content) }}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"""
        + begin
        + """{%- endif -%}"""
    )


_SHOWN = """{%- if m.reasoning_content -%}{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif -%}{{ text(m.content) }}"""
_OFF = "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}"
_STRIPPED = "{{ text(m.content).split('</think>')[-1].lstrip('\\n') }}"
TEMPLATES = {
    # the prompt opens the thought (Qwen 3.5)
    "opened": _turns(_SHOWN, _OFF + "{%- else -%}{{ '<think>\\n' }}{%- endif -%}"),
    # the model opens it (Qwen 3)
    "written": _turns(_SHOWN, _OFF + "{%- endif -%}"),
    # after a line break, and thoughts of earlier turns are left out (GLM)
    "line": _turns(
        "{%- if loop.last and m.reasoning_content -%}{{ '\\n<think>' + m.reasoning_content + '</think>\\n' }}{%- else -%}{{ '\\n<think></think>\\n' }}{%- endif -%}{{ text(m.content) }}",
        "{%- if enable_thinking is defined and not enable_thinking -%}{{ '\\n<think></think>' }}{%- endif -%}",
    ),
    # no thought is rendered, and those in a content are cut off (QwQ, R1)
    "stripped": _turns(_STRIPPED, "{{ '<think>\\n' }}"),
    # off unless it is turned on, by another name (DeepSeek V3.2)
    "asked": _turns(
        "{{ ('<think>' + m.reasoning_content if m.reasoning_content else '') + '</think>' + text(m.content) }}",
        "{%- if thinking | default(false) -%}{{ '<think>' }}{%- else -%}{{ '</think>' }}{%- endif -%}",
    ),
    # channels, with how much to think (gpt-oss)
    "channels": _TEXT
    + """{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- for m in messages -%}{%- if m.role == 'assistant' -%}
{%- if m.thinking and loop.last -%}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + text(m.content) + '<|end|>' }}
{%- else -%}{{ '<|start|>' + m.role + '<|message|>' + text(m.content) + '<|end|>' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}""",
    # a channel without an end of its own name, shown before calls alone (Gemma 4)
    "channel": _turns(
        "{%- if m.reasoning_content and m.tool_calls -%}{{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{%- endif -%}{%- for call in m.tool_calls or [] -%}{{ '<|tool_call>call:' + call.function.name + '<tool_call|>' }}{%- endfor -%}{{ text(m.content) }}",
        "{%- if not enable_thinking | default(false) -%}{{ '<|channel>thought\\n<channel|>' }}{%- endif -%}",
    ),
    # marks of two, and effort under a name of its own (Kimi K3)
    "pairs": _turns(
        "{{ '<|open|>think<|sep|>' + (m.reasoning or '') + '<|close|>think<|sep|><|open|>response<|sep|>' + text(m.content) }}",
        "{%- if thinking_effort is defined and thinking_effort not in ['low', 'max'] -%}{{ raise_exception('low or max') }}{%- endif -%}{{ '<|open|>think<|sep|>' if thinking | default(true) else '<|open|>response<|sep|>' }}",
        "{{ '<|effort|>' + thinking_effort | default('max') }}",
    ),
    # other words (Cohere)
    "start": _turns(
        "{%- if m.reasoning -%}{{ '<|START_THINKING|>' + m.reasoning + '<|END_THINKING|>' }}{%- endif -%}{{ '<|START_TEXT|>' + text(m.content) }}",
        "{{ '<|START_THINKING|>' }}{%- if reasoning_effort | default('') == 'none' -%}{{ '<|END_THINKING|>' }}{%- endif -%}",
    ),
    # a part of the content (Magistral)
    "parts": _turns(
        "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}{{ '[THINK]' + c.thinking + '[/THINK]' if c.type == 'thinking' else c.text }}{%- endfor -%}{%- endif -%}",
        "",
    ),
    # words in place of marks (Apriel)
    "words": _turns(
        "{%- if m.reasoning_content and loop.last -%}{{ m.reasoning_content + '\\n[BEGIN FINAL RESPONSE]\\n' }}{%- endif -%}{{ text(m.content) }}",
        "{{ 'Here are my reasoning steps:\\n' }}",
    ),
    # named in an instruction alone, by another variable (Granite)
    "told": _turns(
        "{{ text(m.content) }}",
        "",
        "{%- if thinking -%}{{ 'Write your thoughts between <think></think>.' }}{%- endif -%}",
    ),
    "silent": _turns("{{ text(m.content) }}", ""),
}
_ON, _NOT = {"enable_thinking": True}, {"enable_thinking": False}
# (open, close, what begins the answer, field, on, off, effort, efforts)
EXPECTED = {
    "opened": ("<think>", "</think>", "", "reasoning_content", _ON, _NOT, None, ""),
    "written": ("<think>", "</think>", "", "reasoning_content", _ON, _NOT, None, ""),
    "line": ("<think>", "</think>", "", "reasoning_content", _ON, _NOT, None, ""),
    "stripped": ("<think>", "</think>", "", "content", None, None, None, ""),
    "asked": (
        *("<think>", "</think>", "", "reasoning_content"),
        *({"thinking": True}, {"thinking": False}, None, ""),
    ),
    "channels": (
        *("<|channel|>analysis<|message|>", "<|end|>"),
        *("<|start|>assistant<|channel|>final<|message|>", "thinking", None, None),
        *("reasoning_effort", "high low max medium minimal xhigh"),
    ),
    "channel": (
        *("<|channel>thought", "<channel|>", "", "reasoning_content"),
        *(_ON, _NOT, None, ""),
    ),
    "pairs": (
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        *("reasoning", {"thinking": True}, {"thinking": False}, "thinking_effort", "low max"),
    ),
    "start": (
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "reasoning"),
        *(None, {"reasoning_effort": "none"}, "reasoning_effort", ""),
    ),
    "parts": ("[THINK]", "[/THINK]", "", "parts", None, None, None, ""),
    "words": (
        *("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "", "reasoning_content"),
        *(None, None, None, ""),
    ),
    "told": ("<think>", "</think>", "", None, {"thinking": True}, {"thinking": False}, None, ""),
}


def template(kind: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[kind], {"bos_token": "<bos>"}, kind)


def known(kind: str, vocabulary: tuple[str, ...] = ()) -> ThinkingTemplate:
    made = template(kind)
    return read_thinking(made.render, made.source, made.variables, vocabulary)
