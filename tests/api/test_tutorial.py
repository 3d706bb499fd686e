"""The tutorial does what it says: its programs and commands run, and print what its pages show."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.needs import needs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
QUICK = ("04_tables",)
"""The others are marked slow."""
NEEDED = {"04": "pyarrow", "06": "pyarrow", "08": "pyarrow", "09": "ray"}
"""What pages have a reader install, by their number."""
INSTALLS = re.compile(r"^(pip install|python3 -m venv) .*$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,.:e-]*")
PAGE_TIMEOUT_S = 110.0


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The blocks of a page in order: their language, and what they hold."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def named(code: str) -> str:
    """The file into which a reader puts a program: its first line has the name."""
    found = re.match(r"# (\w+\.py)\n", code)
    assert found is not None, f"no file is named by:\n{code}"
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, with the programs of all pages."""
    made = tmp_path_factory.mktemp("tutorial")
    for page in PAGES:
        for language, code in blocks(page):
            if language == "python":
                (made / named(code)).write_text(code)
    return made


def run(commands: str, folder: Path) -> str:
    """What a shell prints that runs the commands of one block."""
    for port in set(re.findall(r"127\.0\.0\.1:(\d+)", commands)):
        commands = commands.replace(port, str(free_port()))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", INSTALLS.sub("", commands)],
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def missing(shown: str, printed: str) -> list[str]:
    """Lines that a page shows and a program did not print; numbers may be others, and "..." stands
    for anything."""

    def plain(text: str) -> str:
        return re.sub(r"\s+", " ", NUMBER.sub("N", text))

    lines = [plain(line).strip() for line in printed.splitlines()]
    expected = [
        # First what "..." parts: its dots behind a digit would be taken as the number's.
        ".*".join(re.escape(plain(part)) for part in line.strip().split("..."))
        for line in shown.splitlines()
    ]
    return [each for each in expected if not any(re.fullmatch(each, line) for line in lines)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.stem in QUICK else pytest.mark.slow, id=page.stem)
        for page in PAGES
    ],
)
def test_page_of_the_tutorial_runs_and_prints_what_it_shows(page: Path, folder: Path) -> None:
    if (module := NEEDED.get(page.stem[:2])) is not None:
        needs(module)
    if page.stem.startswith("06"):  # as a reader's first run
        shutil.rmtree(folder / "runs", ignore_errors=True)
    printed, ran = "", ""
    for language, code in blocks(page):
        if language == "sh":
            printed, ran = run(code, folder), ran + code
        elif language == "text":
            assert not missing(code, printed), printed
        else:
            assert language == "python", language
    written = [named(code) for language, code in blocks(page) if language == "python"]
    assert all(f"python {name}" in ran for name in written), "each program is run"


def test_pages_of_the_tutorial_lead_to_the_next_one() -> None:
    assert len(PAGES) == 10
    for page, after in itertools.pairwise(PAGES):
        assert page.read_text().strip().splitlines()[-1].startswith("Next: ["), page.name
        assert f"]({after.name})" in page.read_text().strip().splitlines()[-1], page.name


def test_output_that_differs_in_words_is_missing() -> None:
    assert not missing("version 80: 99%\n[rank 0] x ...\n", "[rank 1] x 2.5 y\nversion 7: 100%\n")
    assert missing("version 80: right\n", "version 7: 100%\n")
