"""What `make docs` does to pages on their way to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository that are no page become plain text; those files must exist."""

    def unlinked(found: re.Match[str]) -> str:
        target = DOCS.joinpath(page.file.src_uri).parent.joinpath(found[2])
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}, which does not exist")
        return found[1]

    return _OUT_OF_DOCS.sub(unlinked, markdown)
