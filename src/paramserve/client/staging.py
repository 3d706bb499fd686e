"""What is pushed to groups whose policy collects, until their ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserve.client.step_parts import Filling
from paramserve.client.ticket import Ticket
from paramserve.core.client_session import Operation
from paramserve.errors import ParamServeError

if TYPE_CHECKING:
    from paramserve.client.rows import CheckedRows


@dataclass
class Staged:
    """What was pushed to a group whose policy collects, since its last tick."""

    weight: float | None = None
    """What was said of the step."""
    gradients: dict[int, Filling] = field(default_factory=dict)
    """Gradients by block."""
    rows: list[CheckedRows] = field(default_factory=list)
    """Rows, where the group is a table."""
    tickets: list[Ticket] = field(default_factory=list)


NOTHING_STAGED = Staged()
"""Not to be changed."""


class Staging(dict[str, Staged]):
    """Pushes by group that wait for its tick."""

    def check_same_weight(self, group: str, weight: float | None) -> None:
        """Refuse another weight than was said before of a group's step under way."""
        existing = self[group].weight if group in self else None
        if weight is not None and existing is not None and weight != existing:
            raise ValueError(
                f"the step of group {group!r} under way has the weight {existing}, now {weight} "
                "came: a step has one weight; give it with one push, or with tick"
            )

    def unapplied(self) -> str:
        """What waits for a tick that has not come, in words; empty: nothing does."""
        texts = []
        for group, staged in self.items():
            names = {
                piece.name
                for filling in staged.gradients.values()
                for index, piece in enumerate(filling.block.pieces)
                if index in filling.staged
            }
            which = f" ({', '.join(map(repr, sorted(names)))})" if names else ""
            texts.append(f"{len(staged.tickets)} to group {group!r}{which}")
        return ", ".join(texts)


def fail_staged(group: str, tickets: Sequence[Ticket], why: BaseException) -> None:
    """Have the tickets of pushes say that their step was not sent; those of the next step do
    not."""
    if not isinstance(why, ParamServeError):
        why = ParamServeError(
            f"the step of group {group!r} was not sent: {type(why).__name__}: {why}",
            fix="fix the rejected argument and push these gradients again",
        )
    operation = Operation(1)
    operation.failed(why)
    for ticket in tickets:
        if ticket.operation is None:  # else the step was on its way when this call was interrupted
            ticket.operation = operation
