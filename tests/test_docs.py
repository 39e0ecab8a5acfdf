"""The Python in README and docs runs as it stands there, one document after the other.

Blocks of a document share their names, as a reader would type them. A block that follows a comment
`<!-- not run: why -->` is a fragment and is only compiled.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from noshuffle.strategies import mechanisms, registry

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
assert _spec is not None
assert _spec.loader is not None
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)
ALONE = (
    "README.md",
    "docs/index.md",
    "docs/budget.md",
    "docs/compiled-step.md",
    "docs/features.md",
    "docs/federated.md",
    "docs/guides/horizons.md",
    "docs/guides/mechanism.md",
    "docs/guides/migrating.md",
    "docs/guides/order.md",
)
#: One for each kind of user; `make tutorial-NAME` runs one of them.
TUTORIALS = ("mnist", "lora", "stream", "flower", "officer", "mechanism")


#: Pages whose Python a test of their own runs, beside what they tell.
ELSEWHERE = {
    "docs/convex.md": "tests/convex/test_docs_convex.py",
    "docs/transformers.md": "tests/clipping/test_huggingface.py",
}


def blocks(name: str) -> list[tuple[bool, str]]:
    """(is a fragment, code) of every Python block of that document."""
    text = (ROOT / name).read_text(encoding="utf8")
    return [(bool(note), code) for note, code in notebooks.BLOCK.findall(text)]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(name)
    assert found, f"{name} has no Python"
    for extra in notebooks.EXTRAS:
        if any(re.search(rf"(import|from) (\w+, )?{extra}\b", code) for _, code in found):
            pytest.importorskip(extra)
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "document"}
    for place, (is_fragment, code) in enumerate(found, 1):
        program = compile(code, f"{name}, block {place}", "exec", dont_inherit=True)
        if not is_fragment:
            exec(program, names)


@pytest.mark.parametrize("name", ALONE)
def test_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "lora" else n for n in TUTORIALS]
)
def test_tutorials_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "mnist":
        if (folder := notebooks.data_folder()) is None:
            pytest.skip("needs MNIST: set NOSHUFFLE_DATA, or put it into ../shared/data")
        monkeypatch.setenv("NOSHUFFLE_DATA", folder)
    tables = (mechanisms.MECHANISMS, registry._CLASSES)  # what a page registers is forgotten
    before = [dict(table) for table in tables]
    run(f"docs/tutorials/{name}.md", tmp_path, monkeypatch)
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)
    plt.close("all")


PAGE = """# A page

See [results](../results.md).

```python
import matplotlib.pyplot as plt
print(6 * 7)
plt.plot([1, 2])
```

<!-- not run: a fragment -->
```python
raise SystemExit
```

```python
WHAT
```
"""


def test_a_page_becomes_an_executed_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "PAGES", tmp_path)
    (tmp_path / "page.md").write_text(PAGE.replace("WHAT", "print(plt)"), encoding="utf8")
    cells = notebooks.execute("page")["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "code"]
    assert "(../results.html)" in cells[0]["source"]
    said, drawn = cells[1]["outputs"]
    assert said["text"] == "42\n"
    assert drawn["data"]["image/png"].startswith("iVBOR")
    assert "raise SystemExit" in cells[2]["source"]
    (tmp_path / "page.md").write_text(PAGE.replace("WHAT", "1 / 0"), encoding="utf8")
    with pytest.raises(ZeroDivisionError):
        notebooks.execute("page")
    text = PAGE.replace("WHAT", "import flwr")
    monkeypatch.setattr(notebooks, "find_spec", lambda name: None)
    assert notebooks.missing(text) == ["flwr"]


def documents() -> list[Path]:
    found = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/README.md")
    return [page for pattern in found for page in ROOT.glob(pattern)]


def test_every_page_with_python_is_run() -> None:
    run_here = {*ALONE, *(f"docs/tutorials/{name}.md" for name in TUTORIALS)}
    for page, by in ELSEWHERE.items():
        assert Path(page).name in (ROOT / by).read_text(encoding="utf8")
    names = {str(page.relative_to(ROOT)) for page in documents()}
    with_python = {name for name in names if any(not note for note, _ in blocks(name))}
    assert with_python == run_here | set(ELSEWHERE)


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in documents()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_commands_in_documents_exist() -> None:
    from typer.main import get_command

    from noshuffle.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for page in documents():
        text = page.read_text(encoding="utf8")
        shell = "\n".join(re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL))
        shell = shell.replace("\\\n", " ")
        for line in re.findall(r"^noshuffle ([^#\n]*)", shell, re.MULTILINE):
            command, *words = line.split()
            known = {name for p in commands[command].params for name in p.opts + p.secondary_opts}
            assert {w for w in words if w.startswith("--")} <= known, f"{page.name}: {line}"


def test_epsilon_in_documents_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Every `noshuffle epsilon` line as it stands; other commands take too long here."""
    from noshuffle.cli import main

    lines = {
        line
        for page in documents()
        for line in re.findall(
            r"^noshuffle (epsilon [^#\n]*)",
            page.read_text(encoding="utf8").replace("\\\n", " "),
            re.MULTILINE,
        )
    }
    assert len(lines) >= 2
    for line in lines:
        assert main(line.split()) == 0, line
        assert "-DP per" in capsys.readouterr().out
