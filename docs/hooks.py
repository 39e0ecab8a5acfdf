"""What the site needs beyond docs/: pages of the repository, and links that lead to them.

Documents link to each other by their place in the repository, so that they can be read there.
Pages outside docs/ are taken into the site under project/, and a link to one of them, or from one
of them, is rewritten to its place in the site. Everything else is left to the strict link check.
Tutorials offer the notebook that `docs/notebooks.py` made of them, and show what it prints.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import digest, pieces  # beside this file; mkdocs loads hooks by their path

OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "examples/federated/README.md",
)
NOTEBOOKS = "build/notebooks"
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
    for path in filter(is_current, sorted((root / NOTEBOOKS).glob("*.ipynb"))):
        place = f"tutorials/{path.name}"
        files.append(File.generated(config, place, content=path.read_bytes()))
        for name, png in pictures(path):
            files.append(File.generated(config, f"tutorials/{name}", content=png))
    return files


def is_current(path: Path) -> bool:
    """Whether a notebook is there and was made of its page and of this package, as they stand."""
    if not path.is_file():
        return False
    return bool(json.loads(path.read_bytes())["metadata"]["digest"] == digest(path.stem))


def outputs(path: Path) -> list[list[dict[str, Any]]]:
    """What every program of a notebook left, in order."""
    cells = json.loads(path.read_bytes())["cells"]
    return [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]


def pictures(path: Path) -> Iterator[tuple[str, bytes]]:
    for block, left in enumerate(outputs(path)):
        for number, output in enumerate(left):
            if "data" in output:
                data = base64.b64decode(output["data"]["image/png"])
                yield f"{path.stem}-{block}-{number}.png", data


def with_outputs(markdown: str, path: Path) -> str:
    """A tutorial with what its blocks print and draw below them."""
    held = outputs(path)
    link = f"[Download as a notebook]({path.name}), with all that it prints and draws."
    shown: list[str] = []
    block = 0
    for is_program, content in pieces(markdown):
        if not is_program:
            shown.append(content)
            continue
        shown.append(f"```python\n{content}```\n")
        for number, output in enumerate(held[block]):
            if "data" in output:
                shown.append(f"\n![what the block draws]({path.stem}-{block}-{number}.png)\n")
            else:
                shown.append(f"\n```{{.text .output}}\n{output['text'].rstrip()}\n```\n")
        block += 1
    title, _, rest = "".join(shown).partition("\n")
    return f"{title}\n\n{link}\n{rest}"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    here = page.file.src_uri
    notebook = Path(config.config_file_path).parent / NOTEBOOKS / f"{Path(here).stem}.ipynb"
    if here.startswith("tutorials/") and is_current(notebook):
        markdown = with_outputs(markdown, notebook)
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
