"""Compiled kernels on disk follow every edit of what they are made of, and damage does no harm."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

import paramserve

HELPER = """
from paramserve.rules.intrinsics import inlined
FACTOR = 2.0
@inlined
def scaled(x):
    return FACTOR * x
"""
KERNEL = """
from __future__ import annotations
from paramserve.rules import doubling
from paramserve.rules.base import Array
from paramserve.rules.kernels import kernel
scaled = doubling.scaled
@kernel
def scale(a: Array) -> None:
    for i in range(a.size):
        a[i] = scaled(a[i])
"""
PROGRAM = """
import sys
import numpy as np
from paramserve.rules import helped
from paramserve.kernel_cache import compiled, load
from paramserve.rules.kernels import typed
wanted = typed(np.dtype(np.float32), helped.scale)
known = compiled(wanted)
load(wanted)
a = np.ones(3, np.float32)
helped.scale(a)
print(a[0], known)
"""
ADDS = """
import numpy as np
from paramserve.kernel_cache import compiled, load
from paramserve.rules import Add, PushInfo, Run
rule, dtype = Add(), np.dtype(np.float32)
wanted = rule.block_kernels(dtype)
known = compiled(wanted)
load(wanted)
a = np.ones(3, np.float32)
push = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)
rule.apply(a, a.copy(), (), rule.hyper(), [Run(0, 3, 0)], push)
print(a[0], known)
"""
ELSEWHERE = """
from paramserve import compilers, kernel_cache
from paramserve.kernel_sets import KernelSet
wanted = KernelSet("codecs", ("BFloat16",))
known = kernel_cache.compiled(wanted.kernels())
with compilers._queue([1, 0]) as queue, compilers._others([wanted], 1, queue):
    pass
print(2.0 if kernel_cache.compiled(wanted.kernels()) else 0.0, known)
"""

ORPHAN = """
import os, sys, time
from paramserve import compilers, kernel_cache
from paramserve.kernel_sets import EVERY_CODEC
pairs = compilers._pairs([EVERY_CODEC])
known = kernel_cache.compiled(EVERY_CODEC.kernels())
with compilers._queue([*range(len(pairs))]) as queue:
    os.dup2(queue.fileno(), 0)
    compilers.take_part(compilers.msgspec.json.encode([EVERY_CODEC]), os.getppid() + 1)
    assert len(queue.read(100)) == 2 * (len(pairs) - 1), "it went on without the one it works for"
print(2.0, known)
"""

FULL = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
{PROGRAM}"""
"""No file can be written, as on a full disk."""
LOADS = f"""{PROGRAM}
assert "numba.np.linalg" not in sys.modules, "Numba's compiler was imported, in 0.3 s"
"""


class Package:
    """A copy of the package, with a kernel whose helper stands in another file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rules = folder, folder / "paramserve" / "rules"
        self.cache = folder / "paramserve" / "__pycache__"

    def run(
        self, program: str = PROGRAM, options: Sequence[str] = (), **environment: str
    ) -> tuple[float, bool]:
        """What the kernel makes of 1, and whether it was compiled for that."""
        code = f"import sys; sys.path.insert(0, {str(self.folder)!r})\n{program}"
        run = subprocess.run(
            [sys.executable, *options, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        number, known = run.stdout.split()
        return float(number), known == "False"

    def edit(self, module: str, old: str, new: str) -> None:
        file = self.rules / f"{module}.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        later = file.stat().st_mtime + 10.0  # Python compares whole seconds, and sizes
        os.utime(file, (later, later))

    def files(self) -> list[Path]:
        return sorted(self.cache.glob("paramserve.rules.helped.scale-*"))


@pytest.fixture(scope="module")
def compiled_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    made = Package(tmp_path_factory.mktemp("compiled"))
    source = Path(paramserve.__file__).parent
    shutil.copytree(
        source, made.rules.parent, ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
    )
    (made.rules / "doubling.py").write_text(HELPER)
    (made.rules / "helped.py").write_text(KERNEL)
    assert made.run() == (2.0, True)
    return made


@pytest.fixture
def package(compiled_package: Package, tmp_path: Path) -> Package:
    shutil.copytree(compiled_package.folder, tmp_path, dirs_exist_ok=True)
    return Package(tmp_path)


def test_kernel_is_compiled_anew_after_every_edit_of_what_it_is_made_of(package: Package) -> None:
    package.edit("registry", "def build(", "# another text\ndef build(")  # no part of it
    assert package.run() == (2.0, False)
    package.edit("doubling", "2.0", "3.0")
    assert package.run() == (3.0, True)
    assert len(package.files()) == 1, "code of the old sources is removed"
    (package.rules / "doubling.py").rename(package.rules / "twice.py")
    package.edit("helped", "doubling", "twice")
    assert package.run() == (3.0, True)


def test_compiled_kernel_is_loaded_without_the_compiler(package: Package) -> None:
    assert package.run(LOADS) == (2.0, False)


def test_kernel_is_found_in_every_folder_that_is_trusted(package: Package, tmp_path: Path) -> None:
    """As in an image, whose user keeps what else is compiled in a folder of its own."""
    own = tmp_path / "own"
    assert package.run(NUMBA_CACHE_DIR=str(own)) == (2.0, False)
    (file,) = package.files()
    file.unlink()
    assert package.run(NUMBA_CACHE_DIR=str(own)) == (2.0, True)
    assert package.files() == [], "it was kept in the first folder that can be written to"
    assert package.run(NUMBA_CACHE_DIR=str(own)) == (2.0, False)


def test_process_that_compiles_ends_with_the_one_that_started_it(package: Package) -> None:
    assert package.run(ORPHAN) == (2.0, True)


def test_another_process_compiles_from_the_queue_and_imports_nothing_from_where_it_was_started(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users may write to a working folder such as /tmp."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("msgspec", "numpy", "paramserve"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w')\n")
    monkeypatch.chdir(here)
    assert package.run(ELSEWHERE, options=["-P"]) == (2.0, True)
    assert package.run(ELSEWHERE, options=["-P"]) == (2.0, False)
    assert not (tmp_path / "taken").exists()


def test_edit_of_a_rules_maths_compiles_its_kernel_anew(package: Package) -> None:
    """The kernel stands in `rules.kernels`, and the maths in the rule's module."""
    assert package.run(ADDS) == (2.0, True)
    package.edit("add", "value[i] += ", "value[i] -= ")
    assert package.run(ADDS) == (0.0, True)


def test_damaged_file_is_compiled_anew(package: Package) -> None:
    (file,) = package.files()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        assert package.run()[0] == 2.0
        assert file.read_bytes()[32:] != damaged[32:], "the next process finds it whole"


class Attack:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_file_that_others_may_write_to_is_not_unpickled(package: Package, tmp_path: Path) -> None:
    (file,) = package.files()
    attack = pickle.dumps(Attack(tmp_path / "attacked"))
    file.write_bytes(sha256(attack).digest() + attack)
    file.chmod(0o666)
    assert package.run()[0] == 2.0
    assert not (tmp_path / "attacked").exists()
    assert package.run() == (2.0, False), "it was replaced"


def test_kernel_is_compiled_where_it_cannot_be_kept(package: Package) -> None:
    (file,) = package.files()
    file.unlink()
    assert package.run(FULL) == (2.0, True)
    assert package.files() == []
    shutil.rmtree(package.cache)
    package.cache.write_text("no folder")
    nowhere = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"), "/dev/null/none")
    assert package.run(**nowhere) == (2.0, True)
