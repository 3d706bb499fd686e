"""Codecs by name: what a codec is on the wire, and which codecs are built from that."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from paramserve.codecs.base import Codec, Feedback
from paramserve.codecs.built_in import BFloat16, Float16, Int2, Int4, Int8, Sign
from paramserve.codecs.custom import CustomCodec
from paramserve.codecs.delta import Delta
from paramserve.codecs.low_rank import PowerSGD
from paramserve.codecs.sparse import Chain, RandomK, TopK
from paramserve.config import CodecSpec
from paramserve.errors import UnknownCodec
from paramserve.rules.registry import check_frozen, check_signature

_KINDS: tuple[type[Codec], ...] = (
    *(BFloat16, Float16, Int8, Int4, Int2, Sign),
    *(TopK, RandomK, PowerSGD),
)
BUILT_IN: Mapping[str, type[Codec]] = MappingProxyType(
    {kind.__name__: kind for kind in _KINDS} | {Delta.__name__: Delta}
)
CHAIN = Chain.__name__
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {CHAIN: ("first", "second"), Delta.__name__: ("codec",)}
)
"""The fields that are codecs, of those that are made of others."""
_PARTS = {part for parts in PARTS.values() for part in parts}
MADE_OF: Mapping[str, type[Codec]] = MappingProxyType({CHAIN: Chain, Delta.__name__: Delta})
NONE: Mapping[str, type[Codec]] = MappingProxyType({})

Option = int | float | str | bool

FEEDBACK = "feedback_"
"""Begins the names of the options that are of a codec's `Feedback`."""


def as_codec(codec: object, what: str) -> Codec:
    """A codec as a user gave it.

    Args:
        what: the argument's name.
    Raises:
        TypeError: it is none, or of a class that servers could not build.
    """
    if isinstance(codec, Codec):
        own_classes(codec, f"{what}=")
        return codec
    if isinstance(codec, type) and issubclass(codec, Codec):
        name = f"ps.{codec.__name__}" if codec in BUILT_IN.values() else codec.__name__
        inner = "ps.Int4()" if codec is Delta else ""
        raise TypeError(f"{what} takes an object: write {what}={name}({inner})")
    choices = ", ".join(f"ps.{kind.__name__}()" for kind in _KINDS)
    raise TypeError(f"{what} takes a codec, one of {choices}, not {codec!r}")


def parts_of(codec: Codec) -> tuple[Codec, ...]:
    """The two of a chain, those of `Delta`'s codec; else the codec alone."""
    if isinstance(codec, Delta):
        return (codec, *parts_of(codec.codec))
    return (codec.first, codec.second) if isinstance(codec, Chain) else (codec,)


def names_in(described: CodecSpec) -> Iterator[str]:
    """The name of a codec, and of each that it is made of."""
    yield described.name
    for option, value in described.options.items():
        if option.rpartition(".")[2] in _PARTS and isinstance(value, str):
            yield value


def is_built_in(codec: Codec) -> bool:
    """Whether a codec is one of ours, which needs no guard."""
    return all(type(each) in BUILT_IN.values() for each in parts_of(codec))


def own_classes(codec: Codec, option: str) -> Mapping[str, type[Codec]]:
    """The classes in a codec that are not built in, by name.

    Args:
        option: where it was given, for messages.
    Raises:
        TypeError: one cannot be registered.
    """
    kinds = [type(each) for each in parts_of(codec)]
    return check_registered([each for each in kinds if each not in BUILT_IN.values()], option)


def spec(codec: Codec) -> CodecSpec:
    """Describe a codec: its name, and its fields as options, those of its feedback beside them; of
    a chain, or `Delta`, each part's name, and its fields behind a dot ("first.ratio").

    Raises:
        TypeError: a field is no number, bool or str.
    """
    options: dict[str, Option] = {}
    for each in fields(codec):
        value = getattr(codec, each.name)
        if isinstance(value, Codec) and isinstance(codec, Chain | Delta):
            options[each.name] = value.name
            options |= {f"{each.name}.{key}": it for key, it in spec(value).options.items()}
        elif isinstance(value, Feedback):
            options[each.name] = True
            options[FEEDBACK + "decay"] = float(value.decay)
            if value.clip_norm is not None:
                options[FEEDBACK + "clip_norm"] = float(value.clip_norm)
        elif isinstance(value, bool | int | float | str):
            options[each.name] = value
        else:
            raise TypeError(
                f"{each.name} of {codec.name} has to be a number, bool or str to travel to "
                f"servers, not {value!r}"
            )
    return CodecSpec(codec.name, options)


def build(described: CodecSpec, registered: Mapping[str, type[Codec]] = NONE) -> Codec:
    """Make the codec that `spec` described.

    Args:
        described: may come from a peer: only known classes are called, with their own options. A
            chain is of two codecs, neither of them a chain, and the codec of a `Delta` is none.
        registered: classes by name, from the owner of this process. They replace nothing that is
            built in.
    Raises:
        UnknownCodec: no codec has this name.
        ValueError: the codec does not take these options.
    """
    if described.name in MADE_OF:
        return _made_of(described, registered)
    kind: Any = BUILT_IN.get(described.name) or registered.get(described.name)
    if kind is None:
        names = ", ".join((*BUILT_IN, *sorted(registered)))
        name = described.name
        raise UnknownCodec(
            f"no codec is called {name!r} here, known are {names}",
            fix=f"start the servers with rules=[{name}] (paramserve run and serve: --rules "
            f"module:{name}), and define the parameters with it on each client that steps them",
        )
    return _construct(kind, described.name, described.options)


def _construct(kind: Any, name: str, options: Mapping[str, Any]) -> Codec:
    try:
        own = dict(options)
        bounds = {
            each.removeprefix(FEEDBACK): own.pop(each)
            for each in options
            if each.startswith(FEEDBACK)
        }
        if bounds:
            own["feedback"] = Feedback(**bounds)
        codec: Codec = kind(**own)
        Codec.__post_init__(codec)
    except (Exception, SystemExit) as wrong:  # a user's class may raise anything
        raise ValueError(f"{name} does not take {dict(options)}: {wrong}") from wrong
    return codec


def _made_of(described: CodecSpec, registered: Mapping[str, type[Codec]]) -> Codec:
    own: dict[str, Any] = {}
    parts = PARTS[described.name]
    inner: dict[str, dict[str, Option]] = {part: {} for part in parts}
    for name, value in described.options.items():
        part, dot, option = name.partition(".")
        (inner[part] if dot and part in inner else own)[option if dot else name] = value
    for part in parts:
        named = own.get(part)
        if not isinstance(named, str) or named in (described.name, Delta.__name__):
            what = described.name.lower()
            raise ValueError(f"a {what}'s {part} is the name of a codec, and not {named!r}")
        own[part] = build(CodecSpec(named, inner[part]), registered)
    return _construct(MADE_OF[described.name], described.name, own)


# --- registration ----------------------------------------------------------------------------

_METHODS = ("size", "encode", "decode")


def check_registered(classes: Iterable[Any], option: str = "rules=") -> Mapping[str, type[Codec]]:
    """The codecs that an owner of servers registers, by name.

    Args:
        classes: subclasses of `CustomCodec`.
        option: where they were given, for messages.
    Raises:
        TypeError: one of them cannot be a codec, or two have one name; the text says what to do.
    """
    codecs: dict[str, type[Codec]] = {}
    for kind in classes:
        if kind in BUILT_IN.values():
            raise TypeError(f"{option}: {kind.__name__!r} is built in: leave it out")
        if not (isinstance(kind, type) and issubclass(kind, CustomCodec)):
            raise TypeError(f"{option} takes classes that derive from ps.CustomCodec, not {kind!r}")
        name = kind.__name__
        where = f"{option}: {kind.__qualname__}"
        check_frozen(where, kind)
        if inspect.isabstract(kind):
            lacks = [each for each in _METHODS if each in kind.__abstractmethods__]
            raise TypeError(f"{where} has no {', '.join(lacks)}: define each, see ps.CustomCodec")
        for method in _METHODS:
            signature = inspect.signature(getattr(Codec, method))
            count = len(signature.parameters) - 1
            check_signature(where, kind, method, str(signature), count)
        if name in BUILT_IN or name == CHAIN:
            raise TypeError(f"{option}: {name!r} is the name of a built-in codec: rename the class")
        if codecs.setdefault(name, kind) is not kind:
            raise TypeError(f"{option}: two codecs are called {name!r}: rename one")
    return MappingProxyType(codecs)
