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
    from paramserve.pytorch.embedding import from_embedding as from_embedding

__all__ = ["Embedding", "EmbeddingBag", "from_embedding"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paramserve.pytorch' has no attribute {name!r}")
    from paramserve.pytorch import embedding

    value = getattr(embedding, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
