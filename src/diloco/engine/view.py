"""The part of an engine that is read: its counters and its outer parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from diloco.engine.logs import begin_logs, counters, logs
from diloco.engine.model_loads import ModelLoads
from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.sharded import gathered
from diloco.engine.state import OUTER
from diloco.outer.digest import parameters_hash


class EngineView:
    """The counters and the outer parameters of the rounds of an engine."""

    _rounds: ReplicaRounds
    _loads: ModelLoads

    @property
    def num_steps(self) -> int:
        """Inner steps taken."""
        return self._rounds.num_steps

    @property
    def tokens(self) -> int:
        """Tokens that this replica has read: the sum of `step(tokens=…)`, or what the loop sets here."""
        return self._rounds.tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self._rounds.tokens = tokens

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet, where replicas come and go."""
        return self._rounds.uncounted_tokens

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all shards, each destination counted."""
        return self._rounds.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all shards from the other replicas that were merged."""
        return self._rounds.bytes_received

    @property
    def blocked_seconds(self) -> float:
        """Time in which training has waited for payloads."""
        return self._rounds.blocked_seconds

    def logs(self) -> dict[str, float]:
        """The numbers for a tracker, by names that stay as they are.

        - `num_steps`, `bytes_sent`, `bytes_received`, `blocked_seconds`: as the properties.
        - `encode_seconds`, `merge_seconds`: time spent on making and encoding outer gradients, and on decoding,
          averaging, outer steps and merges, since the engine was built; on a GPU, the time of the CPU.
        - `distance_to_outer`: ‖θ − Θ‖₂ over all fragments and shards, computed now.
        - `codec_error`: ‖Δ − decode(encode(Δ))‖ / ‖Δ‖ of the fragment sent last, computed now on up to 16,384 of
          its elements a shard, without error feedback; after the first sync.
        - `exchange_mbit_s`: payload bits that this process sent in the last exchange over the seconds until the
          others' had come; `exchange_mbit_s_at_least` in its place if they had come before training needed them.
        - `lateness_seconds/replica_1`, …: how long the last wait waited for the payload of each other replica,
          after those of the replicas before it; with `reduce_scatter` a thread waits, and training maybe not.
        - `last_heard_seconds/replica_1`, …: seconds since a message of each other replica was last taken. Both
          are known to the processes that exchange with other replicas.

        Every process of a sharded replica must call it, between steps.
        """
        return logs(self._rounds)

    def begin_logs(self) -> Callable[[], dict[str, float]]:
        """Begin to compute the logs as of now; the function that is returned waits for them."""
        return begin_logs(self._rounds)

    def counters(self) -> dict[str, float]:
        """The part of `logs()` that is not computed: any process and thread may ask for it at any time."""
        return counters(self._rounds)

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped and sharded as in the model: what to ship.

        They are views, which the next outer step changes; with `offload` of host memory. Of a sharded replica of a
        rendezvous they are copies, and every process must call it. Evaluate a sharded model in `outer_in_place`:
        `functional_call` would silently take the parameters that FSDP has gathered itself.
        """
        return self._rounds.parameters.all_named(self._rounds.state.at_home(OUTER))

    @contextmanager
    def outer_in_place(self) -> Iterator[None]:
        """The model with Θ in the place of its own parameters, which it gets back; take no inner step in there."""
        with self._loads.undone(), self._rounds.parameters.replaced_by(self.outer_parameters()):
            yield

    def leave_outer_in_place(self) -> None:
        """Leave Θ in the model for good, after `finish()`: so that whatever saves the model saves Θ."""
        self._rounds.parameters.set(self.outer_parameters())

    def outer_hash(self) -> str:
        """SHA-256 over Θ, equal on all replicas after `finish()`; every process of a replica must call it."""
        return parameters_hash(self.outer_parameters(), gathered)
