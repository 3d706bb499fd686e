"""Bugs that the client's shipping exchange and session could have, each as a small change there."""

from __future__ import annotations

from typing import Any

import pytest

from paramserve.client.exchange import Exchange
from paramserve.client.links import Links, ReachedShard
from paramserve.core.client_session import ClientSession, PendingRequest
from paramserve.messages import Done, Refused, ShardRequest
from paramserve_testing.link import VirtualLink


def sent_again_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest unanswered request goes first on a new connection."""
    to_resend = ClientSession.to_resend

    def reversed_order(session: ClientSession) -> list[ShardRequest]:
        return to_resend(session)[::-1]

    monkeypatch.setattr(ClientSession, "to_resend", reversed_order)


def nothing_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection begins with the next request."""
    monkeypatch.setattr(ClientSession, "to_resend", lambda session: [])


def broken_link_looked_at_only_when_something_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards whose link is down are left out where the client waits for sockets."""
    ready = Links._ready

    def without_down(links: Links, timeout_s: float) -> list[ReachedShard]:
        down, links._down = links._down, set()
        try:
            return ready(links, timeout_s)
        finally:
            links._down |= down

    monkeypatch.setattr(Links, "_ready", without_down)


def given_up_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that does not answer a hello in time is lost, and the cluster with it."""
    monkeypatch.setattr(Exchange, "_may_answer", lambda *args: False)


def answer_taken_for_the_oldest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are matched by their order instead of their number."""

    def oldest(session: ClientSession, seq: int) -> PendingRequest | None:
        return session.unanswered[0] if session.unanswered else None

    monkeypatch.setattr(ClientSession, "pending_for", oldest)


def numbered_anew_when_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is sent again gets a new number, so that both are executed."""

    def renumbered(session: ClientSession) -> list[ShardRequest]:
        from msgspec import structs

        for each in session.unanswered:
            session.last += 1
            each.message = structs.replace(each.message, seq=session.last)
        return [each.message for each in session.unanswered]

    monkeypatch.setattr(ClientSession, "to_resend", renumbered)


def payload_of_a_repeated_answer_left_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows an answer that was taken before is neither read nor skipped."""
    monkeypatch.setattr(VirtualLink, "skip_payload", lambda link: None)


def refusal_taken_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request counts as done."""
    on_reply = ClientSession.on_reply

    def blind(session: ClientSession, reply: Done | Refused) -> PendingRequest | None:
        return on_reply(session, Done(reply.seq) if isinstance(reply, Refused) else reply)

    monkeypatch.setattr(ClientSession, "on_reply", blind)


def interrupted_links_used_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted call has left unsent is not sent again."""
    check = Exchange._check

    def forgets(exchange: Exchange) -> None:
        exchange._shards_being_sent.clear()
        check(exchange)

    monkeypatch.setattr(Exchange, "_check", forgets)


def interrupted_call_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a call that is interrupted are dropped, though some were sent."""
    submit = Exchange.submit_together

    def drops(exchange: Exchange, *args: Any) -> None:
        try:
            submit(exchange, *args)
        except KeyboardInterrupt:
            for shard in exchange.shards:
                if shard.session.unanswered:
                    shard.session.unanswered.pop()
            raise

    monkeypatch.setattr(Exchange, "submit_together", drops)


ALL = (
    sent_again_in_the_wrong_order,
    nothing_sent_again,
    broken_link_looked_at_only_when_something_else_comes,
    given_up_at_the_first_failure,
    answer_taken_for_the_oldest_request,
    numbered_anew_when_sent_again,
    payload_of_a_repeated_answer_left_unread,
    refusal_taken_for_success,
    interrupted_links_used_on,
    interrupted_call_forgotten,
)
