"""How far a run is: in a fixed group by steps, where replicas come and go by the tokens in the log."""

from dataclasses import dataclass
from typing import Protocol

from diloco.engine.streaming import StreamingDiLoCo
from diloco.training.config import TrainConfig
from diloco.training.world import World


class Progress(Protocol):
    """The progress of the whole run, as one replica knows it after step t, which may be the one that it begins."""

    def tokens(self, step: int) -> int:
        """Tokens that all replicas together have read when this one has taken step t."""
        ...

    def is_over(self, step: int) -> bool:
        """Whether t was the last step of this replica."""
        ...


@dataclass(frozen=True)
class FixedProgress:
    """The progress of replicas that take the same steps."""

    config: TrainConfig

    def tokens(self, step: int) -> int:
        """B · sequence length a step."""
        return step * self.config.tokens_per_step

    def is_over(self, step: int) -> bool:
        """Whether t = T."""
        return step >= self.config.num_steps


class ElasticProgress:
    """The progress of replicas that come and go; it never goes back.

        tokens = Σ counted / P + M · uncounted

    An outer entry counts the tokens of its contributions to one fragment, hence / P. `uncounted` is what this
    replica has read since, on average over the fragments, and M the number of active replicas. For fixed
    members of equal speed this is t · B · sequence length. As a replica that was cut off for long says nothing
    about the others, no more than 2 H + τ of its steps are taken for theirs.

    The first process of a sharded replica knows it, and all of its processes ask together.

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
        self._most = 0

    def tokens(self, step: int) -> int:
        """The tokens of the class's equation, as far as this replica has taken the outer steps of the log."""
        return self._of_first(lambda: self._tokens(step))

    def _tokens(self, step: int) -> int:
        engine, state = self._engine, self._rendezvous.state
        num_fragments, num_others = len(engine.settings.fragments), max(0, len(state.active) - 1)
        ahead = (step - engine.num_steps) * self._own_tokens
        own = (
            round(num_fragments * engine.uncounted_tokens) + num_fragments * ahead
        )  # a whole number, P times `uncounted`
        others = num_others * min(own, num_fragments * self._most_steps * self._own_tokens)
        self._most = max(self._most, (self._rendezvous.counted_tokens + own + others) // num_fragments)
        return self._most

    def is_over(self, step: int) -> bool:
        """True once the budget is spent, here or by the word of another replica."""
        return bool(self._of_first(lambda: self._tokens(step) >= self._budget or self._rendezvous.state.finished))
