"""Messages: the package gives all of them out, no two look alike, and their form is as it was."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from paramserve import messages
from paramserve.messages import (
    Gradient,
    Hello,
    Message,
    Read,
    ReadTarget,
    Step,
    answers,
    blocks,
    checkpoints,
    coordinator,
    debugging,
    decoder,
    encode,
    leases,
    opening,
    peers,
    requests,
)

PARTS = (
    answers,
    blocks,
    checkpoints,
    coordinator,
    debugging,
    leases,
    opening,
    peers,
    requests,
)
STRUCTS: list[Any] = [
    kind
    for part in PARTS
    for kind in vars(part).values()
    if getattr(kind, "__module__", None) == part.__name__ and hasattr(kind, "__struct_fields__")
]
TAGGED = [kind for kind in STRUCTS if kind.__struct_config__.tag is not None]


def test_structs_of_all_parts_are_given_out_by_the_package() -> None:
    for kind in STRUCTS:
        assert getattr(messages, kind.__name__) is kind
        assert kind.__name__ in messages.__all__


def test_structs_are_frozen_rows() -> None:
    for kind in STRUCTS:
        numbered = kind in (Step, Read)  # a client numbers them in place
        assert kind.__struct_config__.frozen or numbered, kind
        assert kind.__struct_config__.array_like, kind


def test_message_or_decision_is_any_of_what_has_a_tag() -> None:
    assert {*get_args(Message), *get_args(messages.Decision)} == set(TAGGED)
    assert len({kind.__struct_config__.tag for kind in TAGGED}) == len(TAGGED)


def test_message_is_its_tag_and_its_fields_in_order() -> None:
    step = Step(7, 1, 3, True, (Gradient(0, 2, 64, (1,)),), (ReadTarget(0, 2, 128),), base=5)
    row = ["step", 7, 1, 3, True, [[0, 2, 64, [1], None, 0, 0]], [[0, 2, 128, None, 0, [0, 0]]]]
    row += [5, 1.0, False, 0.0, 1.0, None, b"", -1.0, [], None, 0, False]
    assert msgspec.msgpack.decode(encode(step)) == row
    assert decoder(Message).decode(encode(step)) == step


def test_decoder_refuses_messages_that_were_not_meant() -> None:
    with pytest.raises(msgspec.ValidationError, match="hello"):
        decoder(messages.ShardRequest).decode(encode(Hello("client")))
