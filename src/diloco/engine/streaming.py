"""StreamingDiLoCo: Algorithm 1 of arXiv 2501.18512 around a torch model and an inner optimizer.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diloco.engine.arguments import check_exchange, check_model, checked_tokens, settings_of
from diloco.engine.attach import Attachment, attached, refuse_second_count
from diloco.engine.finish import warn_of_uncounted, warn_of_unsent
from diloco.engine.masters import Masters
from diloco.engine.member import member
from diloco.engine.model_loads import ModelLoads
from diloco.engine.view import EngineView
from diloco.errors import ExchangeError, UserError
from diloco.exchange.control import failing_together
from diloco.exchange.transport import Transport
from diloco.fragments import Fragment
from diloco.outer.mixing import MergeRule
from diloco.outer.rule import OuterRule
from diloco.outer.step import OuterStep
from diloco.rendezvous.contract import Rendezvous
from diloco.schedule import Schedule
from diloco.wire.payload import Codec


class StreamingDiLoCo(EngineView):
    """Keeps the replicas of a model together, a fragment at a time, while each trains on its own.

    Call `step()` after each step of the inner optimizer, or `attach(optimizer)` once, and `finish()` after the
    last. Only the values of the model's parameters change; Θ and the outer momentum are FP32 beside any dtype.

    A replica may be several processes: shard the model over them (FSDP2's `fully_shard`, on a mesh of the
    replica's own), and give each process an exchange with those that hold the same shard in the other replicas; or
    a rendezvous, where the first process meets the other replicas, and keeps Θ whole in host memory.

        Δ_{m,p} = Θ_p − θ_{m,p};   Δ_p = (1/M) Σ_m decode(encode(Δ_{m,p}))
        Θ_p ← OuterOpt(Θ_p, Δ_p);  θ_{m,p} ← α θ_{m,p} + (1 − α) Θ_p

    Args:
        model: the replica's copy, with the same initial parameters on all replicas.
        fragments: what `strided`, `sequential` or `whole` returns, or your own partition of the parameters.
        schedule: when each fragment is sent and merged.
        outer: the outer rule; None is `Nesterov()`.
        mixing: α, how much of its own parameters a replica keeps at a merge, or another merge rule.
        wire: the codec of the outer gradients, or its name.
        combine: `gather`: each replica receives every other's payload; `reduce_scatter`: each averages a share,
            and sends it in the same codec, or in another: `reduce_scatter:bf16`.
        error_feedback: β, above 0 and at most 1: e ← β e + Δ; send C(e); e ← e − C(e) (arXiv 1901.09847). None is
            no error feedback.
        offload: keep Θ, the outer momentum and the error in pinned host memory, and fetch one fragment ahead; a
            sharded replica of a rendezvous always keeps them in host memory.
        seed: the seed of codecs that draw random numbers, the same on all replicas.
        masters: FP32 weights that the optimizer updates in the place of the model's parameters, a tensor by
            parameter name, or an adapter of diloco.integrations: they are θ, and the parameters follow them.
        exchange: the transport of the payloads, or the rendezvous of replicas that come and go.

    Raises:
        UserError: if the settings contradict each other or the model.
        DisagreementError: if the replicas were given different settings or initial parameters.

    >>> import diloco, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine = diloco.StreamingDiLoCo(
    ...     model,
    ...     fragments=diloco.whole(model),
    ...     schedule=diloco.Schedule(sync_every=2, num_fragments=1),
    ...     exchange=diloco.LoopbackExchange(),
    ... )
    >>> for _ in range(4):
    ...     model(torch.ones(1, 3)).sum().backward()
    ...     optimizer.step()
    ...     outer_steps = engine.step()
    >>> outer_steps[0].sync
    Sync(fragment=0, round=2, step=4)
    >>> engine.finish()
    ()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        exchange: Transport | Rendezvous,
        outer: OuterRule | None = None,
        mixing: float | MergeRule = 0.5,
        wire: str | Codec = "e3m0",
        combine: str = "gather",
        error_feedback: float | None = None,
        seed: int = 0,
        offload: bool = False,
        masters: Masters | Mapping[str, Tensor] | None = None,
    ) -> None:
        check_exchange(exchange)
        with failing_together(exchange):
            self.settings = settings_of(
                fragments=fragments,
                schedule=schedule,
                outer=outer,
                mixing=mixing,
                wire=wire,
                combine=combine,
                error_feedback=error_feedback,
                seed=seed,
            )
            """The arguments that decide what is computed."""
            check_model(model, exchange)
            self.exchange = exchange
            self._membership = member(self.settings, exchange, model, masters, offload=offload)
        self._rounds = self._membership.rounds
        self._attachment: Attachment | None = None
        self._loads = ModelLoads(model, self._rounds)
        self._sound = True

    def step(self, *, tokens: int | None = None) -> tuple[OuterStep, ...]:
        """Count an inner step, send the fragments that are due, merge those whose overlap has passed.

        Args:
            tokens: how many this replica, all of its processes together, has read in the step, added to `tokens`:
                the weight of what it has learnt, which a rendezvous needs.

        Returns:
            The outer steps that were taken; none on most steps.

        Raises:
            NonFiniteError, UserError: if an outer gradient is not finite, or a parameter was replaced or loaded
                since the engine was built; this process sent nothing of this step.
            ExchangeError, PayloadError: if a payload is late or damaged; nothing of this step was merged.
        """
        refuse_second_count(self._attachment)
        self._check_going_on()
        if self._loads.pending:
            self._loads.check()
        num_tokens = checked_tokens(tokens)
        self._rounds.num_steps += 1
        self._rounds.tokens += num_tokens
        if not self._membership.is_due():
            return ()  # most steps
        with self._whole():
            return self._membership.advance()

    def attach(self, optimizer: Any, scaler: GradScaler | None = None, *, tokens: int | None = None) -> Attachment:
        """Call `step()` after every inner step until `remove()` of what it returns; an engine is attached once.

        Args:
            optimizer: the torch optimizer that steps last, or a wrapper such as accelerate's or torchtitan's.
            scaler: the GradScaler that steps it: a step that it skips counts, so that replicas stay in step.
            tokens: of each inner step, as in `step()`.
        """
        checked_tokens(tokens)
        self._attachment = attached(self._attachment, partial(self.step, tokens=tokens), optimizer, scaler)
        return self._attachment

    def on_merge(self, hook: Callable[[tuple[str, ...]], object]) -> torch.utils.hooks.RemovableHandle:
        """Call `hook(names)` after each merge with the names of the changed parameters, until its removal."""
        return self._rounds.parameters.on_merge(hook)

    def finish(self, *, flush: bool = False) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step.

        It raises what `step()` raises; after any error, load the last saved state in a new engine.

        Args:
            flush: then send and merge every fragment once more, so that Θ, which is what to ship, holds the last
                work of all. A warning names the fragments whose last work was not counted, or, without `flush`,
                those that were never sent.
        """
        self._check_going_on()
        if flush and self._loads.pending:
            self._loads.check()
        with self._whole():
            merged = self._membership.finish(flush=flush)
        warn_of_unsent(self._rounds)
        if flush:
            warn_of_uncounted(self._rounds)
        return merged

    def adopt(self) -> None:
        """Take parameters that were loaded into the model as Θ, with zeros for the outer momentum and the error.

        All replicas call it after the same step, with the same parameters and nothing in flight.

        Raises:
            DisagreementError: if the replicas' parameters or numbers of steps differ; nothing is changed.
            UserError: if something is in flight; nothing is changed.
        """
        self._check_going_on()
        self._membership.adopt()
        self._loads.excuse(later=False)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included; model and optimizer apart.

        Plain values, and dicts of FP32 tensors by parameter name, views of the engine's own where they can be:
        `outer`, the outer rule's slots (`velocity`), `error`, and `sent`, the decoded outer gradients in flight
        and zeros elsewhere. Keys and shapes are always the same: torch.distributed.checkpoint saves the engine
        itself, and loads in place. Of a sharded model they are DTensors, and every process of the replica must
        call it; examples/sharded_replicas.py resumes on other shards.
        """
        self._check_sound()
        return self._membership.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight; every replica must load the same step.

        Build the engine on parameters that all replicas share, the initial ones or Θ, and load the model's own
        after that; before or after the engine's does not matter. With nothing in flight, as after `finish()`,
        this engine may have other settings, all but the outer rule's class, and be any replica of any number.
        Then parameters frozen since are ignored, and those unfrozen since start with Θ = θ: load the model first.
        The error is zero unless replica and β are those of the state.

        Raises:
            DisagreementError: if the replicas load different steps, or states of different runs.
            UserError: if this engine failed; if the state is not of an engine, of another model, or of other
                settings while something is in flight. A refusal changes nothing, but torch.distributed.checkpoint
                has read into Θ and the slots before: build a new engine then.
        """
        accepted, unfrozen = self._membership.accepted(state)
        with self._whole():
            self._membership.load(accepted)
        self._loads.excuse(later=not unfrozen)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Work that is done whole, or else ends this engine, and tells the other replicas so."""
        self._check_sound()
        self._sound = False
        with self._membership.failing_together():
            yield
        self._sound = True

    def _check_sound(self) -> None:
        """Refuse to use what a step that failed half-way has left."""
        if not self._sound:
            raise UserError(
                f"step {self.num_steps} failed: build a new engine and load the last state that was saved"
            )

    def _check_going_on(self) -> None:
        """Refuse to go on after a failure, here or in another replica."""
        self._check_sound()
        if (failure := self._membership.failure) is not None:
            raise ExchangeError(f"step {self.num_steps}: {failure}")
