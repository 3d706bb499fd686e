"""Bugs that error feedback could have, each as a small change of the client's encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from tests.sim.workloads.encoded import EncodedTensors, encoder_of

from paramserve.client import encoding
from paramserve.client.call_frames import Prepared
from paramserve.client.encoding import Encoded, Encoder
from paramserve.core.client_session import ClientSession, Operation
from paramserve.core.partition import Block
from paramserve.messages import Done, ShardRequest


def counted_again_when_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gradient left out is added to the residual once more when it is sent again."""
    to_resend = ClientSession.to_resend

    def again(encoder: Encoder, encoded: Iterable[Encoded]) -> None:
        for each in encoded:
            if each.change is not None:
                encoder._residuals[each.block.id] += each.change

    def counts(session: ClientSession) -> list[ShardRequest]:
        for each in session.unanswered:
            answered: Any = each.operation.on_complete
            for sent in getattr(answered, "args", ()):
                if isinstance(sent, Prepared) and sent.encoded:
                    again(answered.func.__self__.encoder, sent.encoded.values())
        return to_resend(session)

    monkeypatch.setattr(ClientSession, "to_resend", counts)


def kept_on_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual has what a gradient left out that the shard has dropped or skipped."""
    monkeypatch.setattr(encoding, "_applied", lambda reply: isinstance(reply, Done))


def kept_on_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual has what a gradient left out that the shard has refused."""

    def applied(reply: Any) -> bool:
        return not isinstance(reply, Done) or not reply.skipped

    monkeypatch.setattr(encoding, "_applied", applied)


def lost_on_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that was dropped takes all of the residual with it."""
    answered = Encoder.answered

    def loses(encoder: Encoder, encoded: Sequence[Encoded], operation: Operation) -> None:
        answered(encoder, encoded, operation)
        if any(reply.skipped for reply in operation.replies.values()):
            for each in encoded:
                encoder._residuals[each.block.id].fill(0.0)

    monkeypatch.setattr(Encoder, "answered", loses)


def taken_back_on_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one shard has dropped counts as dropped by all."""
    answered = Encoder.answered

    def takes_back(encoder: Encoder, encoded: Sequence[Encoded], operation: Operation) -> None:
        if any(reply.skipped for reply in operation.replies.values()):
            replies, operation.replies = operation.replies, {}
            answered(encoder, encoded, operation)
            operation.replies = replies
        else:
            answered(encoder, encoded, operation)

    monkeypatch.setattr(Encoder, "answered", takes_back)


def taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gradient left out that was not applied is taken from the residual, which never had
    it."""
    not_applied = Encoder._not_applied

    def takes(encoder: Encoder, block: Block, change: Any, low: int, high: int) -> None:
        encoder._residuals[block.id][low:high] -= change[low:high]
        not_applied(encoder, block, change, low, high)

    monkeypatch.setattr(Encoder, "_not_applied", takes)


def inherited_from_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again begins with the residual of the incarnation that died, which
    counts twice then."""
    enter = EncodedTensors.enter

    def inherits(tensors: EncodedTensors, client: Any) -> None:
        enter(tensors, client)
        for other in client.cluster.clients:
            dead = encoder_of(other)
            if other is not client and other.rank == client.rank and dead is not None:
                for number, left in dead._residuals.items():
                    own = client.steps.encoder
                    own._residual_of(dead._blocks[number])[:] = left

    monkeypatch.setattr(EncodedTensors, "enter", inherits)


ALL: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    counted_again_when_sent_again,
    kept_on_a_drop,
    kept_on_a_refusal,
    lost_on_a_drop,
    taken_back_on_all_shards,
    taken_back,
    inherited_from_the_dead,
)
