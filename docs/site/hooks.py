"""What the site has besides the pages of docs/, for mkdocs: see `hooks` in mkdocs.yml.

README.md is the front page. CONTRIBUTING.md, CHANGELOG.md, the page of deploy/ and the notebooks
become pages, too. A link to another file of the repository leads to a copy of it in the site, so
that no link needs a network.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "kubernetes.md",
}
"""Pages outside of docs/: where they are in the repository, and in the site."""
NOTEBOOKS = {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md"
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
COPIES = "repository"
"""Folder of the site that has copies of linked files."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and what pages link to."""
    for source, name in (BESIDE | NOTEBOOKS).items():
        text = linked((ROOT / source).read_text(), source, files, config)
        if source in NOTEBOOKS:
            text = notebook(text, f"../{copied(source, files, config)}")
        files.append(File.generated(config, name, content=text))
    for file in list(files.documentation_pages()):
        if file.generated_by is None:
            linked(file.content_string, f"docs/{file.src_uri}", files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page of docs/ to what is outside of it."""
    if page.file.generated_by is not None:
        return markdown
    return linked(markdown, f"docs/{page.file.src_uri}", files, config)


def linked(text: str, source: str, files: Files, config: MkDocsConfig) -> str:
    """A page with the links of `source`, its place in the repository, as the site has them."""
    names = {f"docs/{file.src_uri}": file.src_uri for file in files} | BESIDE | NOTEBOOKS
    folder = posixpath.dirname(names[source]) or "."

    def moved(found: re.Match[str]) -> str:
        begin, target, anchor, end = found.groups(default="")
        if re.match(r"[a-z]+:", target):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(target)))
        if place not in names:
            if not (ROOT / place).is_file():
                return found[0]  # mkdocs warns of it
            names[place] = copied(place, files, config)
        return begin + posixpath.relpath(names[place], folder) + anchor + end

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # blocks of code
    return "".join(
        part if number % 2 else LINK.sub(moved, part) for number, part in enumerate(parts)
    )


def copied(place: str, files: Files, config: MkDocsConfig) -> str:
    """Have a file of the repository in the site; where it is there."""
    name = f"{COPIES}/{place}"
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / place)))
    return name


def notebook(text: str, download: str) -> str:
    """A notebook as a page: its cells, and a link to the file."""
    shown = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        shown.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    shown.insert(1, f"[Download this notebook]({download})")
    return "\n\n".join(shown) + "\n"
