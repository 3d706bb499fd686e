"""Wheel and sdist: the same bytes each time, with all that they need and nothing else."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from tests.deploy import release
from tests.needs import needs

PROJECTS = [
    tomllib.loads((each / "pyproject.toml").read_text())["project"]
    for each in release.projects(release.ROOT)
]
PROJECT = PROJECTS[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[release.Built]:
    """The distributions of the last commit: built twice, and their wheels of the sdists too."""
    needs("hatchling")
    if not (release.ROOT / ".git").exists():
        pytest.skip("needs the repository: this is an unpacked sdist")
    return release.built_twice("HEAD", tmp_path_factory.mktemp("release"))


@pytest.mark.slow
def test_archives_are_the_same_bytes_each_time_and_hold_what_they_should(
    built: list[release.Built],
) -> None:
    names = [each.project["name"] for each in built]
    assert names == ["paramserve", "paramserve-plan", "paramserve-testing"]
    for each in built:
        release.contents_of_wheel(each)
        release.contents_of_sdist(each)
        package = each.project["name"].replace("-", "_")
        assert f"{package}/py.typed" in release.held_by_wheel(each.wheel)
        assert release.metadata(each).name == each.project["name"]
    held = release.held_by_sdist(built[0].sdist)
    assert {"Makefile", "constraints.txt", "tests/conftest.py"} <= held
    release.in_step([release.metadata(each) for each in built])


@pytest.mark.slow
def test_archives_of_another_time_are_other_bytes(
    built: list[release.Built], tmp_path: Path
) -> None:
    """The comparison compares: the time in the archives is the one that is set."""
    release.build(release.ROOT, tmp_path, 315_532_800 + 86_400, "wheel")
    (other,) = tmp_path.iterdir()
    with zipfile.ZipFile(other) as packed:
        assert {each.date_time for each in packed.infolist()} == {(1980, 1, 2, 0, 0, 0)}
    with pytest.raises(release.Wrong, match="two builds differ"):
        release.differing(built[0].wheel.parent, tmp_path)


def test_distribution_out_of_step_is_refused() -> None:
    first, same, other, loose = (
        Metadata.from_raw({"metadata_version": "2.3", "name": name, "version": version} | needed)
        for name, version, needed in (
            ("paramserve", "0.2.0", {}),
            ("paramserve-plan", "0.2.0", {"requires_dist": ["paramserve==0.2.0"]}),
            ("paramserve-plan", "0.1.0", {"requires_dist": ["paramserve==0.1.0"]}),
            ("paramserve-plan", "0.2.0", {"requires_dist": ["paramserve>=0.2"]}),
        )
    )
    release.in_step([first, same])
    for wrong in (other, loose):
        with pytest.raises(release.Wrong, match=r"of version 0\.2\.0 and need paramserve==0\.2\.0"):
            release.in_step([first, same, wrong])


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
    texts = set()
    for folder, project in zip(release.projects(release.ROOT), PROJECTS, strict=True):
        (licence,) = project["license-files"]
        assert project["license"] == "Apache-2.0"
        texts.add((folder / licence).read_text())
    (text,) = texts
    assert "Apache License" in text
