"""A warning shows the line of the user's program that it is about."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from tests.suites import each_case

from paramserve.errors import warn_user

Call = Callable[[], None]


def within(module: str, function: Call) -> Call:
    """A function of a module that calls another one."""
    names: dict[str, Any] = {"__name__": module, "function": function}
    exec(compile("def call():\n    function()\n", f"{module}.py", "exec"), names)
    call: Call = names["call"]
    return call


@each_case("user", ["script", "torchvision.x", "paramserve_script_train"])
def test_warning_shows_the_first_line_outside_of_the_package_and_torch(user: str) -> None:
    call = within("paramserve.worker", functools.partial(warn_user, "told"))
    for module in ("torch.optim.optimizer", "paramserve.pytorch.served", user, "torch", "main"):
        call = within(module, call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [(each.filename, each.lineno) for each in caught] == [(f"{user}.py", 2)]
