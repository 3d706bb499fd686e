"""How checkers write what they have found: parts, calls, rows and pushes."""

from __future__ import annotations

from paramserve_testing.history import Call, Part, Row


def push_numbers(found: int, text: str) -> list[str]:
    if not found:
        return []
    return [
        f"{text}: push {', '.join(str(k) for k in range(found.bit_length()) if found >> k & 1)}"
    ]


def part_name(part: Part) -> str:
    return f"block {part.block} on shard {part.shard}"


def call_name(call: Call) -> str:
    return f"writer {call.writer}, call {call.number}:"


def row_text(row: Row) -> str:
    return " ".join(f"{count}:{pushes:b}" for count, pushes in zip(*row[:2], strict=True) if count)
