"""Which codec each parameter of an adopted optimizer has, by patterns over the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from paramserve.codecs.base import Codec
from paramserve.codecs.registry import as_codec
from paramserve.pytorch.block import Layout

Codecs = Codec | Mapping[str, Codec | None]
"""One for all parameters, or by pattern."""
NAMED_MAX = 5
"""Names in an error."""


@dataclass(frozen=True)
class CodecsByName:
    """Codecs by pattern (`fnmatch`), in order: the first that matches a name counts.

    Attributes:
        what: the argument's name, for errors.
        patterns: None: what matches is sent as it is, like what no pattern matches.
    """

    what: str
    patterns: tuple[tuple[str, Codec | None], ...]

    @classmethod
    def of(cls, codecs: Codecs | None, what: str) -> CodecsByName:
        """Codecs by name, from a user's argument.

        Raises:
            TypeError: a pattern is no str, or what stands for it no codec.
        """
        if codecs is None:
            return cls(what, ())
        if not isinstance(codecs, Mapping):
            return cls(what, (("*", as_codec(codecs, what)),))
        for pattern, codec in codecs.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{what} has codecs by names' patterns, as '*.weight': {pattern!r}")
            if codec is not None:
                as_codec(codec, f"{what}[{pattern!r}]")
        return cls(what, tuple(codecs.items()))

    def find(self, name: str) -> Codec | None:
        """The codec of a parameter; None: it is sent as it is."""
        at = self._first(name)
        return None if at is None else self.patterns[at][1]

    def check(self, names: Sequence[str]) -> None:
        """Refuse patterns that no name needs.

        Args:
            names: of the optimizer's parameters; none: it has only tables.
        Raises:
            ValueError: a pattern matches no name, or those before it match all that it does.
        """
        if not names:
            return
        needed = {self._first(name) for name in names}
        for at, (pattern, _) in enumerate(self.patterns):
            if at in needed:
                continue
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if matched:
                raise ValueError(
                    f"{self.what}={{{pattern!r}: ...}} counts for no parameter: the first pattern "
                    f"counts that matches, and one before it does for {_names_text(matched)}. Put "
                    "it before that one"
                )
            raise ValueError(
                f"{self.what}={{{pattern!r}: ...}} matches no parameter of the optimizer; it has "
                f"{_names_text(names)}"
            )

    def _first(self, name: str) -> int | None:
        """The number of the first pattern that matches."""
        matches = (i for i, (pattern, _) in enumerate(self.patterns) if fnmatchcase(name, pattern))
        return next(matches, None)


def _names_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if names[NAMED_MAX:] else ""
    return ", ".join(map(repr, names[:NAMED_MAX])) + more


def split_by_codec(
    layouts: Iterable[Layout], push: CodecsByName, pull: CodecsByName
) -> list[Layout]:
    """Blocks to be, each of parameters with the same two codecs, in the order of the first one."""
    split = []
    for layout in layouts:
        parts: dict[tuple[Codec | None, Codec | None], list[str]] = {}
        for name in layout.names:
            parts.setdefault((push.find(name), pull.find(name)), []).append(name)
        for codecs, names in parts.items():
            split.append(layout.only(names)._replace(push=codecs[0], pull=codecs[1]))
    return split
