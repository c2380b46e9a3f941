"""Chat templates with the ways of writing tool calls that published ones have, and no more than
that; `SPECIAL` are the special tokens of all of them, `EXPECTED` how the call of `f` with
{"a": "x", "b": 3, "c": true} stands in an answer.
"""

from __future__ import annotations

from mtmd.chat_template.template import ChatTemplate

SPECIAL = (
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<turn|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<start_of_image>",
)
_CONTENT = """{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for c in content -%}{%- if c.type == 'image' -%}<start_of_image>{%- else -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}
"""
# {"name": ..., "arguments": ...} between tags, one after the other (Hermes, Qwen 2.5 and 3)
TAGS = (
    _CONTENT
    + """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\\n' + text(messages[0].content) }}{%- endif %}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{%- elif messages[0].role == 'system' %}<|im_start|>system
{{ text(messages[0].content) }}<|im_end|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
<|im_start|>user
{{ text(m.content) }}<|im_end|>
{%- elif m.role == 'assistant' %}
<|im_start|>assistant
{{ text(m.content) }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{%- elif m.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ text(m.content) }}
</tool_response><|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
)
# one call as JSON, without any mark (Llama 3)
BARE = (
    _CONTENT
    + """{{ bos_token }}{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("only one tool call at once") }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}' }}<|eot_id|>
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{{- text(m.content) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
)
# a list of objects behind a token, with ids (Mistral)
LIST = (
    _CONTENT
    + """{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ text(m.content) }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length < 9 %}{{ raise_exception("ids have nine characters") }}{%- endif %}
{%- set out = call.function | tojson %}{{ out[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
{%- if not loop.last %}{{ ', ' }}{%- endif %}
{%- endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ '{"content": ' + text(m.content) + ', "call_id": "' + m.tool_call_id[-9:] + '"}' }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}{{ text(m.content) }}</s>
{%- endif %}
{%- endfor %}"""
)
# a token, the name, a token, JSON (Mistral's later ones)
TOKENS = LIST.replace(
    LIST[LIST.index("{%- elif m.tool_calls %}") : LIST.index("{%- elif m.role == 'tool' %}")],
    "{%- elif m.tool_calls %}{%- for call in m.tool_calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
    "{%- endfor %}</s>\n",
).replace("[AVAILABLE_TOOLS] ", "[AVAILABLE_TOOLS]")
# braces, bare names, texts between marks (Gemma 4)
MARKS = """{{ bos_token }}{%- macro value(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is none -%}null
{%- elif v is mapping -%}{ {%- for k, i in v | dictsort -%}{{ k }}:{{ value(i) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%} }
{%- elif v is sequence -%}[{%- for i in v -%}{{ value(i) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}<|tool>{{ tool.function.name }}{{ value(tool.function.description) }}{{ value(tool.function.parameters) }}<tool|>{%- endfor -%}
{%- for m in messages -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for call in m.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{ {%- for k, v in call.function.arguments | dictsort -%}{{ k }}:{{ value(v) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%} }<tool_call|>
{%- endfor -%}
{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}{%- if c.type == 'image' -%}<start_of_image>{%- else -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}
<turn|>
{% endfor -%}
{%- if add_generation_prompt -%}<|turn>model
{% endif -%}"""
# a list of calls as Python writes them (LFM2.5)
PYTHON = (
    _CONTENT
    + """{{ bos_token }}{%- macro value(v) -%}
{%- if v is string -%}{{ "'" + v + "'" }}{%- elif v is mapping -%}{{ v | tojson }}{%- else -%}{{ v | string }}{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|im_start|>system
List of tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' -%}
{{- text(m.content) -}}
{%- if m.tool_calls -%}<|tool_call_start|>[
{%- for call in m.tool_calls -%}
{{- call.function.name }}({%- for k, v in call.function.arguments.items() -%}{{ k }}={{ value(v) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%})
{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
{%- endfor -%}]<|tool_call_end|>{%- endif -%}
{%- else -%}{{ text(m.content) }}{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
)
# tags around each argument, texts as they are (Qwen 3 Coder, Qwen 3.5)
ELEMENTS = TAGS.replace(
    TAGS[TAGS.index("{{- '<tool_call>") : TAGS.index("{%- endfor %}<|im_end|>")],
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
""",
)
# tags around names and values (GLM 4.5)
PAIRS = TAGS.replace(
    TAGS[TAGS.index("{{- '<tool_call>") : TAGS.index("{%- endfor %}<|im_end|>")],
    """{{- '<tool_call>' + call.function.name + '\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
""",
)
# knows nothing of tools (Gemma 3), and alternates
PLAIN = (
    _CONTENT
    + """{{ bos_token }}{%- set first = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set first = text(messages[0].content) + '\n\n' -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ first if loop.first }}{{ text(m.content) | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}"""
)
# declares tools, and leaves calls to others (LFM2)
DECLARED = PYTHON.replace(
    PYTHON[
        PYTHON.index("{%- if m.tool_calls -%}") : PYTHON.index("{%- else -%}{{ text(m.content)")
    ],
    "",
)

EXPECTED = {
    "tags": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": 3, "c": true}}\n</tool_call>',
    "bare": '{"name": "f", "parameters": {"a": "x", "b": 3, "c": true}}',
    "list": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x", "b": 3, "c": true}, "id": "ID"}]',
    "tokens": '[TOOL_CALLS]f[ARGS]{"a": "x", "b": 3, "c": true}',
    "marks": '<|tool_call>call:f{a:<|"|>x<|"|>,b:3,c:true}<tool_call|>',
    "python": "<|tool_call_start|>[f(a='x', b=3, c=True)]<|tool_call_end|>",
    "elements": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n3\n"
    "</parameter>\n<parameter=c>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "pairs": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>c</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "plain": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": 3, "c": true}}\n</tool_call>',
    "declared": "<|tool_call_start|>[f(a='x', b=3, c=True)]<|tool_call_end|>",
}
TEMPLATES = {
    "tags": TAGS,
    "bare": BARE,
    "list": LIST,
    "tokens": TOKENS,
    "marks": MARKS,
    "python": PYTHON,
    "elements": ELEMENTS,
    "pairs": PAIRS,
    "plain": PLAIN,
    "declared": DECLARED,
}
STOPS = ("<|im_end|>", "<|eot_id|>", "</s>", "<turn|>", "<end_of_turn>")


def template(kind: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[kind], {"bos_token": "<bos>"}, kind)
