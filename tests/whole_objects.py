"""A file system of fsspec that can do what an object store can, over a folder of this machine.

Objects are put, read and removed as a whole; there are no folders but the beginnings of names, no
rename, and listings are kept until they are said to be old. Its errors are of its own kind.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

PROTOCOL = "whole"
USER = "ann:s3cret"


class NoAnswer(Exception):
    """Error as the library of a store raises it."""


class _Put(io.BytesIO):
    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    def close(self) -> None:
        data = None if self.closed else self.getvalue()
        super().close()  # first: what failed is not put again when it is collected
        if data is not None:
            self._put(data)


class WholeObjects(AbstractFileSystem):
    """`whole://ann:s3cret@bucket/tmp/x` has the objects of the folder /tmp/x.

    Attributes:
        fail: asked at each call, with its name and path.
    """

    protocol = PROTOCOL
    fail: ClassVar[Callable[[str, str], Exception | None]] = staticmethod(lambda call, path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{PROTOCOL}://").removeprefix(f"{USER}@").rstrip("/")

    def _place(self, call: str, path: str) -> Path:
        failed = type(self).fail(call, path)
        if failed is not None:
            raise failed
        bucket, _, rest = path.partition("/")
        if bucket != "bucket":
            raise FileNotFoundError(f"no bucket {bucket}")
        return Path("/", rest)

    def mkdir(self, path: str, create_parents: bool = True, **more: Any) -> None:
        assert not create_parents, "it makes the bucket, too"
        raise PermissionError("only for the owner of the bucket")

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            place = self._place("ls", path)
            if not place.exists():
                raise FileNotFoundError(path)
            self.dircache[path] = [
                {
                    "name": f"{path}/{each.name}",
                    "size": each.stat().st_size if each.is_file() else 0,
                    "type": "file" if each.is_file() else "directory",
                }
                for each in sorted(place.iterdir())
                if each.suffix != ".part"
            ]
        return self.dircache[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **more: Any
    ) -> bytes:
        return self._place("get", path).read_bytes()[start:end]

    def _open(self, path: str, mode: str = "rb", **more: Any) -> io.BytesIO:
        assert mode == "wb"
        return _Put(lambda data: self._put(path, data))

    def _put(self, path: str, data: bytes) -> None:
        place = self._place("put", path)
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(place.name + ".part")
        part.write_bytes(data)
        part.replace(place)

    def rm_file(self, path: str) -> None:
        place = self._place("rm", path)
        place.unlink()
        while not os.listdir(place.parent):  # a folder is there as long as an object is in it
            place = place.parent
            place.rmdir()

    def rmdir(self, path: str) -> None:
        raise NoAnswer("there are no folders")


def url_of(folder: Path, user: str = "") -> str:
    return f"{PROTOCOL}://{user}bucket{folder}"


def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let this process know the file system, and those that it starts: to them it is one of an
    installed package."""
    fsspec.register_implementation(PROTOCOL, WholeObjects, clobber=True)
    told = tmp_path / "installed" / "whole_objects-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: whole-objects\nVersion: 1.0\n")
    entry = f"{PROTOCOL}={__name__}:{WholeObjects.__name__}"
    (told / "entry_points.txt").write_text(f"[fsspec.specs]\n{entry}\n")
    monkeypatch.syspath_prepend(told.parent)
