"""Chat templates: the same text as transformers, shapes of messages, and templates that mean
harm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mtmd.base.errors import ModelError, PromptError
from mtmd.chat_template.template import ChatTemplate

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}
{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if not enable_thinking | default(true) %}<think>

</think>

{% endif %}
{% endif %}
"""

BUSY = """{%- set ns = namespace(n=0, text='', names=[]) -%}
{%- macro show(part, depth=0) -%}
  {%- if part is string -%}{{ part | upper }}{%- elif part is mapping -%}{{ part.text | default('[picture]') }}
  {%- else -%}{%- for p in part -%}{{ show(p, depth + 1) }}{{ ", " if not loop.last }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for m in messages if m.role != 'system' -%}
  {%- if loop.index > 5 -%}{%- break -%}{%- endif -%}
  {%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}
  {%- set ns.n = ns.n + 1 -%}{%- set ns.text = ns.text ~ loop.index ~ '/' ~ loop.length -%}
  {%- set ns.names = ns.names + [m.role] -%}
  [{{ m.role.upper() }}] {{ show(m.content) }} {{ '%03d' % ns.n }} {{ '%s-%s' | format(ns.n, m.role) }}
  {{ '{:>4}'.format(ns.n) }}
{%- else -%}nothing{%- endfor %}
{% generation %}{{ ns.text }}{% endgeneration %}
{{ messages | tojson }} {{ tools | tojson(indent=2) if tools }} {{ ns.names | join(' & ') }} {{ ns.names | unique | list }}
{{ messages | map(attribute='role') | list | tojson }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ ('a,b,c'.split(',') | reverse | list)[0] }} {{ 'x<y>&"é' | tojson }} {{ ('ab' * 3)[1:-1] }} {{ 'a-b' | replace('-', '+') }}
{{ 'one\\ntwo' | indent(4, true) }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ [1, 2, [3]] + [ns.n] }}
{{ {'k': ns.n, 'l': (1, ns.n)} }} {{ 'abc' in 'xabcx' }}
{%- set block %} text {{ ns.n }} {% endset %}{{ block | trim }} {{ bos_token }}{{ missing }} {{ dict(a=1, b=ns.n).items() | list }}
{% for k, v in {'q': 1, 'p': ns.n} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ 'a b'.strip().title() }}
{{ ', '.join(ns.names) }} {{ range(3) | list }}
"""

TEXT = [{"role": "user", "content": "  What is <this>?\n"}]
PARTS = [
    {"type": "image"},
    {"type": "text", "text": " And "},
    {"type": "image"},
    {"type": "text", "text": "?"},
]
PICTURES = [{"role": "user", "content": PARTS}]
LONG = [
    {"role": "system", "content": "Be brief."},
    *TEXT,
    {"role": "assistant", "content": "A dog. ünï 🎉"},
    *PICTURES,
]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [{"name": "f", "parameters": {"x": [1, 2.5, None, True]}}]


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False, "tools": TOOLS}])
@pytest.mark.parametrize("messages", [TEXT, PICTURES, LONG])
@pytest.mark.parametrize("source", [GEMMA, CHATML, BUSY])
def test_same_text_as_transformers(
    source: str, messages: list[dict[str, object]], extra: dict[str, object], generation: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=generation,
        **SPECIAL,
        **{"tools": None, "documents": None, **extra},
    )[0][0]
    assert ChatTemplate(source, SPECIAL, "t").render(messages, generation, **extra) == expected
    assert len(expected) > 20


def from_folder(folder: Path, special: Mapping[str, str] | None = None) -> ChatTemplate:
    return ChatTemplate.from_folder(
        folder, special or {}, {"<|im_start|>", "<|im_end|>"}.__contains__
    )


def test_same_text_as_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<bos>": 0, "<unk>": 1}, unk_token="<unk>")
    ).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    (tmp_path / "chat_template.jinja").write_text(GEMMA)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(LONG, tokenize=False, add_generation_prompt=True)
    assert from_folder(tmp_path, {"bos_token": "<bos>"}).render(LONG) == expected
    assert expected.startswith(
        "<bos><start_of_turn>user\nBe brief.\n\nWhat is "
        "<this>?<end_of_turn>\n<start_of_turn>model\nA dog."
    )


def test_the_date_is_todays() -> None:
    before = time.strftime("%Y-%m-%d")
    result = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "t").render(TEXT)
    assert result in (before, time.strftime("%Y-%m-%d"))  # midnight may lie between


LOCATIONS = {
    "chat_template.jinja": "jinja",
    "chat_template.json": json.dumps({"chat_template": "json"}),
    "tokenizer_config.json": json.dumps(
        {
            "chat_template": [
                {"name": "rag", "template": "no"},
                {"name": "default", "template": "config"},
            ]
        }
    ),
}


def test_the_places_of_a_template_in_their_order(tmp_path: Path) -> None:
    for name, content in LOCATIONS.items():
        (tmp_path / name).write_text(content)
    for name, text in zip(LOCATIONS, ["jinja", "json", "config"], strict=True):
        assert from_folder(tmp_path).render(TEXT) == text
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "plain"}))
    assert from_folder(tmp_path).render(TEXT) == "plain"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"chat_template": None},
        {"chat_template": []},
        {"chat_template": [{"name": "rag"}]},
    ],
)
def test_no_template(config: object, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = from_folder(tmp_path)
    with pytest.raises(
        PromptError,
        match=r"no chat template .* chat_template\.jinja, chat_template\.json and .*tokenizer_config\.json.*: "
        r"its vocabulary was made for 'chatml'",
    ):
        template.render(TEXT)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.json", b"[" * 100_000),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"x" * 300_000),
    ],
)
def test_broken_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
        from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_gives_its_reason() -> None:
    with pytest.raises(
        PromptError,
        match="the chat template refuses these messages: Conversation roles must alternate",
    ):
        ChatTemplate(GEMMA, SPECIAL, "t").render([*TEXT, *TEXT])


def test_a_template_that_fails_says_which_and_why() -> None:
    with pytest.raises(
        PromptError,
        match=r"^t cannot render these messages: UndefinedError: 'nothing' is undefined",
    ):
        ChatTemplate("{{ nothing.at.all }}", {}, "t").render(TEXT)


def test_variables_are_json() -> None:
    template = ChatTemplate("{{ x }}", {}, "t")
    assert (
        template.render(TEXT, x=[1, "a", None, {"b": (2.5, True)}])
        == "[1, 'a', None, {'b': [2.5, True]}]"
    )
    with pytest.raises(PromptError, match="'x' holds a PosixPath"):
        template.render(TEXT, x=[Path("a")])


def test_messages_are_not_changed_and_rendering_twice_gives_the_same() -> None:
    before = json.dumps(LONG)
    template = ChatTemplate(BUSY, SPECIAL, "t")
    assert template.render(LONG) == template.render(LONG)
    assert json.dumps(LONG) == before


def test_long_conversations_are_within_the_limits() -> None:
    messages = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": "word " * 1000}
        for n in range(1000)
    ]
    assert len(ChatTemplate(GEMMA, SPECIAL, "t").render(messages)) > 4_900_000
    assert (
        len(
            ChatTemplate(GEMMA, SPECIAL, "t").render([{"role": "user", "content": "x" * 4_000_000}])
        )
        > 4_000_000
    )


def test_messages_that_hit_a_limit_are_to_blame_themselves() -> None:
    with pytest.raises(PromptError, match=r"messages of 5,000,0\d\d characters .*; shorten them"):
        ChatTemplate(GEMMA, SPECIAL, "t").render([{"role": "user", "content": "x" * 5_000_000}])


DOUBLING = "{% set ns = namespace(x=X, y=X) %}{% for i in range(60) %}STEP{% endfor %}END"
A = "{% set a = 'a' * 1000000 %}"
HARM = {
    "long range": "{% for i in range(1000000000) %}x{% endfor %}",
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor "
    "%}",
    "nested loops over a variable": "{% set r = range(100000)|list %}{% for a in r %}{% for b in r "
    "%}{% endfor %}{% endfor %}",
    "text in loops": "{% for i in range(100000) %}{% for j in range(100000) %}some text{% endfor "
    "%}{% endfor %}",
    "text in a set block": "{% set x %}{% for i in range(20000) %}"
    + "text" * 50_000
    + "{% endfor %}{% endset %}",
    "text in a recursive loop": "{% set x %}{% for i in [1] recursive %}"
    + "text" * 50_000
    + "{% if loop.depth == 1 %}{{ loop(range(20000)) }}{% endif %}{% endfor %}{% endset %}",
    "string times": "{{ 'a' * 10 ** 10 }}",
    "times string": "{{ 10 ** 10 * 'a' }}",
    "list times": "{% set x = [1] * 10 ** 10 %}",
    "tuple times": "{{ ((1,) * 100000) * 100000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": DOUBLING.replace("X", "10").replace("STEP", "{% set ns.x = ns.x * ns.x %}"),
    "sums": DOUBLING.replace("X", "'ab'").replace("STEP", "{% set ns.x = ns.x + ns.x %}"),
    "joins": DOUBLING.replace("X", "'ab'").replace(
        "STEP", "{% set ns.x = " + " ~ ".join(["ns.x"] * 100) + " %}"
    ),
    "set blocks": DOUBLING.replace("X", "'ab'").replace(
        "STEP", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "lists": DOUBLING.replace("X", "[1]")
    .replace("STEP", "{% set ns.x = [ns.x, ns.x] %}")
    .replace("END", "{{ ns.x }}"),
    "dicts": DOUBLING.replace("X", "1")
    .replace("STEP", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}")
    .replace("END", "{{ ns.x|tojson }}"),
    "dict calls": DOUBLING.replace("X", "1")
    .replace("STEP", "{% set ns.x = dict(a=ns.x, b=ns.x) %}")
    .replace("END", "{{ ns.x|string }}"),
    "compared": DOUBLING.replace("X", "[1]")
    .replace("STEP", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}")
    .replace("END", "{{ ns.x == ns.y }}"),
    "kept": A
    + "{% set ns = namespace(p='') %}{% for i in range(100000) %}{% set ns.p = namespace(p=ns.p, "
    "b=a + i|string) %}{% endfor %}",
    "center": "{{ 'a'|center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "translate": "{{ 'aa'.translate({97: 'b' * 1000000}) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10) }}",
    "replace": A + "{{ a.replace('a', a)|length }}",
    "replace nothing": A + "{{ a|replace('', a)|length }}",
    "replace filter": A + "{{ a|replace('a', a) }}",
    "join": A + "{{ a.join(range(100000)|map('string')) }}",
    "join filter": A + "{{ range(100000)|join(a) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format by value": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "format often": A + "{{ ('{0}' * 100000).format(a) }}",
    "percent often": A + "{{ ('%(a)s' * 100000) % {'a': a} }}",
    "format map": A + "{{ ('{a}' * 100000).format_map({'a': a}) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
    "tojson indent": "{{ [[1]]|tojson(indent=10000000000) }}",
    "tojson separators": A + "{{ (range(100000)|list)|tojson(separators=(a, a)) }}",
    "macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macro tree": "{% macro m(n) %}xxxx{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% "
    "endmacro %}{{ m(60) }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "outputs in a set block": "{% set a = 'a' * 4000000 %}{% set x %}"
    + "{{ a }}" * 2000
    + "{% endset %}",
    "much text": "{{ 'a' * 4000000 }}" * 5,
    "slices": "{% set a = 'a' * 4000000 %}{% for i in range(100000) %}{% set b = a[1:] %}{% endfor "
    "%}",
    "class": "{{ ''.__class__.__mro__ }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "digits": "{{ " + "9" * 5000 + " }}",
    "length": "x" * 10_000_000,
    "batch": "{{ [1]|batch(10 ** 10, 1)|list }}",
}


@pytest.fixture(scope="module")
def harm_outcomes() -> Iterator[dict[str, list[object]]]:
    """Every harmful template, in a process that may take 2 GB of address space, so that one that
    gets through does no harm here.
    """
    program = f"""
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
import mtmd.chat_template.render_limits
from mtmd.chat_template.template import ChatTemplate
mtmd.chat_template.render_limits.SECONDS_MAX = 0.4
for name, source in json.load(sys.stdin).items():
    try:
        outcome = "rendered " + ChatTemplate(source, {{}}, "t").render({TEXT!r})[:50]
    except BaseException as error:
        outcome = type(error).__name__ + ": " + str(error)
    print(json.dumps([name, outcome]), flush=True)
# Not ru_maxrss: that counts the parent too, from before exec.
print(json.dumps(["peak", int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]), 0]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(HARM),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    yield {line[0]: line[1:] for line in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("name", HARM)
def test_a_harmful_template_is_stopped(name: str, harm_outcomes: dict[str, list[object]]) -> None:
    (outcome,) = harm_outcomes[name]
    assert outcome.startswith("ModelError: t ") and "MemoryError" not in outcome
    assert "\n" not in outcome and len(outcome) < 500


def test_harmful_templates_take_little_memory(harm_outcomes: dict[str, list[object]]) -> None:
    assert harm_outcomes["peak"][0] < 700_000  # KiB


def test_namespaces_that_refer_to_each_other_print_shortly() -> None:
    source = (
        "{% set ns = namespace(p='') %}{% for i in range(60) %}{% set ns.p = namespace(a=ns.p, "
        "b=ns.p) %}{% endfor %}{{ ns.p }}"
    )
    assert ChatTemplate(source, {}, "t").render(TEXT) == "<namespace>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages|map(attribute='__class__')|first }}",
        "{{ messages|map(attribute='__class__')|join }}",
        "{{ messages|join(attribute='__class__') }}",
        "{{ namespace.__init__ }}",
    ],
)
def test_pythons_insides_cannot_be_reached(source: str) -> None:
    try:
        assert ChatTemplate(source, {}, "t").render(TEXT) == ""
    except ModelError as error:
        assert "is unsafe" in str(error)


def test_the_meter_cannot_be_named() -> None:
    assert ChatTemplate("{{ meter }}{{ _meter }}", {}, "t").render(TEXT) == ""
    with pytest.raises(ModelError, match="No filter named 'each'"):
        ChatTemplate("{{ messages | each(-5) }}", {}, "t")
