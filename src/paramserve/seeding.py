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
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import msgspec
import numpy as np

from paramserve.checkpoint.plain import dump, load
from paramserve.errors import warn_user


def rank_seed(seed: int, rank: int) -> int:
    """A 64-bit seed for one rank: well mixed, so that neighbours share nothing."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


def seed_everything(seed: int) -> None:
    """Seed `random`, `numpy.random` and, now or when it is imported, torch."""
    random.seed(seed)
    kind = type(np.random.mtrand.get_bit_generator())
    if kind is np.random.MT19937:
        np.random.seed(seed & 0xFFFFFFFF)
    elif getattr(np.random, kind.__name__, None) is kind:
        np.random.mtrand.set_bit_generator(kind(seed))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    else:
        sys.meta_path.insert(0, _SeedsTorch(seed))


def state() -> bytes:
    """What the three generators (torch's of the CPU) go on from."""
    version, words, gauss = random.getstate()
    torch = sys.modules.get("torch")
    parts = (
        (version, np.array(words, np.uint32).tobytes(), gauss),
        _of_numpy(),
        torch.get_rng_state().numpy().tobytes() if torch is not None else None,
    )
    return msgspec.msgpack.encode(parts)


def _of_numpy() -> _Twister | bytes | None:
    """State of numpy's global generator, which may be any (`numpy.random.set_bit_generator`); None:
    it cannot be read."""
    try:
        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != TWISTER:
            return dump(state, "the state of numpy's generator")
    except Exception as error:  # a generator of the user's
        _left_out(f"its state cannot be stored: {type(error).__name__}: {error}")
        return None
    key, position = state["state"]["key"], int(state["state"]["pos"])
    return TWISTER, key.tobytes(), position, int(state["has_gauss"]), float(state["gauss"])


def restore(packed: bytes) -> None:
    """Let the generators go on from what `state` gave in another process."""
    python, numpy, words = msgspec.msgpack.decode(packed, type=_State)
    version, mine, gauss = python
    random.setstate((version, tuple(np.frombuffer(mine, np.uint32).tolist()), gauss))
    if numpy is not None:
        _restore_numpy(numpy)
    torch = sys.modules.get("torch")
    if torch is not None and words is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(words), dtype=torch.uint8))


def _restore_numpy(saved: _Twister | bytes) -> None:
    if isinstance(saved, bytes):
        state = load(saved)
    else:
        kind, key, position, has_gauss, gauss = saved
        words = {"key": np.frombuffer(key, np.uint32), "pos": position}
        state = {"bit_generator": kind, "state": words, "has_gauss": has_gauss, "gauss": gauss}
    try:
        if np.random.get_state(legacy=False)["bit_generator"] != state["bit_generator"]:
            # The function may take it later; then the state is restored once more.
            generator = _generator(state["bit_generator"])
            generator.state = state
            np.random.mtrand.set_bit_generator(generator)
        np.random.set_state(state)
    except Exception as error:  # a generator of the user's
        _left_out(f"it does not take the state that was saved: {type(error).__name__}: {error}")


def _generator(name: str) -> np.random.BitGenerator:
    """A new one of numpy's own. Raises `ValueError`: it is none of these."""
    kind = getattr(np.random, name, None)
    if not isinstance(kind, type) or not issubclass(kind, np.random.BitGenerator):
        raise ValueError(f"numpy has no generator {name!r}")
    return kind()


@cache
def _left_out(why: str) -> None:
    """Say once that numpy's generator does not go on where it was."""
    warn_user(
        f"numpy's global generator does not go on where it was after a restart, {why}. To fix: "
        "use one of numpy's own, or keep its state by worker.save"
    )


TWISTER = "MT19937"
"""Numpy's generator where the user has chosen no other."""
_Twister = tuple[str, bytes, int, int, float]
_State = tuple[tuple[int, bytes, float | None], _Twister | bytes | None, bytes | None]


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
