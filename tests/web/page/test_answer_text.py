"""How an answer's text is drawn while it grows and when it is whole, by the page's own modules in a
browser.
"""

from __future__ import annotations

import itertools
import random
import re

import pytest

EVERYTHING = """# A *title* of words

Some **bold**, *slanted*, ***both***, ~~gone~~ and `code`, a [link](https://example.com/a_b) and https://example.com/c.

| Shape | Colour | Count |
|:------|:------:|------:|
| cross | black  |     1 |
| star  | **red**|    12 |

- [x] found the cross
- [ ] find the star
  - a nested one
1. first
2. second

> quoted, with $E = mc^2$ in it

```python
def area(width: int) -> int:
    return width * 2  # twice
```

\\[ \\frac{a}{b} = \\sqrt{2} \\]

Between them $5 and $10, *2 \\* 3*.

---

The end"""


def plain(html):
    """Without directions of text, of which test_directions.py has the tests."""
    return re.sub(r' dir="\w+"', "", html)


def test_everything_grows_into_what_it_would_be_at_once_and_never_shrinks(drawn):
    drawn.draw("$x$ ```py\nx\n```")  # what is fetched with the first formula is there
    heights, differs = drawn.grow(EVERYTHING)
    assert differs is None
    falls = [(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(heights)) if b < a - 1]
    assert not falls, [(EVERYTHING[max(0, n - 20) : n + 2], a, b) for n, a, b in falls]


@pytest.mark.parametrize(
    "text, parts",
    [
        ("**bo", ["<strong>bo</strong>"]),
        ("*a* **b*", ["<em>a</em> <strong>b</strong>"]),
        ("it is `co", ["it is <code>co</code>"]),
        ("see [the li", ["see the li"]),
        ("see [the link](htt", ["see the link"]),
        ("| a | b |", ["<table>", '<th scope="col">a</th>']),
        ("a title?\n-", ["<p>a title?"]),
        ("2 * 3 and snake_case", ["<p>2 * 3 and snake_case"]),
        ("it costs $5", ["it costs $5"]),
        ("so \\(x^", ['<span class="math source"']),
        ("<think>a thought", ['class="thought thinking"', "Thinking… 2 words"]),
        ("<thi", ['<div class="text growing grown" hidden=""></div>']),
    ],
)
def test_what_is_begun_is_taken_for_finished_while_it_grows(drawn, text, parts):
    html = plain(drawn.draw(text, True))
    assert all(part in html for part in parts) and (
        html.count('class="caret"') == 1 or "hidden" in html
    ), html


def test_what_markdown_becomes(drawn):
    html = plain(drawn.draw(EVERYTHING))
    for part in (
        '<th class="right" scope="col">Count</th>',
        '<li class="task"><span class="tick done" role="img" aria-label="Done"></span> found',
        '<span class="code-keyword">def</span>',
        '<annotation encoding="application/x-tex">\\frac{a}{b} = \\sqrt{2}</annotation>',
        "Between them $5 and $10, <em>2 * 3</em>.",
        '<a href="https://example.com/c" target="_blank" rel="noopener noreferrer nofollow">',
    ):
        assert part in html, part
    assert "twice" in html and "<s>gone</s>" in html
    thought = plain(drawn.draw("a thought of two\n</think>\n\nThe answer"))
    assert "Thoughts, 4 words" in thought and "<p>The answer</p>" in thought
    assert "<details" not in drawn.draw("Write `</think>` to end it: </think>")
    assert '<a href="https://a.example/x"' in drawn.draw(
        "see [it][1]\n\ntext\n\n[1]: https://a.example/x"
    )
    assert "\\boxed{" in drawn.draw("\\(\\boxed{\\pmb{x}}\\)") and drawn.complaints == []
    assert 'class="math source" data-is="false false \\frac"' in plain(drawn.draw("$\\frac$"))


HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](vbscript:x)",
    "[x](data:text/html,<script>alert(1)</script>)",
    "![x](https://example.com/t.png)",
    "<style>*{display:none}</style>",
    "<iframe src=//example.com></iframe>",
    "[x]: javascript:alert(1)\n\n[x]",
    "<svg/onload=alert(1)>",
    "[a](JaVaScRiPt:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](java\tscript:x)",
    '<https://example.com/"onmouseover=alert(1)>',
    "[x](https://e.com 'a\" onmouseover=\"alert(1)')",
    "$\\href{javascript:alert(1)}{x}$",
    "$\\htmlStyle{position:fixed}{x}$",
    "$\\includegraphics{https://e.com/x}$",
    "$\\url{javascript:x}$",
    "\\[\\def\\a{\\a\\a}\\a\\]",
    "```html\n<img src=x onerror=alert(1)>\n```",
    "```__proto__\nx\n```",
    "```constructor\nx\n```",
    "[x](blob:https://e.com/x)",
    "[x](//e.com)",
    "[x](/api/export)",
    "<think><script>x</script></think>",
    "|<img src=x onerror=alert(1)>|\n|-|\n|<b onclick=x>|",
    "- [x] <a href=javascript:x>y</a>",
    "&lt;script&gt;",
)
# What could run, be fetched or lead elsewhere, anywhere in what is drawn.
FUZZ = """async (texts) => {
    const { AnswerText } = await import("./MODULE");
    const found = [];
    for (const text of texts) for (const live of [true, false]) {
        const made = new AnswerText().draw(text, live).element;
        document.body.append(made);
        await null;
        for (const node of made.querySelectorAll("*")) {
            if (/^(script|img|iframe|style|object|embed|link|form|input|base|meta|video|audio)$/i.test(node.nodeName)) found.push([text, node.nodeName]);
            for (const { name, value } of node.attributes) {
                if (name.startsWith("on") || name === "srcdoc" || name === "src") found.push([text, name]);
                if (name === "href" && !/^(https?:|mailto:|#i-)/.test(value)) found.push([text, value]);
            }
        }
        made.remove();
    }
    return found;
}"""


def test_nothing_a_model_writes_can_run_or_be_fetched(drawn):
    chance = random.Random(5)
    pieces = [p for text in HOSTILE for p in (text, text[: len(text) // 2], text[len(text) // 2 :])]
    pieces += [
        "`",
        "```",
        "**",
        "$",
        "$$",
        "\\(",
        "\\[",
        "|",
        "\n\n",
        "> ",
        "- ",
        "<think>",
        "</think>",
        "](",
        "\0",
        "&#x3c;",
    ]
    texts = [
        *HOSTILE,
        *("".join(chance.choices(pieces, k=chance.randint(2, 9))) for _ in range(600)),
    ]
    requested = []
    drawn.page.on("request", lambda r: requested.append(r.url))
    module = drawn.page.locator("link[href$='markdown/view.js']").get_attribute("href")
    assert drawn.page.evaluate(FUZZ.replace("MODULE", module), texts) == []
    assert [url for url in requested if "/static/" not in url] == []
    assert "TypeError" in drawn.page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return String(e); } }"
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_text_grows_into_what_it_would_be_at_once(drawn, seed):
    chance = random.Random(seed)
    blocks = [
        *EVERYTHING.split("\n\n"),
        *HOSTILE,
        "$$\nx\n$$",
        "```\nopen",
        "1. a\n\n   b\n\n2. c",
        "    code",
        "a | b\n-|-\n1 | 2",
        "[x]: https://e.com/y",
        "[x]",
        "Setext\n===",
    ]
    text = "\n\n".join(chance.choices(blocks, k=14))
    _, differs = drawn.grow(text, 7)
    assert differs is None, text


def test_a_long_answer_costs_no_more_than_its_length(drawn):
    """Not a time: how many characters are read again as it grows."""
    text = "A paragraph of *some* words, with `code`.\n\n" * 3000
    html = drawn.draw(text)
    assert html.count("<p>") <= 3000
    assert drawn.draw("x <b> " * 60_000).startswith(
        '<div class="answer-text"><div class="text plain">x &lt;b'
    )
    for deep in (">" * 2000 + "x", "*a" * 5000, "[" * 5000, "$" * 5000, "\\(" * 3000, "`" * 4001):
        assert drawn.draw(deep) and drawn.draw(deep, True)


RECEIPT = "CORNER SHOP\nTOTAL 12.50\nVAT 2.10\nCASH 20.00"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RECEIPT, "<p>CORNER SHOP<br>TOTAL 12.50<br>VAT 2.10<br>CASH 20.00</p>"),
        ("- one\n  two\n- three", "<li>one<br>two</li>"),
        ("1. one\n\n   two\n   three", "<p>two<br>three</p>"),
        ("> one\n> two\nthree", "one<br>two<br>three"),
        ("**one\ntwo** `three\nfour`", "<strong>one<br>two</strong>"),
        ("one  \ntwo\\\nthree", "<p>one<br>two<br>three</p>"),
        ("one\n\ntwo", "<p>one</p>"),
        ("<think>one\ntwo</think>\nthree", "<p>one<br>two</p>"),
        ("```\none\ntwo\n```", "one\ntwo"),
    ],
)
def test_each_line_of_an_answer_is_a_line(drawn, text, expected):
    html = plain(drawn.draw(text))
    assert expected in html and "<br></" not in html


@pytest.mark.parametrize(
    "text",
    [
        f"{RECEIPT}\n\nThe end",
        "Lines:\n12\n12.50\n-5\n- a list\n  of lines\n\n> a\n> b\n1. c\nd",
        "Roses are *red,\nviolets* are blue,\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\ntext\nmore",
    ],
)
def test_a_line_that_is_being_written_does_not_jump(drawn, text):
    heights, differs = drawn.grow(text)
    assert differs is None and not [1 for a, b in itertools.pairwise(heights) if b < a - 1]
