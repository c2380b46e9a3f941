"""Markdown of an answer as HTML that is safe to put into the page: what a picture says may end up
in an answer.
"""

from __future__ import annotations

from html import escape

import nh3
from markdown_it import MarkdownIt

MARKDOWN_MAX = 1 << 18  # characters; 2 s
_READER = MarkdownIt("commonmark", {"html": False, "typographer": False}).enable(
    ["table", "strikethrough"]
)
_READER.disable(
    "image"
)  # an address in an answer must not be fetched: a stranger would learn what was asked
_TAGS = {
    "p",
    "br",
    "hr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "blockquote",
    "pre",
    "code",
    "em",
    "strong",
    "s",
    "a",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}, "code": {"class"}}


def render(text: str) -> str:
    """HTML with none but the tags above; links go to the web or to mail, without a word about
    the page they are on. An answer beyond `MARKDOWN_MAX` is shown as it was written: reading it
    would take seconds, each time the conversation is opened.
    """
    if len(text) > MARKDOWN_MAX:
        return f"<pre>{escape(text)}</pre>"
    return nh3.clean(
        _READER.render(text),
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )
