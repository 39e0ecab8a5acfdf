"""What the site needs beyond docs/: pages of the repository, and links that lead to them.

Documents link to each other by their place in the repository, so that they can be read there.
Pages outside docs/ are taken into the site under project/, and a link to one of them, or from one
of them, is rewritten to its place in the site. Everything else is left to the strict link check.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "examples/federated/README.md",
)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def in_repository(page: str) -> str:
    """Where a page of the site lies in the repository."""
    return page.removeprefix("project/") if page.startswith("project/") else f"docs/{page}"


def in_site(path: str) -> str | None:
    """Where a file of the repository lies in the site, None if it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"project/{path}" if path in OUTSIDE else None


def on_files(files: Any, config: Any) -> Any:
    root = Path(config.config_file_path).parent
    for name in OUTSIDE:
        text = (root / name).read_text(encoding="utf8")
        files.append(File.generated(config, f"project/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(in_repository(here))

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target:
            return link[0]
        place = in_site(posixpath.normpath(posixpath.join(folder, target)))
        if place is None:
            return link[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(moved, markdown)
