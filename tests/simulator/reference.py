"""Independent simulations: of the physical model by events in a queue, of the paper's node by node."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count


@dataclass
class Replica:
    overlap: int
    step: int = 0
    blocked_on: set = field(default_factory=set)
    has: set = field(default_factory=set)
    """(sync, phase) that arrived from everybody, itself included."""
    ended: float = 0.0


@dataclass
class Queue:
    """Serves syncs one at a time, in their order, each as soon as it is offered."""

    next: list
    offered: set = field(default_factory=set)
    busy: bool = False


class Events:
    """M replicas that compute, send, wait and merge; every message is a pair of events."""

    def __init__(
        self,
        compute: Sequence[Sequence[float]],
        syncs_at: Callable[[int], Sequence[int]],
        bits: Callable[[int, int], float],
        num_phases: int,
        gbit_s: Sequence[float],
        latency: Sequence[float],
        overlaps: Sequence[int],
    ) -> None:
        self.compute, self.syncs_at, self.bits, self.num_phases = compute, syncs_at, bits, num_phases
        self.gbit_s, self.latency, self.num_steps = gbit_s, latency, len(compute)
        self.replicas = [Replica(overlap) for overlap in overlaps]
        self.now, self.queue, self.order = 0.0, [], count()
        steps = range(1, self.num_steps + 1)
        syncs = [(step, fragment) for step in steps for fragment in syncs_at(step)]
        pairs = [(m, j) for m in range(len(overlaps)) for j in range(len(overlaps)) if m != j]
        # One queue a phase, and one that carries all phases of a sync: a lane is no faster than that.
        self.queues = {(*pair, q): Queue(list(syncs)) for pair in pairs for q in (*range(num_phases), "all")}
        self.carried = defaultdict(set)
        self.arrived = defaultdict(set)

    def run(self) -> float:
        for m in range(len(self.replicas)):
            self.begin(m)
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        assert all(replica.step == self.num_steps and not replica.blocked_on for replica in self.replicas)
        return max(replica.ended for replica in self.replicas)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), action))

    def begin(self, m: int) -> None:
        self.after(self.compute[self.replicas[m].step][m], lambda: self.computed(m))

    def computed(self, m: int) -> None:
        replica = self.replicas[m]
        replica.step += 1
        for fragment in self.syncs_at(replica.step):
            self.offer(m, (replica.step, fragment), 0)
        last = replica.step == self.num_steps
        steps = range(1, self.num_steps + 1) if last else [replica.step - replica.overlap]
        due = {((s, p), self.num_phases - 1) for s in steps if s >= 1 for p in self.syncs_at(s)}
        replica.blocked_on = due - replica.has
        self.proceed(m)

    def proceed(self, m: int) -> None:
        replica = self.replicas[m]
        if not replica.blocked_on:
            replica.ended = self.now
            if replica.step < self.num_steps:
                self.begin(m)

    def offer(self, m: int, sync: tuple[int, int], phase: int) -> None:
        """Replica m has its own part of a phase, and can send it."""
        self.arrive(m, m, sync, phase)
        for (sender, receiver, kind), queue in self.queues.items():
            if sender == m and (kind == phase or (kind == "all" and phase == 0)):
                queue.offered.add(sync)
                self.serve(sender, receiver, kind)

    def serve(self, m: int, j: int, kind: object) -> None:
        queue = self.queues[m, j, kind]
        if queue.busy or not queue.next or queue.next[0] not in queue.offered:
            return
        sync, queue.busy = queue.next.pop(0), True
        phases = range(self.num_phases) if kind == "all" else [kind]
        rate = min(self.gbit_s[m], self.gbit_s[j]) * 1e9 / (len(self.replicas) - 1)

        def sent() -> None:
            queue.busy = False
            self.left(m, j, sync, kind)
            self.serve(m, j, kind)

        self.after(sum(self.bits(sync[1], phase) for phase in phases) / rate, sent)

    def left(self, m: int, j: int, sync: tuple[int, int], kind: object) -> None:
        """A queue has sent its part; the last phase is over when the lane has carried everything, too."""
        last = self.num_phases - 1
        if kind in (last, "all"):
            self.carried[m, j, sync].add(kind)
            if len(self.carried[m, j, sync]) < 2:
                return
            kind = last
        self.after((self.latency[m] + self.latency[j]) / 2, lambda: self.arrive(m, j, sync, kind))

    def arrive(self, m: int, j: int, sync: tuple[int, int], phase: int) -> None:
        self.arrived[j, sync, phase].add(m)
        if len(self.arrived[j, sync, phase]) < len(self.replicas):
            return
        replica = self.replicas[j]
        replica.has.add((sync, phase))
        if phase + 1 < self.num_phases:
            self.offer(j, sync, phase + 1)
        if (sync, phase) in replica.blocked_on:
            replica.blocked_on.remove((sync, phase))
            self.proceed(j)


def paper_seconds(
    num_layers: int,
    step_seconds: float,
    reduction_seconds: float,
    layers_at: Callable[[int], Sequence[int]],
    overlap: int,
    num_steps: int,
) -> float:
    """The paper's simulator, node by node: layers from 1, one replica, one network; the drain included."""
    node = step_seconds / (3 * num_layers - 1)
    clock = network = 0.0
    reduced: dict[tuple[int, int], float] = {}
    for step in range(1, num_steps + 1):
        for layer in range(1, num_layers + 1):
            for launched in range(1, step - overlap):
                clock = max(clock, reduced.get((launched, layer), 0.0))
            clock += node
        for layer in range(num_layers, 0, -1):
            clock += node if layer > 1 else 0.0
            clock += node
            if layer in layers_at(step):
                network = max(network, clock) + reduction_seconds
                reduced[step, layer] = network
    return max(clock, network)
