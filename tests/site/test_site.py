"""The documentation as a site: it is built without a warning, and a browser shows it whole.

The pictures that the browser takes are kept in build/screenshots.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.site import browser
from tests.site.browser import Browser

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "docs" / "bin" / "python"
"""Where `make docs` installs mkdocs."""
PICTURES = ROOT / "build" / "screenshots"
WIDTHS = {"telephone": 400, "desktop": 1280}
BUILD_TIMEOUT_S = 60.0
SEARCHED = """
new Promise((done) => {
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = WORDS;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  const look = () => {
    const found = [...document.querySelectorAll(".md-search-result__link")];
    if (found.length) done(found.map((each) => each.href)); else setTimeout(look, 20);
  };
  look();
})
"""


def built(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What mkdocs tells of a build."""
    if not PYTHON.exists():
        pytest.skip("SITE NOT CHECKED: mkdocs is not installed; run `make docs`")
    return subprocess.run(
        [PYTHON, "-m", "mkdocs", "build", "-f", config, "-d", out],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if browser.found() is None:
        names = ", ".join(browser.BROWSERS)
        pytest.skip(f"SITE NOT CHECKED IN A BROWSER: none of {names} is installed")
    with browser.opened(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


BROKEN = {
    "[a](guide.md#nothing)": "does not contain an anchor '#nothing'",
    "[a](nothing.md)": "'nothing.md', but the target is not found",
    "[a](../nothing.toml)": "'../nothing.toml', but the target is not found",
    "[a](/guide.md)": "absolute link '/guide.md'",
}
"""Links that lead nowhere, and what mkdocs tells of each."""


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    for name in ("docs", "deploy", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (p for p in ROOT.iterdir() if p.is_file()):
        shutil.copy(path, tmp_path)
    for name in ("src", "examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "metrics.md").open("a") as page:
        page.write("\n" + "\n".join(BROKEN) + "\n")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert done.stderr.count("WARNING") == len(BROKEN), done.stderr
    for link, told in BROKEN.items():
        assert told in done.stderr, link


def test_pages_fit_two_widths_and_load_nothing_from_elsewhere(site: Path, shown: Browser) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 20
    wrong = []
    for page in pages:
        shown.resize(WIDTHS["desktop"], 900)
        shown.go(page.as_uri())
        assert shown.evaluate("document.querySelectorAll('article h1').length") == 1, page.name
        for kind, width in WIDTHS.items():
            shown.resize(width, 900)
            needed = shown.evaluate("document.documentElement.scrollWidth")
            if needed > width:
                wrong.append(f"{page.name} takes {needed} of {width} pixels")
            shown.picture(PICTURES / f"{page.stem}-{kind}.png")
    elsewhere = {each for each in shown.requested if not each.startswith(("file:", "data:"))}
    assert not wrong
    assert not elsewhere - {"about:blank"}
    assert not shown.problems


@pytest.mark.parametrize("way", ["files", "served"])
def test_search_finds_a_page(way: str, site: Path, shown: Browser) -> None:
    """Opened as files, the pages search in a frame; from a server, in a worker of the browser."""
    shown.resize(WIDTHS["desktop"], 900)
    with served(site) if way == "served" else nullcontext(site.as_uri()) as root:
        shown.go(f"{root}/index.html")
        found = shown.evaluate(SEARCHED.replace("WORDS", '"BoundedStaleness"'))
    assert any("consistency.html" in each for each in found), found
    assert not shown.problems


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of files."""
    handler = partial(QuietHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
