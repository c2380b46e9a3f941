from __future__ import annotations

import pytest

from mtmd.web.page.markdown import MARKDOWN_MAX, render


@pytest.mark.parametrize(
    "text, html",
    [
        ("plain", "<p>plain</p>\n"),
        ("**b** *i* ~~s~~ `c`", "<p><strong>b</strong> <em>i</em> <s>s</s> <code>c</code></p>\n"),
        ("```python\nx < 1\n```", '<pre><code class="language-python">x &lt; 1\n</code></pre>\n'),
        ("3. three", '<ol start="3">\n<li>three</li>\n</ol>\n'),
        ("# h", "<h1>h</h1>\n"),
        ("> q", "<blockquote>\n<p>q</p>\n</blockquote>\n"),
    ],
)
def test_markdown_is_rendered(text, html):
    assert render(text) == html


def test_tables_are_rendered():
    assert render("| a |\n|---|\n| 1 |").count("<td>1</td>") == 1


def test_links_go_out_without_telling_from_where():
    html = render("[x](https://example.com/a?b=1&c=2)")
    assert (
        'href="https://example.com/a?b=1&amp;c=2"' in html
        and 'rel="noopener noreferrer nofollow"' in html
        and 'target="_blank"' in html
    )


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](vbscript:x)",
        "`<script>`",
        "[x](data:text/html,<script>alert(1)</script>)",
        "![x](https://example.com/tracker.png)",
        "<a href='javascript:alert(1)'>x</a>",
        "<style>*{display:none}</style>",
        "<iframe src=//example.com></iframe>",
        "[x]: javascript:alert(1)\n\n[x]",
        "<svg/onload=alert(1)>",
        "[a](JaVaScRiPt:alert(1))",
        "```<img src=x>\n```",
        '<https://example.com/"onmouseover=alert(1)>',
        "[x](https://e.com 'a\" onmouseover=\"alert(1)')",
    ],
)
def test_nothing_that_could_run_or_be_fetched_is_left(text):
    from html.parser import HTMLParser

    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    Reader().feed(render(text))
    assert not {tag for tag, _ in seen} & {"script", "img", "iframe", "style", "svg", "object"}
    for _, attributes in seen:
        assert not [a for a in attributes if a.startswith("on") or a == "style"]
        assert (attributes.get("href") or "https:").startswith(("https:", "http:", "mailto:"))


def test_a_deep_or_long_text_is_rendered():
    assert render(">" * 2000 + "x") and render("*a" * 5000) and render("[" * 5000)


def test_an_endless_answer_is_shown_as_it_was_written():
    text = "*a* <b> " * (MARKDOWN_MAX // 8 + 1)
    assert render(text) == f"<pre>{text.replace('<', '&lt;').replace('>', '&gt;')}</pre>"
    assert "<em>a</em>" in render(text[: MARKDOWN_MAX // 100])
