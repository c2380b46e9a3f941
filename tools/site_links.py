"""A hook of MkDocs for links that lead out of docs/ (README.md, benchmarks/, examples/, ...): they
lead to the repository's page (`repo_url`), or become plain text if none is set.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page's Markdown without relative links to files that the site does not have."""
    if not config.repo_url:
        return OUTSIDE.sub(r"\1", markdown)
    return OUTSIDE.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/main/\2)", markdown)
