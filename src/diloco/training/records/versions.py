"""Publish a run's outer parameters as versions, beside its training.

A version holds Θ with every fragment after its r-th outer step: a copy of Θ_p in bfloat16 is kept when that is
taken, and once the last fragment has taken it a thread publishes them all. So a version is a function of the outer
steps alone, whoever publishes it. The last version of a run is Θ at its end. With Data-Parallel a version holds
the parameters after a step.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco.engine.parameters import gathered
from diloco.engine.streaming import StreamingDiLoCo
from diloco.errors import DilocoError, UserError
from diloco.outer.step import OuterStep
from diloco.publishing.publisher import OvertakenError, Publisher
from diloco.rendezvous.store import StoreError
from diloco.training.config.config import TrainConfig
from diloco.training.records.export import files_of
from diloco.training.state import TrainState
from diloco.training.world import World

_LOG = logging.getLogger("diloco")
_DTYPE = torch.bfloat16
_ROUNDS_AT_ONCE = 2
"""Rounds of which some fragments are kept."""


@dataclass
class RunPublisher:
    """Publishes the versions of a run, from one of its processes; the others of its replica help to gather them.

    Args:
        config: the run's.
        world: of this process.
        state: the replica's, which is new or was loaded.
    """

    config: TrainConfig
    world: World
    state: TrainState
    _kept: dict[int, dict[int, tuple[dict[str, Tensor], int | None]]] = field(default_factory=dict)
    """Copies of Θ_p after a round, by round and fragment, each with the first replica of that outer step."""
    _firsts: dict[int, int] = field(default_factory=dict)
    """By fragment the first replica of its last outer step that was no shift, where it is known."""
    _publisher: Publisher | None = None
    _thread: threading.Thread | None = None
    _skipped: list[str] = field(default_factory=list)
    """The versions that were due while one was published, or of which a replica that was behind has no copy."""
    _failure: UserError | None = None
    _last_error: DilocoError | None = None
    """The reason why the last version that was begun is not published."""
    _has_published: bool = False
    _has_warned: bool = False

    def __post_init__(self) -> None:
        """Open the place; publish a new fixed group's parameters, and keep what a resumed one has of a round."""
        timeout = self.config.timeout_seconds
        if self.world.replica == 0 and self.world.rank == 0:  # with a rendezvous it is 0 in each
            assert self.config.publish is not None, "the run is published"
            self._publisher = Publisher(self.config.publish, dtype=_DTYPE, timeout_seconds=timeout)
        if self.state.step == 0 and self.world.rendezvous is None:
            names = list(self.state.synchronizer.outer_parameters())
            self._start(self._copied(names), step=0, facts={"round": 0})
        elif self.world.rendezvous is None and self.world.replica == 0:
            self._resume()

    def _resume(self) -> None:
        """Keep Θ_p of the fragments that had taken the round in whose midst a fixed group was saved."""
        synchronizer, every = self.state.synchronizer, self.config.publish_every
        if not isinstance(synchronizer, StreamingDiLoCo):
            return
        schedule = synchronizer.settings.schedule
        until = max(0, self.state.step - schedule.overlap(self.world.replica))
        taken = [schedule.num_sent(p, until) for p in range(len(synchronizer.settings.fragments))]
        newest = max(taken)
        if newest % every == 0 and min(taken) < newest:
            for p in range(len(taken)):
                if taken[p] == newest:
                    self._keep(newest, p, None, synchronizer)

    def after(self, step: int, outer_steps: Sequence[OuterStep]) -> None:
        """Keep what an inner step has changed, and publish what is whole; all processes of the replica call it.

        Raises:
            UserError: if the place of the versions is another's.
        """
        if self._failure is not None:
            raise self._failure
        if self.world.replica != 0:
            return
        every, synchronizer = self.config.publish_every, self.state.synchronizer
        if not isinstance(synchronizer, StreamingDiLoCo):
            if step % every == 0 and not self.state.is_over:
                self._start(self._copied(list(synchronizer.outer_parameters())), step=step, facts={})
            return
        newest = {outer_step.sync.fragment: outer_step for outer_step in outer_steps}
        for outer_step in outer_steps:  # a joiner or a slow replica may take several; Θ is that after the last
            p, taken, first = outer_step.sync.fragment, outer_step.sync.round, self._first_of(outer_step)
            if taken % every:
                continue
            if newest[p] is not outer_step:
                self._name_skipped(taken, p, first, synchronizer)
                continue
            self._keep(taken, p, first, synchronizer)
            if len(self._kept.get(taken, ())) == len(synchronizer.settings.fragments):
                self._publish_round(taken, synchronizer)

    def _first_of(self, outer_step: OuterStep) -> int | None:
        """The first replica in an outer step; of a shift, which counts the bridge, that in the one before it.

        None in a fixed group, and where this process does not know it.
        """
        p, rendezvous = outer_step.sync.fragment, self.world.rendezvous
        if rendezvous is None or self._publisher is None:
            return None
        if outer_step.cohort is None:  # a snapshot in the place of outer steps
            self._firsts.pop(p, None)
        elif not rendezvous.state.is_bridge(outer_step.cohort.members[0]):
            self._firsts[p] = outer_step.cohort.members[0]
        return self._firsts.get(p)

    def _keep(self, round: int, fragment: int, first: int | None, engine: StreamingDiLoCo) -> None:
        copies = self._copied(engine.settings.fragments[fragment].parameters)
        self._kept.setdefault(round, {})[fragment] = copies, first
        for old in sorted(self._kept)[:-_ROUNDS_AT_ONCE]:
            self._drop(old, engine)

    def _drop(self, round: int, engine: StreamingDiLoCo) -> None:
        for p, (_, first) in self._kept.pop(round).items():
            self._name_skipped(round, p, first, engine)

    def _name_skipped(self, round: int, fragment: int, first: int | None, engine: StreamingDiLoCo) -> None:
        """Note that a round is not published, where this replica would have: it has no whole copy of it."""
        is_last = fragment == len(engine.settings.fragments) - 1
        if is_last and self._publisher is not None and self._is_own(first) and str(round) not in self._skipped:
            self._skipped.append(str(round))

    def _is_own(self, first: int | None) -> bool:
        """True if this replica publishes the rounds whose last outer step had this first replica."""
        return self.world.rendezvous is None or first == self.world.rendezvous.replica

    def _publish_round(self, round: int, engine: StreamingDiLoCo) -> None:
        """Publish a round; where replicas come and go, in the first that was in the last fragment's outer step.

        Replicas take the outer steps of different fragments in different orders.
        """
        fragments = self._kept.pop(round)
        for old in [kept for kept in self._kept if kept < round]:
            self._drop(old, engine)
        _, first = fragments[len(fragments) - 1]
        if self._publisher is not None and not self._is_own(first):
            return
        tensors = {name: tensor for part, _ in fragments.values() for name, tensor in part.items()}
        self._start(tensors, step=round * engine.settings.schedule.sync_every, facts={"round": round})

    def _copied(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of some of Θ's tensors, whole, on the host."""
        parameters, copies = self.state.synchronizer.outer_parameters(), dict[str, Tensor]()
        for name in names:
            whole = gathered(parameters[name])  # together with the other processes of the replica
            if self._publisher is not None:
                copies[name] = torch.empty(whole.shape, dtype=_DTYPE, device="cpu").copy_(whole.detach())
        return copies

    def _start(self, tensors: dict[str, Tensor], *, step: int, facts: dict[str, Any]) -> None:
        """Publish in a thread, unless that publishes an earlier version yet."""
        if self._publisher is None:
            return
        if self._thread is not None and self._thread.is_alive():
            self._skipped.append(str(facts.get("round", step)))
            return
        arguments = (tensors, step, {"run": self.config.name, **facts})
        self._thread = threading.Thread(target=self._publish, args=arguments, name="diloco publish", daemon=True)
        self._thread.start()

    def _publish(self, tensors: Mapping[str, Tensor], step: int, facts: dict[str, Any]) -> None:
        """Publish a version; log it, or why it was not."""
        assert self._publisher is not None, "this process publishes"
        if (rendezvous := self.world.rendezvous) is not None:
            state = rendezvous.state
            facts["log"] = state.run
            keys = {member.key for member in state.members}
            allowed = {*state.allowed} if state.creator else keys
            self._publisher.share_with(allowed, {"log": state.run}, former_keys=keys - allowed)
        named = {self.config.model.published_name(name): tensor for name, tensor in tensors.items()}
        self._last_error = None
        try:
            files = None if self._has_published else files_of(self.config)
            version = self._publisher.publish(named, step=step, facts=facts, files=files)
        except CancelledError:
            pass  # the run ends
        except OvertakenError as error:
            if error.newest.facts.get("log") == facts.get("log"):
                _LOG.info("%s", error)
            else:
                self._refused(step, UserError(f"{error}, by another run: publish at a URL of its own", "publish"))
        except DilocoError as error:
            self._refused(step, error)
        else:
            self._has_published = True
            line = f"version {version.number} of step {step} is published: {version.smallest.num_bytes:,} bytes"
            skipped, self._skipped = self._skipped, []
            if skipped:
                unit = "round" if isinstance(self.state.synchronizer, StreamingDiLoCo) else "step"
                line += f"; {unit}s {', '.join(skipped)} were skipped"
            _LOG.log(logging.WARNING if skipped and not self._has_warned else logging.INFO, "%s", line)
            self._has_warned = self._has_warned or bool(skipped)

    def _refused(self, step: int, error: DilocoError) -> None:
        self._last_error = error
        if isinstance(error, UserError) and not self._has_published:
            self._failure = error
        _LOG.warning("the parameters of step %d were not published: %s", step, error)

    def finish(self) -> Callable[[], None]:
        """Copy the outer parameters of the end; the returned function publishes them, and waits for that.

        The others of a fixed group wait for this process as long as the config says: it publishes after them.

        Raises:
            UserError: by the returned function, if the place of the versions is another's.
            StoreError: by it, if the last version is not published: who follows would take an older one for it.
        """
        if self.world.replica != 0:
            return lambda: None
        tensors = self._copied(list(self.state.synchronizer.outer_parameters()))

        def publish() -> None:
            if self._thread is not None:
                self._thread.join()
            if (step := self._last_step()) is not None:
                self._start(tensors, step=step, facts={"final": True})
            if self._thread is not None:
                self._thread.join()
            if self._failure is not None:
                raise self._failure
            if step is not None and self._last_error is not None:
                by_hand = "publish what diloco export writes with diloco publish, since it can't be resumed"
                raise StoreError(
                    f"the last parameters of the run were not published: {self._last_error}; the run itself has "
                    f"ended well: {'resume it' if self.world.rendezvous is None else by_hand}"
                )

        return publish

    def _last_step(self) -> int | None:
        """The step of the last version, after those of all rounds; None where others may go on."""
        rendezvous, synchronizer = self.world.rendezvous, self.state.synchronizer
        if rendezvous is None or self._publisher is None:
            return self.state.step
        if not rendezvous.is_closed:
            return None
        assert isinstance(synchronizer, StreamingDiLoCo), "a rendezvous has an engine"
        # One for all: a replica's own steps may be fewer than the run's.
        return max(log.round for log in rendezvous.state.fragments) * synchronizer.settings.schedule.sync_every + 1

    def close(self) -> None:
        """End without another version; one that is being published is left."""
        if self._publisher is not None:
            self._publisher.close()
