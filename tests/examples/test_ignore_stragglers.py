from __future__ import annotations

import re

import pytest

import ignore_stragglers
from paramserve_testing.policy_suite import PolicySuite


class TestIgnoreStragglers(PolicySuite):
    policy = ignore_stragglers.IgnoreStragglers()


@pytest.mark.slow  # compares times
def test_ignore_stragglers_example_uses_nothing_of_the_slow_worker_and_gets_further(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ignore_stragglers.main(["--seconds", "1.5", "--straggle-s", "0.1", "--servers", "2"])
    output = capfd.readouterr().out
    sync, own = (line for line in output.splitlines() if line.startswith("  steps"))
    assert max(numbers(sync, "steps")) - min(numbers(sync, "steps")) <= 2
    assert numbers(sync, "not used") == [0, 0, 0]
    *fast, slow = numbers(own, "steps")
    assert min(fast) > slow, output
    assert numbers(own, "not used")[2] >= 3, output
    assert error(own) < error(sync), output


def numbers(line: str, name: str) -> list[int]:
    found = re.search(rf"{name} (\d+), (\d+), (\d+)", line)
    assert found is not None, line
    return [int(each) for each in found.groups()]


def error(line: str) -> float:
    return float(line.rpartition(" ")[2])
