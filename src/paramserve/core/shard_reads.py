"""Reads of one shard's clients, which have no number: when each is answered.

A read is answered behind the requests that its client has sent before it, and when its group's
policy admits it; until then it waits in its session, and holds up nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import structs

from paramserve.core.group import GroupMachine
from paramserve.core.shard_sessions import Answer, ReadRequest, Sessions, ShardSession
from paramserve.errors import ParamServeError
from paramserve.messages import Refused, ShardRequest, Values

Replies = list[tuple[int, Answer]]


class ShardReads:
    """The reads of all sessions.

    Args:
        group: gives the group of a number, or raises `UnknownName`.
        refuse: makes a refusal of what was raised for a request.
    """

    def __init__(
        self,
        sessions: Sessions,
        group: Callable[[int], GroupMachine],
        refuse: Callable[[ShardRequest, Exception], Refused],
    ) -> None:
        self._sessions = sessions
        self._group = group
        self._refuse = refuse

    def come(
        self, session: ShardSession, request: ReadRequest, now: float, replies: Replies
    ) -> bool:
        """A read has come; False: what was sent before it has not, or too many wait. As `answer`,
        but that what the network has repeated is left out."""
        message = request.message
        if message.behind > session.last or len(session.reads) >= session.requests:
            return False
        if message.seq > session.last_read:
            session.last_read = message.seq
            self.answer(session, request, now, replies)
        return True

    def answer(
        self, session: ShardSession, request: ReadRequest, now: float, replies: Replies
    ) -> None:
        """Answer a read, or keep it until it may be answered.

        Args:
            replies: gets the client and the answer.
        """
        message, answer = request.message, None
        try:
            if session.fenced_by is not None:
                raise session.fenced()
            idle = session.held is None and not session.queue
            if idle or session.has_answered(message.behind):
                answer = self._group(message.group).read(session, request, now)
        except (ParamServeError, ValueError, TypeError, MemoryError) as error:
            answer = Answer(structs.replace(self._refuse(message, error), applied="no"))
        if answer is None:
            session.reads.append(request)
            return
        if session.rank in self._sessions.retiring and type(answer.message) is Values:
            answer = structs.replace(answer, message=structs.replace(answer.message, retire=True))
        replies.append((session.client, answer))

    def answer_waiting(self, session: ShardSession, now: float, replies: Replies) -> None:
        """Try again what a session waits to read; as `answer`."""
        reads, session.reads = session.reads, deque()
        for request in reads:
            self.answer(session, request, now, replies)
