"""The progress of a run: in a fixed group by steps, where replicas come and go by the tokens in the log."""

from dataclasses import dataclass
from typing import Protocol

from diloco.engine.streaming import StreamingDiLoCo
from diloco.training.config import TrainConfig
from diloco.training.world import World


@dataclass(frozen=True)
class Standing:
    """The whole run, as one replica knows it after its step t."""

    tokens: int
    """Tokens that all replicas together have read."""
    next_tokens: int
    """Tokens that all replicas will have read after step t + 1, which set its learning rate."""
    is_over: bool
    """Whether t was the last step of this replica."""


class Progress(Protocol):
    """The progress of the whole run."""

    def after(self, step: int) -> Standing:
        """The standing after step t, which this replica has taken."""
        ...


@dataclass(frozen=True)
class FixedProgress:
    """The progress of replicas that take the same steps, of B · sequence length tokens each."""

    config: TrainConfig

    def after(self, step: int) -> Standing:
        """The standing after step t; T is the last."""
        per_step = self.config.tokens_per_step
        return Standing(step * per_step, (step + 1) * per_step, step >= self.config.num_steps)


class ElasticProgress:
    """The progress of replicas that come and go; it never goes back.

        tokens = Σ counted / P + M · uncounted

    An outer entry counts the tokens of its contributions to one fragment, hence / P. `uncounted` is what this
    replica has read since, on average over the fragments, and M the number of active replicas. For fixed
    members of equal speed this is t · B · sequence length. As a replica that was cut off for long says nothing
    about the others, no more than 2 H + τ of its steps are taken for theirs.

    The first process of a sharded replica knows it. All of its processes ask together, once a step, since each
    answer makes the host wait for the device.

    Args:
        config: the run's.
        engine: of this replica.
        world: of this process, with the rendezvous that the engine has joined.
    """

    def __init__(self, config: TrainConfig, engine: StreamingDiLoCo, world: World) -> None:
        assert world.rendezvous is not None, "replicas come and go"
        self._engine, self._rendezvous, self._of_first = engine, world.rendezvous, world.of_first
        self._budget = config.num_tokens
        self._own_tokens = config.process_batch * config.processes_per_replica * config.sequence_length
        schedule = engine.settings.schedule
        self._most_steps = 2 * schedule.sync_every + schedule.overlap(0)
        self._tokens = self._next_tokens = 0

    def after(self, step: int) -> Standing:
        """The standing as far as this replica has taken the outer steps of the log.

        The run is over once the budget is spent, here or by the word of another replica.
        """
        tokens, next_tokens, is_over = self._of_first(3, lambda: self._read(step))
        return Standing(tokens, next_tokens, bool(is_over))

    def _read(self, step: int) -> tuple[int, int, bool]:
        self._tokens = max(self._tokens, self._estimate(step))
        self._next_tokens = max(self._next_tokens, self._tokens, self._estimate(step + 1))
        is_over = self._tokens >= self._budget or self._rendezvous.state.finished
        return self._tokens, self._next_tokens, is_over

    def _estimate(self, step: int) -> int:
        """The tokens of the class's equation."""
        engine, state = self._engine, self._rendezvous.state
        num_fragments, num_others = len(engine.settings.fragments), max(0, len(state.active) - 1)
        ahead = (step - engine.num_steps) * self._own_tokens
        own = (
            round(num_fragments * engine.uncounted_tokens) + num_fragments * ahead
        )  # a whole number, P times `uncounted`
        others = num_others * min(own, num_fragments * self._most_steps * self._own_tokens)
        return (self._rendezvous.counted_tokens + own + others) // num_fragments
