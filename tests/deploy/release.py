"""Check a release: `make release-check`, or `python -m tests.deploy.release`.

Builds each distribution of the committed tree (paramserve, and those in packages/) twice, in two
folders, and its wheel once more from the unpacked sdist; the bytes must be the same each time. Then
looks at what the archives hold and at their metadata, installs the wheels into fresh virtual
environments outside of the source tree, and runs programs there. What was checked is left in dist/:
upload those files and no others. Publishes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parents[2]
CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}
CACHE_ENDINGS = {".pyc", ".nbc", ".nbi"}
MINUTES_10 = 600.0
TESTS_FROM_SDIST = ("tests/api", "tests/deploy", "-m", "not slow")
"""Tests that read the most files beside the sources."""


class Wrong(Exception):
    """What keeps a tree from being released."""


class Built(NamedTuple):
    """A distribution: its archives, the files of its folder in the repository, its [project]."""

    wheel: Path
    sdist: Path
    files: list[str]
    project: dict[str, Any]


# --- building ---------------------------------------------------------------------------------


def build(source: Path, out: Path, epoch: int, target: str = "") -> None:
    """The archives of a tree, or one kind of them, as `pip` would make them from it."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    run([*command, *(["-t", target] if target else [])], source, SOURCE_DATE_EPOCH=str(epoch))


def exported(commit: str, folder: Path) -> int:
    """Write the tree of a commit, without what is not in it, and return the commit's time."""
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    run(["git", "archive", "--format=tar", f"--output={archive}", commit], ROOT)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    return int(run(["git", "show", "--no-patch", "--format=%ct", commit], ROOT).split()[-1])


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution; where its tree is."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def projects(tree: Path) -> list[Path]:
    """The folders of a tree that a distribution each is built from, that of paramserve first."""
    return [tree, *sorted(each.parent for each in tree.glob("packages/*/pyproject.toml"))]


def built_twice(commit: str, work: Path) -> list[Built]:
    """The distributions of a commit.

    Raises:
        Wrong: two builds differ, or the wheel of an sdist does.
    """
    trees = [work / "one" / "tree", work / "another" / "deeper" / "tree"]
    for tree in trees:
        epoch = exported(commit, tree)
    for path in sorted(trees[1].rglob("*")):  # other times and modes, as in another clone
        os.utime(path, (0, 0))
        if path.is_file():
            path.chmod(path.stat().st_mode & ~0o022)
    made = []
    for number, pair in enumerate(zip(*map(projects, trees), strict=True)):
        # Before a build, which leaves its hook's compiled source there.
        files = [str(path.relative_to(pair[0])) for path in pair[0].rglob("*") if path.is_file()]
        folders = [work / f"first-{number}", work / f"second-{number}"]
        for folder, out in zip(pair, folders, strict=True):
            build(folder, out, epoch)
        differing(*folders)
        (wheel,), (sdist,) = folders[0].glob("*.whl"), folders[0].glob("*.tar.gz")
        again = work / f"from-sdist-{number}"
        build(unpacked(sdist, work / "sdist"), again, epoch, "wheel")
        if digest(again / wheel.name) != digest(wheel):
            raise Wrong(f"the wheel that is built from {sdist.name} is another one")
        project = tomllib.loads((pair[0] / "pyproject.toml").read_text())["project"]
        made.append(Built(wheel, sdist, files, project))
    return made


def differing(first: Path, second: Path) -> None:
    """Refuse two folders whose files are not the same bytes."""
    found = [{each.name: digest(each) for each in folder.iterdir()} for folder in (first, second)]
    if found[0] != found[1]:
        raise Wrong(f"two builds differ: {found[0]} and {found[1]}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- what the archives hold -------------------------------------------------------------------


def held_by_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {each.filename for each in packed.infolist() if not each.is_dir()}


def held_by_sdist(sdist: Path) -> set[str]:
    """Its files, without the folder that they are in."""
    with tarfile.open(sdist) as packed:
        names = [each.name for each in packed.getmembers() if each.isfile()]
    return {name.partition("/")[2] for name in names}


def caches(names: Iterable[str]) -> list[str]:
    """Files that some run has left behind."""
    paths = map(PurePosixPath, names)
    left = (p for p in paths if CACHES.intersection(p.parts) or p.suffix in CACHE_ENDINGS)
    return sorted(map(str, left))


def contents_of_wheel(built: Built) -> None:
    """Refuse a wheel that lacks a file of the package, or has one that is none of it."""
    name, version, _, _ = parse_wheel_filename(built.wheel.name)
    made = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
    made |= {"entry_points.txt"} if "scripts" in built.project else set()
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    package = {each.removeprefix("src/") for each in built.files if each.startswith("src/")}
    expected = package | {f"{info}/{each}" for each in made}
    same(built.wheel.name, held_by_wheel(built.wheel), expected)


def contents_of_sdist(built: Built) -> None:
    """Refuse an sdist that has not all of its folder, or something else. hatchling adds the
    repository's .gitignore."""
    expected = {*built.files, "PKG-INFO", ".gitignore"}
    same(built.sdist.name, held_by_sdist(built.sdist), expected)


def same(archive: str, held: set[str], expected: set[str]) -> None:
    problems = {
        "lacks": sorted(expected - held),
        "should not have": sorted(held - expected),
        "has caches": caches(held),
    }
    told = [f"{problem} {', '.join(names)}" for problem, names in problems.items() if names]
    if told:
        raise Wrong(f"{archive} " + "; ".join(told))


def metadata(built: Built) -> Metadata:
    """The metadata of both archives, valid by the standard and the same in both.

    Raises:
        Wrong: they differ, or something that a package index shows is missing.
    """
    wheel, sdist = built.wheel, built.sdist
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        text = packed.read(name)
    with tarfile.open(sdist) as packed:
        file = packed.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        of_sdist = file.read()
    if text != of_sdist:
        raise Wrong("wheel and sdist have different metadata")
    found = Metadata.from_email(text, validate=True)  # raises on an unknown or malformed field
    needed = ("summary", "description", "license_expression", "license_files", "requires_python")
    lacking = [field for field in needed if not getattr(found, field)]
    if lacking or found.description_content_type != "text/markdown":
        raise Wrong(f"metadata lacks {lacking or 'a description in Markdown'}")
    for kind, version in (
        (wheel, parse_wheel_filename(wheel.name)[1]),
        (sdist, parse_sdist_filename(sdist.name)[1]),
    ):
        if version != found.version:
            raise Wrong(f"{kind.name} is of version {version}, its metadata of {found.version}")
    return found


def in_step(found: Sequence[Metadata]) -> None:
    """Refuse distributions beside paramserve, the first, that are of another version, or would be
    installed with another paramserve."""
    first, *beside = found
    for each in beside:
        needed = [str(requirement) for requirement in each.requires_dist or ()]
        if each.version != first.version or f"{first.name}=={first.version}" not in needed:
            raise Wrong(
                f"{each.name} {each.version} needs {', '.join(needed)}: it must be of version "
                f"{first.version} and need {first.name}=={first.version}"
            )


# --- installing -------------------------------------------------------------------------------


def installed(python: str, requirements: Sequence[str], folder: Path, options: str) -> Path:
    """A new virtual environment with these; its interpreter."""
    run([python, "-m", "venv", str(folder)], folder.parent)
    inside = folder / "bin" / "python"
    pip = [str(inside), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", *shlex.split(options), *requirements], folder.parent)
    run([*pip, "check"], folder.parent)
    return inside


def tried(inside: Path, program: str, folder: Path) -> float:
    """Run a program with the package of an environment, with warnings as errors; in seconds.

    Raises:
        Wrong: it failed, printed nothing, or imported the package from elsewhere.
    """
    folder.mkdir()
    where = "import paramserve, sys; print(paramserve.__file__, sys.version.split()[0])"
    file, version = run([str(inside), "-c", where], folder).split()
    if not Path(file).is_relative_to(inside.parents[1]):
        raise Wrong(f"paramserve was imported from {file}")
    told = run([str(inside.with_name("paramserve")), "--version"], folder)
    (folder / "train.py").write_text(program)
    began = time.monotonic()
    if not run([str(inside), "-W", "error", "train.py"], folder).strip():
        raise Wrong("the program printed nothing")
    took_s = time.monotonic() - began
    print(f"  Python {version}: {told.strip()}; the program ran {took_s:.0f} s")
    return took_s


def simulated(inside: Path, folder: Path) -> None:
    """Run a simulated cluster with the test kit of an environment."""
    run([str(inside), "-c", "from paramserve_testing import replay; replay(seed=7)"], folder)


def planned(inside: Path, folder: Path, *, installed: bool) -> None:
    """Run `paramserve plan` of an environment with the planner, or in one without it.

    Raises:
        Wrong: it failed, or without the planner did not say how to get it.
    """
    command = [str(inside.with_name("paramserve")), "plan", "--workers", "2", "--clocks", "8"]
    try:
        run([*command, "--shards", "1", "--no-search"], folder)
    except Wrong as wrong:
        if installed or "pip install 'paramserve[plan]==" not in str(wrong):
            raise
    else:
        if not installed:
            raise Wrong("paramserve plan runs in an environment without paramserve-plan")


def readme_script(tree: Path) -> str:
    """The first script of the README."""
    found = re.search(r"^```python\n(.*?)^```$", (tree / "README.md").read_text(), re.M | re.S)
    if found is None:
        raise Wrong("the README has no script")
    return found[1]


# --- all of it --------------------------------------------------------------------------------


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command prints. It sees nothing of this process's own packages."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MINUTES_10,
        check=False,
    )
    if done.returncode:
        raise Wrong(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def checked(options: argparse.Namespace, work: Path) -> None:
    step("two builds of the committed tree, and wheels of the sdists")
    built = built_twice(options.commit, work)
    step("what wheels and sdists hold, and their metadata")
    for each in built:
        contents_of_wheel(each)
        contents_of_sdist(each)
    found = [metadata(each) for each in built]
    in_step(found)
    paramserve, *beside = built
    tree = work / "sdist" / paramserve.sdist.name.removesuffix(".tar.gz")
    if options.final and f"## {found[0].version}" not in (tree / "CHANGELOG.md").read_text():
        raise Wrong(f"CHANGELOG.md has no heading '## {found[0].version}'")
    wheels = [str(each.wheel) for each in beside]
    programs: list[tuple[str, list[str], str]] = []
    for python in options.python:
        wanted = [f"{paramserve.wheel}[torch,plan,testing]", *wheels, *shlex.split(options.torch)]
        programs.append((python, wanted, readme_script(tree)))
    for python in options.core:
        programs.append(
            (python, [str(paramserve.wheel)], (tree / "examples" / "vector.py").read_text())
        )
    for number, (python, wanted, program) in enumerate(programs):
        step(f"{python}, an empty environment with {' '.join(wanted).replace(str(work), '')}")
        began = time.monotonic()
        inside = installed(python, wanted, work / f"venv-{number}", options.pip_options)
        print(f"  installed in {time.monotonic() - began:.0f} s")
        tried(inside, program, work / f"run-{number}")
        with_beside = len(wanted) > 1
        planned(inside, work / f"run-{number}", installed=with_beside)
        if with_beside:
            simulated(inside, work / f"run-{number}")
    if not options.no_tests:
        step("tests from the unpacked sdist")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        sources = os.pathsep.join(str(each / "src") for each in projects(tree))
        print(run([*command, *TESTS_FROM_SDIST], tree, PYTHONPATH=sources).splitlines()[-1])
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    step(f"all is well; these were checked, and lie in {dist}")
    for archive in (path for each in built for path in (each.wheel, each.sdist)):
        shutil.copy(archive, dist)
        print(f"  {digest(archive)}  {archive.name}")


def step(text: str, told: Callable[[str], None] = print) -> None:
    told(f"release-check: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="release-check", description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="HEAD", help="what is released (default HEAD)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="run the README's script with this interpreter and torch; repeatable",
    )
    parser.add_argument(
        "--core",
        action="append",
        default=[],
        metavar="PYTHON",
        help="run examples/vector.py with this one, without torch; repeatable",
    )
    parser.add_argument("--torch", default="torch", help="the requirement for torch")
    parser.add_argument("--pip-options", default="", help="such as --index-url")
    parser.add_argument("--final", action="store_true", help="the changelog names the version")
    parser.add_argument("--no-tests", action="store_true", help="run no tests from the sdist")
    options = parser.parse_args(argv)
    dirty = run(["git", "status", "--porcelain"], ROOT).splitlines()
    if dirty:
        step(f"not looked at, as they are not committed: {len(dirty)} changes")
    with tempfile.TemporaryDirectory(prefix="release-check-") as work:
        try:
            checked(options, Path(work))
        except Wrong as wrong:
            step(f"not fit for a release: {wrong}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
