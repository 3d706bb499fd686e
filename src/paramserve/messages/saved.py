"""What a worker saves for its next incarnation: sent with its steps, read with a report."""

from __future__ import annotations

from msgspec import Struct

SAVED_BYTES_MAX = 8 << 20
"""Most bytes that one worker has saved: a header carries them."""
SAVED_NAMES_MAX = 64
"""Most names under which one worker saves."""


class Saved(Struct, frozen=True, array_like=True):
    """What a worker saved under a name, as `checkpoint.plain` packs it. Of two of one name that
    with the higher number was saved later, by whichever incarnation of the rank."""

    name: str
    number: int
    data: bytes


class SavedAt(Struct, frozen=True, array_like=True):
    """All that a worker has saved in a group, as of its step of a clock."""

    clock: int
    values: tuple[Saved, ...]
