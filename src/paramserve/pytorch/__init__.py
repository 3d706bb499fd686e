"""What a worker gives a PyTorch training function: its optimizer, its loader, and the modules whose
rows are in keyed tables.

The only package here whose modules import torch at their top; nothing above imports them before
a training function asks for them. `Embedding` and its like are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramserve.pytorch.embedding import Embedding as Embedding
    from paramserve.pytorch.embedding import EmbeddingBag as EmbeddingBag
    from paramserve.pytorch.taking_over import from_embedding as from_embedding

_WHERE = {
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "from_embedding": "taking_over",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'paramserve.pytorch' has no attribute {name!r}")
    value = getattr(import_module(f"paramserve.pytorch.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
