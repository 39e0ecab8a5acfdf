"""The tutorials as executed notebooks: every page is its own source, nothing is written twice.

    python docs/notebooks.py FOLDER                  all that changed
    python docs/notebooks.py FOLDER --show mnist     one of them, anew, with what it prints

A page of docs/tutorials is cut at its Python blocks: text becomes markdown cells, blocks become
code cells, run from top to bottom in a process of their own and an empty folder. What a block
prints, and the pictures that it leaves open in matplotlib, are the outputs of its cell (nbformat
4.5). A block after `<!-- not run: why -->` stays text. A block that raises ends the build. What a
page needs and is not to be had is named, and the page left out. `docs/hooks.py` puts the notebooks
beside their pages, and what they print below their blocks.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/tutorials"
BLOCK = re.compile(r"(<!-- not run: [^>]*-->\n)?```python\n(.*?)```\n?", re.DOTALL)
PAGE_LINK = re.compile(r"\]\(([^)#\s]+)\.md(#[^)]*)?\)")
#: Packages that a page may use and an installation may lack.
EXTRAS = ("transformers", "peft", "flwr", "pandas")


def pieces(text: str) -> Iterator[tuple[bool, str]]:
    """(is a program, content) of every piece of a page, in order; fragments are text."""
    last = 0
    for found in BLOCK.finditer(text):
        if found[1]:
            continue
        yield False, text[last : found.start()]
        yield True, found[2]
        last = found.end()
    yield False, text[last:]


def missing(text: str) -> list[str]:
    """What a page imports and is not here."""
    code = "\n".join(content for is_program, content in pieces(text) if is_program)
    wanted = [name for name in EXTRAS if re.search(rf"(import|from) (\w+, )?{name}\b", code)]
    return [name for name in wanted if find_spec(name) is None]


def data_folder() -> str | None:
    """Where MNIST lies: $NOSHUFFLE_DATA, else beside the checkout; None: it is downloaded."""
    beside = Path(os.environ.get("NOSHUFFLE_SHARED", ROOT.parent / "shared")) / "data"
    folder = Path(os.environ.get("NOSHUFFLE_DATA") or beside)
    return str(folder) if (folder / "mnist.npz").is_file() else None


def execute(name: str) -> dict[str, Any]:
    """The notebook of a page, run in this process."""
    import matplotlib

    matplotlib.use("agg")
    names: dict[str, object] = {"__name__": "document"}
    cells: list[dict[str, Any]] = []
    count = 0
    for is_program, content in pieces((PAGES / f"{name}.md").read_text(encoding="utf8")):
        if not content.strip():
            continue
        cell: dict[str, Any] = {"id": f"{name}-{len(cells)}", "metadata": {}}
        if is_program:
            count += 1
            said = io.StringIO()
            program = compile(content, f"{name}.md, block {count}", "exec", dont_inherit=True)
            with contextlib.redirect_stdout(said):
                exec(program, names)
            cell |= {"cell_type": "code", "execution_count": count, "source": content.rstrip()}
            cell["outputs"] = [*_printed(said.getvalue()), *_pictures()]
        else:
            cell |= {"cell_type": "markdown", "source": _linked(content.strip())}
        cells.append(cell)
    language = {"name": "python", "version": sys.version.split()[0]}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": language}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


def _linked(text: str) -> str:
    """Links lead to pages of the site, beside which the notebook lies."""
    return PAGE_LINK.sub(
        lambda link: f"]({link[1].replace('../../', '../project/')}.html{link[2] or ''})", text
    )


def _printed(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text}] if text else []


def _pictures() -> list[dict[str, Any]]:
    """Figures that are open in matplotlib, which are closed."""
    from matplotlib import pyplot as plt

    found = []
    for number in plt.get_fignums():
        held = io.BytesIO()
        plt.figure(number).savefig(held, format="png", dpi=120, bbox_inches="tight")
        data = {"image/png": base64.b64encode(held.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def digest(name: str) -> str:
    """Of the page and of the package that it runs."""
    found = hashlib.sha256()
    for path in (PAGES / f"{name}.md", Path(__file__), *sorted(ROOT.glob("src/**/*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()


def build(name: str, folder: Path, *, show: bool = False) -> str | None:
    """Write one notebook if it is not there as it should be; what went wrong, or None."""
    out, now = folder / f"{name}.ipynb", digest(name)
    if lacks := missing((PAGES / f"{name}.md").read_text(encoding="utf8")):
        print(f"{name}: left out, needs {', '.join(lacks)}")
        return None
    is_current = out.is_file() and json.loads(out.read_bytes())["metadata"].get("digest") == now
    if is_current and not show:
        return None
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder_of_data := data_folder():
        env["NOSHUFFLE_DATA"] = folder_of_data
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--execute", name, f"{scratch}/out.json"]
        done = subprocess.run(command, cwd=scratch, env=env, text=True, capture_output=True)
        if "could not be downloaded" in done.stderr:
            print(f"{name}: left out, {done.stderr.strip().splitlines()[-1]}")
            return None
        if done.returncode:
            return f"{name}: {done.stderr.strip()[-2000:]}"
        notebook = json.loads(Path(scratch, "out.json").read_bytes())
    notebook["metadata"]["digest"] = now
    part = out.with_suffix(".part")
    part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    part.replace(out)
    programs = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    said = "".join(o.get("text", "") for cell in programs for o in cell["outputs"]) if show else ""
    print(f"{said}{name}: {len(programs)} cells ran, {out}", flush=True)
    return None


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--execute"]:
        Path(arguments[2]).write_text(json.dumps(execute(arguments[1])), encoding="utf8")
        return 0
    folder, show = Path(arguments[0]), "--show" in arguments
    names = [name for name in arguments[1:] if name != "--show"]
    names = names or sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "index")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:  # processes of their own, two at a time
        wrong = [e for e in pool.map(lambda name: build(name, folder, show=show), names) if e]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
