"""A served optimizer on real servers beside plain torch: the same is done to both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from torch import Tensor, nn

from paramserve.client import Client
from paramserve.launch.reading import Reader
from paramserve.pytorch.optimizer import adopt
from paramserve.training.optimizers import Optimizers

RTOL, ATOL = 2e-5, 2e-6
"""The kernels and torch round each in their own order; a run has some tens of steps."""
SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (3, 4),
    "first.bias": (3,),
    "second.weight": (2, 3),
    "second.scale": (),
    "spare.weight": (2, 2),
    "spare.bias": (5,),
}
GROUPS = (("first.weight", "first.bias"), ("second.weight", "second.scale"))
SPARE = (("spare.weight",), ("spare.bias",))
"""What `add_param_group` takes, one after the other."""


def make_model() -> nn.Module:
    """Parameters of two dtypes, and a buffer; the values are the same each time."""
    model = nn.Module()
    generator = torch.Generator().manual_seed(3)
    for name, shape in SHAPES.items():
        owner, _, attribute = name.partition(".")
        if not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        dtype = torch.float64 if owner == "second" else torch.float32
        values = torch.randn(shape, generator=generator, dtype=dtype)
        getattr(model, owner).register_parameter(attribute, nn.Parameter(values))
    model.register_buffer("seen", torch.zeros(2))
    return model


def gradient_of(name: str, seed: int) -> Tensor:
    """Quarters between -2 and 2: sums and means of two are exact."""
    generator = torch.Generator().manual_seed(seed * 31 + [*SHAPES].index(name))
    found = torch.randint(-8, 9, SHAPES[name], generator=generator) / 4
    return found.double() if name.startswith("second") else found


class Harnesses:
    """Clusters of two servers with a client of each rank, for one pair after the other."""

    def __init__(self, make_cluster: MakeCluster) -> None:
        self._make = make_cluster
        self._made: dict[tuple[int, str], tuple[RoleCluster, list[Client]]] = {}
        self._names = 0

    def of(self, ranks: int, policy: Any) -> list[Client]:
        key = (ranks, repr(policy))
        if key not in self._made:
            cluster = self._make("unix", servers=2, workers=ranks, policy=policy)
            self._made[key] = (cluster, [cluster.client(rank) for rank in range(ranks)])
        return self._made[key][1]

    def new_name(self) -> str:
        self._names += 1
        return f"model {self._names}"


class Side:
    """A model with an optimizer, and what users have around one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = dict(model.named_parameters())
        self.names = {id(param): name for name, param in self.params.items()}
        self.optimizer: Any = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.scheduler: Any = None
        self.calls = 0
        self.removed: list[tuple[dict[str, Any], int, Tensor]] = []

    def values(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}

    def start(self, optimizer: Any) -> None:
        self.optimizer, self.scheduler, self.removed = optimizer, None, []
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def grouped(self) -> list[list[str]]:
        """The names of the parameters in each group."""
        return [
            [self.names[id(param)] for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def set_gradients(self, seed: int, without: set[str], shift: float = 0.0) -> None:
        """Set gradients as a forward and a backward pass would: the buffer changes too."""
        self.model.seen.add_(1)
        for name, param in self.params.items():
            if name in without or not param.requires_grad:
                param.grad = None
            else:
                param.grad = gradient_of(name, seed) + shift


class Pair:
    """One `Side` for each rank, whose optimizers are adopted, and one of plain torch.

    Args:
        build: an optimizer from parameter groups.
        options: of adoption.
    """

    def __init__(self, harnesses: Harnesses, ranks: int, policy: Any, **options: Any) -> None:
        self._harnesses = harnesses
        self._options = options
        self.extra: dict[str, dict[str, Any]] = {}
        """Told by group at the end, for the result."""
        self.clients = harnesses.of(ranks, policy)
        self.workers = [self._worker(rank, client) for rank, client in enumerate(self.clients)]
        self.served = [Side(make_model()) for _ in self.clients]
        self.plain = Side(make_model())
        self.overlap = bool(options.get("overlap"))
        self.before = self.plain.values()
        """What plain torch had before its last step."""
        self.outstanding = False
        """The served values are those before the last step."""
        self.whole = True
        """No step was left half way: with what raised, there is nothing to compare at the end."""
        self.name = ""
        self._pool = ThreadPoolExecutor(len(self.clients))

    def _worker(self, rank: int, client: Client) -> Any:
        return SimpleNamespace(
            rank=rank,
            workers=len(self.clients),
            client=client,
            incarnation=1,
            registry=None,
            course=SimpleNamespace(take_over=nullcontext),
            optimizers=Optimizers(client),
            leases=SimpleNamespace(step_samples=None),
            load_state={},
            tell_extra_state=self.extra.__setitem__,
            go_on_drawing=lambda *, first: None,
        )

    def start(
        self, build: Callable[[list[dict[str, Any]]], Any], groups: Sequence[Sequence[str]] = GROUPS
    ) -> None:
        """Make optimizers, the served ones under a new name; an earlier one is left behind.

        Args:
            groups: the names of the parameters in each.
        """
        self.name = self._harnesses.new_name()
        for side in self.sides():
            given = [{"params": [side.params[name] for name in names]} for names in groups]
            given[1]["lr"] = 0.03
            side.start(build(given))

        def adopts(rank: int) -> None:
            self.adopts(rank, self.served[rank].model, self.served[rank].optimizer)

        raise_first(self.on_ranks(adopts))
        self.outstanding = False

    def adopts(self, rank: int, model: nn.Module, optimizer: Any) -> None:
        """Adopt an optimizer on a rank."""
        name = self.name or self._harnesses.new_name()
        adopt(self.workers[rank], model, optimizer, name=name, **self._options)

    def sides(self) -> list[Side]:
        return [*self.served, self.plain]

    def each(self, do: Callable[[Side], Any]) -> list[Any]:
        """Do something to every side, one after the other; a call that is no step does not wait."""
        return [do(side) for side in self.sides()]

    def on_ranks(self, do: Callable[[int], Any]) -> list[BaseException | None]:
        """Do something on all ranks at once; what each raised, if all or none did.

        Raises:
            BaseException: what some of them raised.
        """

        def guarded(rank: int) -> BaseException | None:
            try:
                do(rank)
            except Exception as error:
                return error
            return None

        errors = list(self._pool.map(guarded, range(len(self.clients))))
        raised = [error for error in errors if error is not None]
        if raised and len(raised) < len(errors):
            raise raised[0]
        return errors

    # --- steps -----------------------------------------------------------------------------------

    def set_gradients(self, seed: int, without: set[str]) -> None:
        """The ranks' mean is what plain torch gets, exactly."""
        shifts = [0.0] if len(self.served) == 1 else [-0.5, 0.5]
        for side, shift in zip(self.served, shifts, strict=True):
            side.set_gradients(seed, without, shift)
        self.plain.set_gradients(seed, without)

    def step(self, do: Callable[[Side], Any], refused: str = "") -> None:
        """Step all sides, and compare; or see that the servers refuse, and change nothing.

        Args:
            do: what steps one side.
            refused: a pattern that the error's text has, if this step is to be refused; plain
                torch then makes none.
        """
        self.whole = False
        before = [side.values() for side in self.served]
        calls = [side.calls for side in self.served]
        errors = self.on_ranks(lambda rank: do(self.served[rank]))
        if refused:
            for side, values, called, error in zip(self.served, before, calls, errors, strict=True):
                assert error is not None, f"not refused: {refused}"
                assert re.search(refused, str(error)), f"{refused!r} does not explain {error!r}"
                assert side.calls == called
                same = {name: torch.equal(side.params[name], each) for name, each in values.items()}
                names = [name for name, each in same.items() if not each]
                # What was unfrozen is defined first, which waits for the step before.
                assert not names or self.outstanding, f"{names} were changed"
                self.outstanding = self.outstanding and not names
            self._compare_values()
            self.whole = True
            return
        raise_first(errors)
        self.before = self.plain.values()
        do(self.plain)
        self.outstanding = self.overlap
        self.compare()

    def compare(self) -> None:
        self.whole = False
        self._compare_values()
        for side in self.served:
            assert side.calls == self.plain.calls
            assert side.scaler.get_scale() == self.plain.scaler.get_scale()
            for mine, theirs in zip(
                side.optimizer.param_groups, self.plain.optimizer.param_groups, strict=True
            ):
                for key in theirs:
                    assert key == "params" or mine[key] == theirs[key], key
        self.whole = True

    def _compare_values(self) -> None:
        wanted = self.before if self.outstanding else self.plain.values()
        for side in self.served:
            for name, value in side.values().items():
                torch.testing.assert_close(
                    value, wanted[name], rtol=RTOL, atol=ATOL, msg=lambda m, n=name: f"{n}: {m}"
                )

    def compare_states(self) -> list[dict[str, Any]]:
        """The sides' state dicts, which are equal."""
        found = self.each(lambda side: side.optimizer.state_dict())
        self.outstanding = False
        for each in found:
            kept = {index: self._used(each, index) for index in each["state"]}
            each["state"] = {index: entry for index, entry in kept.items() if entry}
        for mine in found[:-1]:
            assert_close(mine, found[-1], "state")
        self.compare()
        return found

    def _used(self, found: dict[str, Any], index: int) -> dict[str, Any]:
        """An entry without a momentum of zeros where that goes on as no momentum does. Torch's
        checkpoint functions leave some entries empty."""
        (group,) = (each for each in found["param_groups"] if index in each["params"])
        entry: dict[str, Any] = found["state"][index]
        buffer = entry.get("momentum_buffer")
        sgd = isinstance(self.plain.optimizer, torch.optim.SGD)
        if sgd and buffer is not None and not group["dampening"] and not buffer.any():
            entry = {key: value for key, value in entry.items() if key != "momentum_buffer"}
        return entry

    def finish(self) -> None:
        """The end of a training function: readers find what the model has."""
        for worker in self.workers:
            worker.optimizers.finish()
        self.outstanding = False
        self.compare()
        model = self.served[0].model.state_dict()
        extra = self.extra.get(self.name, {})
        values = Reader(self.clients[0]).read(self.name)
        found = {name: torch.from_numpy(value) for name, value in values.items()} | extra
        assert found.keys() == model.keys()
        for name, value in model.items():
            assert torch.equal(found[name], value), name

    def close(self) -> None:
        self._pool.shutdown()


def raise_first(errors: list[BaseException | None]) -> None:
    """Raise what all ranks raised, if they did."""
    for error in errors:
        if error is not None:
            raise error


def assert_close(given: Any, wanted: Any, where: str) -> None:
    """Equal, tensors within the tolerance."""
    if isinstance(wanted, dict):
        assert given.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_close(given[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(given) == len(wanted), where
        for i, (mine, theirs) in enumerate(zip(given, wanted, strict=True)):
            assert_close(mine, theirs, f"{where}.{i}")
    elif isinstance(wanted, Tensor) and isinstance(given, Tensor):
        # torch's load_state_dict gives a number the dtype of its parameter.
        torch.testing.assert_close(
            given,
            wanted,
            rtol=RTOL,
            atol=ATOL,
            check_dtype=False,
            msg=lambda text: f"{where}: {text}",
        )
    else:
        assert given == wanted, f"{where}: {given!r} != {wanted!r}"


@contextmanager
def pairs(harnesses: Harnesses) -> Iterator[Callable[..., Pair]]:
    """Gives a function that makes pairs, and closes them at the end."""
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(harnesses, *args, **options))
        return made[-1]

    try:
        yield make
    finally:
        for pair in made:
            pair.close()
