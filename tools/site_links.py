"""A hook of MkDocs: links that lead out of docs/ (to README.md, benchmarks/, examples/, ...) lead to
the repository's page (`repo_url`), or are plain text if there is none.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's Markdown without relative links to files that the site does not have."""
    if not config.repo_url:
        return OUTSIDE.sub(r"\1", markdown)
    return OUTSIDE.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/main/\2)", markdown)
