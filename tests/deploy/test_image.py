"""The Dockerfile, read without Docker: it copies what is there and what a build needs, and the
image runs our command as a user without rights."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.deploy import release
from tests.deploy.test_manifests import documents, pods
from tests.needs import needs

from paramserve.cli import cli

DOCKERFILE = release.ROOT / "Dockerfile"
PROJECT = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = {
    *("ARG", "FROM", "ENV", "RUN", "COPY", "LABEL", "USER", "WORKDIR", "EXPOSE"),
    *("ENTRYPOINT", "CMD"),
}


class Instruction(NamedTuple):
    name: str
    given: str


def instructions() -> list[Instruction]:
    """Those of the Dockerfile, with their continued lines."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        Instruction(name, " ".join(given.split()))
        for name, _, given in (line.partition(" ") for line in text.splitlines() if line)
    ]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, from its FROM on."""
    found: list[list[Instruction]] = []
    for each in instructions():
        if each.name == "FROM":
            found.append([])
        if found:
            found[-1].append(each)
    return found


def last(name: str) -> str:
    """What the image has of an instruction: the last one of the last stage."""
    return [each.given for each in stages()[-1] if each.name == name][-1]


def environment() -> dict[str, str]:
    found = (each.given for each in stages()[-1] if each.name == "ENV")
    return dict(word.split("=", 1) for given in found for word in shlex.split(given))


def copied() -> list[tuple[str, str]]:
    """Files and folders of the repository that are copied, each with where to."""
    found = []
    for each in instructions():
        if each.name == "COPY" and not each.given.startswith("--from="):
            *sources, where = each.given.split()
            found += [(source, where) for source in sources]
    return found


def test_every_instruction_is_one() -> None:
    assert {each.name for each in instructions()} <= INSTRUCTIONS
    assert all(each.given for each in instructions())


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    """A rule of .dockerignore counts for what is below its folder; the last that fits decides."""
    rules = (release.ROOT / ".dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert copied()
    for source, _ in copied():
        assert (release.ROOT / source).exists(), source
        fitting = [rule for rule in rules if fnmatch(source, rule.removeprefix("!"))]
        assert fitting[-1].startswith("!"), f"{source} is ignored"
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert kept == {source for source, _ in copied()}, "what is sent to the build is copied"
    assert {"**/__pycache__", "**/*.nbc", "**/*.nbi"} <= set(rules)


def test_stages_build_in_one_and_run_in_another() -> None:
    building, running = stages()
    name = re.fullmatch(r"python:\$\{PYTHON\}-slim AS (\w+)", building[0].given)
    assert name is not None
    assert running[0].given == "python:${PYTHON}-slim"
    (moved,) = (each.given for each in running if each.name == "COPY")
    origin, source, target = moved.split()
    assert (origin, source) == (f"--from={name[1]}", target), "a virtual environment cannot move"
    assert any(f"python -m venv {source}" in each.given for each in building)
    assert "pip install" not in " ".join(each.given for each in running)


def test_versions_and_extras_are_those_of_the_project() -> None:
    given = dict(each.given.split("=") for each in instructions()[:2])
    tried = [each.rpartition(" ")[2] for each in PROJECT["classifiers"]]
    assert given["PYTHON"] in tried
    assert given["EXTRAS"].strip("[]") in PROJECT["optional-dependencies"]
    (install,) = (each.given for each in instructions() if "pip install" in each.given)
    assert "-c /src/constraints.txt" in install
    assert '"/src${EXTRAS}"' in install
    declared = [each.given for each in stages()[0] if each.name == "ARG"]
    assert "EXTRAS" in declared, "an argument before FROM is empty in a stage that has none"


def test_image_runs_as_a_user_that_is_made_and_is_the_manifests() -> None:
    user, _, group = last("USER").partition(":")
    assert int(user) > 0
    made = " ".join(each.given for each in stages()[-1] if each.name == "RUN")
    assert f"--gid {group}" in made
    assert f"--uid {user}" in made
    for document in documents("kubernetes.yaml"):
        for pod in pods(document):
            assert str(pod["securityContext"]["runAsUser"]) == user
            assert str(pod["securityContext"]["runAsGroup"]) == group
    names = [each.name for each in stages()[-1]]
    assert "RUN" not in names[names.index("USER") :]
    assert environment()["NUMBA_CACHE_DIR"].startswith("/tmp/"), "the user can write there"


def test_entry_point_is_our_command() -> None:
    (program,) = json.loads(last("ENTRYPOINT"))
    assert PROJECT["scripts"].keys() == {program}
    assert environment()["PATH"].startswith("/opt/paramserve/bin:")
    assert json.loads(last("CMD")) == ["--help"]
    run = re.findall(r"docker run --rm \S+ (\w+)", (release.ROOT / "deploy/README.md").read_text())
    assert run
    assert set(run) <= cli.commands.keys()


@pytest.mark.slow
def test_what_is_copied_builds_the_wheel_of_the_whole_tree(tmp_path: Path) -> None:
    needs("hatchling")
    for source, where in copied():
        target = tmp_path / where.strip("/")
        if (release.ROOT / source).is_dir():
            shutil.copytree(release.ROOT / source, target)
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(release.ROOT / source, target)
    release.build(tmp_path / "src", tmp_path / "image", 1_700_000_000, "wheel")
    release.build(release.ROOT, tmp_path / "whole", 1_700_000_000, "wheel")
    release.differing(tmp_path / "image", tmp_path / "whole")
