"""Wheel and sdist: the same bytes each time, with all that they need and nothing else."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.deploy import release
from tests.needs import needs

PROJECT = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Wheel, sdist and files of the last commit: built twice, and the wheel of the sdist too."""
    needs("hatchling")
    if not (release.ROOT / ".git").exists():
        pytest.skip("needs the repository: this is an unpacked sdist")
    return release.built_twice("HEAD", tmp_path_factory.mktemp("release"))


@pytest.mark.slow
def test_archives_are_the_same_bytes_each_time_and_hold_what_they_should(
    built: tuple[Path, Path, list[str]],
) -> None:
    wheel, sdist, files = built
    release.contents_of_wheel(wheel, files)
    release.contents_of_sdist(sdist, files)
    assert "paramserve/py.typed" in release.held_by_wheel(wheel)
    assert {"Makefile", "constraints.txt", "tests/conftest.py"} <= release.held_by_sdist(sdist)
    assert release.metadata(wheel, sdist).name == PROJECT["name"]


@pytest.mark.slow
def test_archives_of_another_time_are_other_bytes(
    built: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    """The comparison compares: the time in the archives is the one that is set."""
    wheel, *_ = built
    release.build(release.ROOT, tmp_path, 315_532_800 + 86_400, "wheel")
    (other,) = tmp_path.iterdir()
    with zipfile.ZipFile(other) as packed:
        assert {each.date_time for each in packed.infolist()} == {(1980, 1, 2, 0, 0, 0)}
    with pytest.raises(release.Wrong, match="two builds differ"):
        release.differing(wheel.parent, tmp_path)


def test_a_file_too_few_or_too_many_is_told() -> None:
    release.same("a.whl", {"a", "b"}, {"a", "b"})
    with pytest.raises(release.Wrong, match=r"^a\.whl lacks b; should not have c$"):
        release.same("a.whl", {"a", "c"}, {"a", "b"})


def test_caches_are_told_even_where_they_are_expected() -> None:
    held = {"p/a.py", "p/__pycache__/a.txt", "p/k.nbc", "p/k.nbi", "p/a.pyc"}
    told = re.escape("has caches p/__pycache__/a.txt, p/a.pyc, p/k.nbc, p/k.nbi")
    with pytest.raises(release.Wrong, match=told):
        release.same("a.whl", held, held)


def test_a_command_that_fails_is_told_with_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(release.Wrong, match=r"ended with 3:\nseen"):
        release.run([sys.executable, "-c", "print('seen'); raise SystemExit(3)"], tmp_path)


def test_project_names_the_lowest_python_first_and_a_licence_that_is_there() -> None:
    tried = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert PROJECT["requires-python"] == f">={tried[0]}"
    assert tried == sorted(tried, key=lambda each: int(each.partition(".")[2]))
    (licence,) = PROJECT["license-files"]
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (release.ROOT / licence).read_text()
