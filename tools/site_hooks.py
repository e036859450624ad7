"""Hooks of mkdocs: the order of pages is that of docs/index.md, and links out of docs/ lead to pages that show what they name."""

# mkdocs is in the environment that tools/site makes, and not in this one.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:  # noqa: ANN401 mkdocs' own classes
    """Take the order of the pages from the index."""
    listed = [name for _, name, _ in LINK.findall((DOCS / "index.md").read_text("utf-8"))]
    pages = [name for name in listed if name.endswith(".md") and not name.startswith("..")]
    decisions = [f"decisions/{path.name}" for path in sorted((DOCS / "decisions").glob("*.md"))]
    packages = [_page(ROOT / name) for name in _readmes()]
    config["nav"] = [
        "index.md",
        *pages,
        {"Packages": packages},
        {"API": [f"api/{name}.md" for name in _public()]},
        {"Decisions": ["decisions/index.md", *decisions]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401
    """Add a page for the list of decisions, and for each file elsewhere that a page links to, and what those link to."""
    titles = [
        f"- [{path.read_text('utf-8').splitlines()[0].lstrip('# ')}]({path.name})"
        for path in sorted((DOCS / "decisions").glob("*.md"))
    ]
    files.append(
        File.generated(config, "decisions/index.md", content="\n".join(["# Decisions", "", *titles]))
    )
    for package, names in _public().items():
        text = "\n\n".join([f"# {package}", *(f"::: {name}" for name in names)])
        files.append(File.generated(config, f"api/{package}.md", content=text))
    waiting, known = [*DOCS.rglob("*.md")], set[Path]()
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target.is_file() and not target.is_relative_to(DOCS) and target not in known:
                known.add(target)
                files.append(File.generated(config, _page(target), content=_shown(target)))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ANN401
    """Let links lead where their target is on the site; folders are named, and not linked."""
    del config, files
    uri = page.file.src_uri
    source = DOCS / uri if not uri.startswith("source/") else ROOT / uri.removeprefix("source/")

    def led(link: re.Match[str]) -> str:
        text, name, anchor = link[1], link[2], link[3] or ""
        if not name:
            return link[0]
        target = Path(os.path.normpath(source.parent / name))
        if target == DOCS / "decisions":
            target = target / "index.md"
        elif not target.is_file():
            return text if target.exists() else link[0]  # of the latter mkdocs complains
        return f"[{text}]({posixpath.relpath(_page(target), posixpath.dirname(uri) or '.')}{anchor})"

    pieces, end = list[str](), 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(led, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(led, markdown[end:])])


def _public() -> dict[str, list[str]]:
    """Return by package what it offers, where each is defined: the names of `__init__.pyi`."""
    stubs = {path.parent.name: path for path in sorted(ROOT.glob("packages/*/src/*/__init__.pyi"))}
    return {
        package: sorted(
            (
                f"{package}.{statement.module}.{one.name}"
                for statement in _imports(stub)
                for one in statement.names
            ),
            key=lambda name: name.rpartition(".")[2],
        )
        for package, stub in stubs.items()
    }


def _imports(stub: Path) -> list[ast.ImportFrom]:
    return [one for one in ast.parse(stub.read_text("utf-8")).body if isinstance(one, ast.ImportFrom)]


def _readmes() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/README.md"))


def _page(path: Path) -> str:
    """Return the page of the site that shows `path`."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _shown(path: Path) -> str:
    text, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return text
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    kind = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml"}.get(path.suffix, "text")
    return f"# {name}\n\n{fence}{kind}\n{text}\n{fence}\n"


def _targets(page: Path) -> set[Path]:
    text = FENCE.sub("", page.read_text("utf-8"))
    return {Path(os.path.normpath(page.parent / name)) for _, name, _ in LINK.findall(text) if name}
