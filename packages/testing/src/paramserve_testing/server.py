"""Simulated servers, the coordinator and the driver: the drivers that ship, on virtual streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paramserve.checkpoint.committing import Committer, read_cluster
from paramserve.checkpoint.folder import answer_probe
from paramserve.config import Limits
from paramserve.coordinator import CoordinatorRole
from paramserve.core.shard import Shard
from paramserve.errors import ConnectTimeout
from paramserve.messages import BlockSpec, Hello, Register, Scale, encode
from paramserve.server import ServerRole
from paramserve.server.checkpoints import restore_from_checkpoint
from paramserve_testing.loop import VirtualLoop
from paramserve_testing.nemesis import COORDINATOR, shard_place
from paramserve_testing.network import NEAR, Bytes, Frame, Stream, peer_rates
from paramserve_testing.process import ClientProcess
from paramserve_testing.sockets import SocketListener
from paramserve_testing.streams import VirtualControl, VirtualLink, VirtualListener

if TYPE_CHECKING:
    from collections.abc import Callable

    from paramserve_testing.simulated import SimulatedCluster

NONCE = "simulated"
"""Nonce of the probe of a folder of checkpoints."""
KERNELS_RATE = 0.5
"""Share of definitions that wait for a kernel."""
UNREACHED_RATE = 0.5
"""Share of failed attempts to connect over a way that is cut."""
HOLDS = 1
"""Frames that a connection to a slow reader holds in each direction."""
SLOW_LIMITS = Limits(send_buffer_bytes_max=16 << 10)
"""Limits of connections to slow readers: less than the values of one block that is on all
shards."""


class SimulatedServer:
    """One server process."""

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        place = shard_place(number)
        self.loop = VirtualLoop(cluster.clock, cluster.network.delay_s)
        self.control = VirtualControl(
            place,
            self.loop,
            lambda near: cluster.call_coordinator(near, "register"),
            Register(0, number, 0, (place,)),
        )
        shard, plan, disk = cluster.new_shard(number), cluster.checkpoint_plan, cluster.disk
        if disk is not None:
            answer_probe(disk, NONCE, number)
            if plan.resume:
                restore_from_checkpoint(shard, plan, self.loop.time(), disk)
        self.role = ServerRole(
            cluster.server_config(number),
            shard,
            self.loop,
            self.control,
            self._dial,
            storage=disk,
            needed=self._needed,
        )
        self._listener = self._new_listener(place)

    def _new_listener(self, place: str) -> VirtualListener | SocketListener:
        if not self.cluster.scenario.slow_readers:
            return VirtualListener(place, self.role, self.loop)
        random = self.cluster.network.random
        return SocketListener(place, self.role, self.loop, SLOW_LIMITS, random)

    @property
    def shard(self) -> Shard:
        """What decides."""
        return self.role.shard

    def accept(self, client: ClientProcess, arenas: dict[int, Bytes]) -> Stream:
        """A client opens a stream; who it is, it says in its first frame.

        Args:
            arenas: that this server maps; without any, bytes travel in frames.
        """
        name = f"writer {client.writer} - shard {self.number}"
        stream = self.cluster.network.open(client, self._listener, name)
        if self.cluster.scenario.slow_readers:
            stream.holds = HOLDS
        if arenas:
            self._listener.accept(stream, kind="unix", arenas=arenas)
        else:
            self._listener.accept(stream)
        return stream

    def _dial(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> VirtualLink:
        """Reach another server. Where the way is cut, that fails or waits."""
        (place,) = addresses
        network, own = self.cluster.network, shard_place(self.number)
        if network.is_cut((own, place)) and network.random.random() < UNREACHED_RATE:
            raise ConnectTimeout(f"{place} does not answer", fix="none")
        (other,) = (each for each in self.cluster.servers if shard_place(each.number) == place)
        link = VirtualLink(own)
        link.stream = network.open(link, other._listener, f"{own} - {place}", peer_rates)
        other._listener.accept(link.stream)
        link.stream.put(NEAR, Frame(encode(Hello("server", client=self.number))))
        return link

    def _needed(self, spec: BlockSpec, rules: object) -> Callable[[], None] | None:
        """Some definitions wait, as for kernels; the real ones are loaded before."""
        return _nothing if self.cluster.random.random() < KERNELS_RATE else None


def _nothing() -> None:
    pass


class SimulatedCoordinator:
    """The coordinator process."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.loop = VirtualLoop(cluster.clock)
        disk, plan, work, record = cluster.disk, cluster.checkpoint_plan, None, None
        if disk is not None:
            self.loop = VirtualLoop(cluster.clock, cluster.network.delay_s)
            work = Committer(disk, plan, cluster.scenario.servers, NONCE).do
            if plan.resume:
                record = read_cluster(disk, plan.resume)
        self.coordination = cluster.new_coordination(record)
        self.role = CoordinatorRole(self.coordination, self.loop, self._listens, work)
        self.role.on_members = cluster.recorder.belonging
        self.looked = 0
        """How often it has looked whether a server still listens."""
        self.listener = VirtualListener(COORDINATOR, self.role, self.loop)

    def _listens(self, addresses: Sequence[str]) -> bool:
        """True: here no server ever ends."""
        self.looked += 1
        return True


class SimulatedDriver:
    """Driver of the job: it tells the coordinator how many workers there are to be."""

    place = "driver"

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._coordinator = cluster.call_coordinator(self, "driver")

    def scale(self, workers: int) -> None:
        """Change how many workers there are to be."""
        self._coordinator.send(NEAR, Frame(encode(Scale(0, workers))))

    def lost(self, stream: Stream) -> None:
        """Never: no fault hits this stream."""

    def received(self, stream: Stream, frame: Frame) -> None:
        """The coordinator has done it."""
