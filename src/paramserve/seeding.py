"""Seeds Python's, numpy's and torch's global generators of one worker, without importing torch.

Torch takes more than a second to import, and a training function need not use it. If it has been
imported by then it is seeded at once; else right after its import, by a finder that waits for
exactly that one module and then takes itself out.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import msgspec
import numpy as np


def rank_seed(seed: int, rank: int) -> int:
    """A 64-bit seed for one rank: well mixed, so that neighbours share nothing."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


def seed_everything(seed: int) -> None:
    """Seed `random`, `numpy.random` and, now or when it is imported, torch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    else:
        sys.meta_path.insert(0, _SeedsTorch(seed))


def state() -> bytes:
    """What the three generators (torch's of the CPU) go on from."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    torch = sys.modules.get("torch")
    parts = (
        (version, np.array(words, np.uint32).tobytes(), gauss),
        (kind, np.asarray(keys, np.uint32).tobytes(), int(position), int(has_gauss), float(cached)),
        torch.get_rng_state().numpy().tobytes() if torch is not None else None,
    )
    return msgspec.msgpack.encode(parts)


def restore(packed: bytes) -> None:
    """Let the generators go on from what `state` gave in another process."""
    python, legacy, words = msgspec.msgpack.decode(packed, type=_State)
    version, mine, gauss = python
    random.setstate((version, tuple(np.frombuffer(mine, np.uint32).tolist()), gauss))
    kind, keys, *rest = legacy
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch = sys.modules.get("torch")
    if torch is not None and words is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(words), dtype=torch.uint8))


_State = tuple[tuple[int, bytes, float | None], tuple[str, bytes, int, int, float], bytes | None]


class _SeedsTorch(MetaPathFinder):
    """Finds torch as the other finders do, and seeds it once it is complete."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _SeedingLoader(spec.loader, self._seed)
        return spec


class _SeedingLoader(Loader):
    def __init__(self, loader: Loader, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self._loader
        self._loader.exec_module(module)
        module.manual_seed(self._seed)
