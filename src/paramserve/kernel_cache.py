"""Compiled kernels on disk: found by a hash of the sources that they were compiled from.

Numba's own cache goes by the text of the one file that a kernel stands in, so that an edited helper
in another file leaves old code in use, and it unpickles what it finds before it looks whether it is
current. Here the name of a file tells both, so that what is out of date is never opened.

Imports Numba, which takes 0.2 s: import this lazily.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import llvmlite
import numba
from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys

from paramserve import kernel_folder

Kernel = Callable[..., Any]
Signature = tuple[Any, ...]
"""Numba's types of the arguments."""
Kernels = Mapping[Kernel, Signature]
"""Kernels, and for which arguments each is wanted."""

ROOT = kernel_folder.PACKAGE
VERSIONS = (numba.__version__, llvmlite.__version__)
_DIGEST = sha256().digest_size


def cached(kernel: Any, *modules: str) -> Any:
    """Give a kernel, which is not compiled yet, this cache.

    Args:
        modules: names of the modules that it is made of; all that they import counts as well.
    """
    kernel._cache = KernelCache(kernel.py_func, *modules)
    return kernel


class KernelCache:
    """The code of one kernel, a file for each signature: what Numba's dispatcher asks for it."""

    def __init__(self, function: Kernel, *modules: str) -> None:
        self._stem = f"{function.__module__}.{function.__qualname__}"
        self._modules = modules

    @property
    def cache_path(self) -> Path | None:
        """The folder that code is kept in; None: no folder can be used, and nothing is kept."""
        return kernel_folder.choose().folder

    def has(self, signature: Signature, codegen: Any) -> bool:
        """Whether the code for these arguments and this processor is compiled."""
        name = self._file_name(signature, codegen)
        return any((folder / name).is_file() for folder in kernel_folder.choose().trusted)

    def _file_name(self, signature: Signature, codegen: Any) -> str:
        target = _hash(
            *map(str, (*signature, *codegen.magic_tuple(), sys.implementation.cache_tag))
        )
        return f"{self._stem}-{target}-{stamp(*self._modules)}.nbc"

    def load_overload(self, signature: Signature, target: Any) -> Any:
        """The compiled code, or None: there is none, or its file is damaged or another user's."""
        # Numba's own cache calls `target.refresh()` here, which imports all that Numba can compile,
        # and scipy.linalg, in 0.3 s. What is compiled already needs the runtime's symbols only.
        rtsys.initialize(target)
        name = self._file_name(signature, target.codegen())
        for folder in kernel_folder.choose().trusted:
            content = kernel_folder.read(folder / name) or b""
            digest, data = content[:_DIGEST], content[_DIGEST:]
            if sha256(data).digest() == digest:
                rebuild: Any = CompileResult._rebuild
                return rebuild(target, *pickle.loads(data))
        return None

    def save_overload(self, signature: Signature, compiled: Any) -> None:
        """Write the compiled code in one step, and remove that of other sources. Where that fails,
        as on a full disk, the next process compiles again."""
        folder = self.cache_path
        if folder is None or compiled.library.has_dynamic_globals:  # addresses of this process
            return
        file = folder / self._file_name(signature, compiled.codegen)
        to_bytes: Any = serialize.dumps
        data = to_bytes(compiled._reduce())
        with contextlib.suppress(OSError):
            _replace(file, sha256(data).digest() + data)
            stem = file.name.rpartition("-")[0]
            for old in file.parent.glob(f"{stem}-*.nbc"):
                if old != file:
                    old.unlink(missing_ok=True)


def _replace(file: Path, content: bytes) -> None:
    """Write a file in one step, which only this user may write to."""
    new = file.with_suffix(f".{uuid4().hex}.tmp")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as opened:
            opened.write(content)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)


@cache
def stamp(*modules: str) -> str:
    """A hash of the sources of these modules and of all of this package that they import."""
    digests: dict[str, str] = {}
    for module in modules:
        _collect(module, digests)
    return _hash(*VERSIONS, *(text for item in sorted(digests.items()) for text in item))


def _collect(module: str, digests: dict[str, str]) -> None:
    if module not in digests:
        digests[module], imported = _source(module)
        for each in imported:
            _collect(each, digests)


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]]:
    """A module's digest, and the modules of this package that it imports."""
    text = _file(module).read_bytes()
    imported: set[str] = set()
    for node in _statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported.add(inner if _is_module(inner) else node.module)
    return sha256(text).hexdigest(), tuple(each for each in imported if _is_module(each))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside a node that run, at any depth: expressions, most of a tree, have none,
    and imports for type checkers do not run."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.expr) or _is_for_types(child)):
            yield child
            yield from _statements(child)


def _is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    return name.partition(".")[0] == __package__ and _file(name).is_file()


def _hash(*texts: str) -> str:
    return sha256("\0".join(texts).encode()).hexdigest()[:16]


# --- loading -----------------------------------------------------------------------------------


def compiled(kernels: Kernels) -> bool:
    """Whether all of these kernels are loaded or lie in the cache, so that `load` is quick."""
    return all(_is_loaded(*each) or _is_cached(*each) for each in kernels.items())


def load(kernels: Kernels) -> None:
    """Load kernels for just these arguments, or compile them; any others are a `TypeError` then.
    Repeating costs nothing."""
    for kernel, types in kernels.items():
        if not _is_loaded(kernel, types):
            dispatcher: Any = kernel
            dispatcher.disable_compile(False)
            dispatcher.compile(types)
            dispatcher.disable_compile()


def _is_loaded(kernel: Kernel, types: Signature) -> bool:
    dispatcher: Any = kernel
    return types in dispatcher.overloads


def _is_cached(kernel: Kernel, types: Signature) -> bool:
    dispatcher: Any = kernel
    cached: KernelCache = dispatcher._cache
    return cached.has(types, dispatcher.targetctx.codegen())
