"""StreamingDiLoCo: Algorithm 1 of arXiv 2501.18512 around a torch model and an inner optimizer.

Shapes: N elements of one fragment, B of all buffers.
"""

import atexit
import logging
import math
import operator
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, SupportsFloat, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from diloco.auto import warning_of_frequent
from diloco.engine.checkpoint import FORMAT
from diloco.engine.fixed import FixedMembership
from diloco.engine.hooks import Attachment, ModelLoads, check_trains, check_wrapped, trained_by
from diloco.engine.outer_state import OUTER
from diloco.engine.parameters import FragmentParameters, Masters, gathered, is_sharded, local
from diloco.engine.replica import Membership, Replica, device_lane, lack_of, outer_state
from diloco.engine.settings import Settings, check_exchange, check_model, check_type, settings_of
from diloco.errors import DilocoError, ExchangeError, UserError, listed
from diloco.exchange.private_torch import changes_of
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.exchange.transport import Abortable, Transport, agree, fail_together, share, swap
from diloco.fragments import Fragment
from diloco.outer.cohort import Weights
from diloco.outer.digest import outer_digest, parameters_hash
from diloco.outer.merge import MergeRule, Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import OuterRule
from diloco.outer.step import OuterStep, cosine_of, products_of
from diloco.rendezvous.contract import Rendezvous
from diloco.schedule import Schedule, schedule_of
from diloco.wire.kernels.memory import begin_to_host
from diloco.wire.payload import Codec


class StreamingDiLoCo:
    """Keeps the replicas of a model together, a fragment at a time, while each trains on its own.

    Call `step()` after each step of the inner optimizer, or `attach(optimizer)` once, and `finish()` after the
    last. Only the values of the model's parameters change; Θ and the outer momentum are FP32 beside any dtype.

    A replica may be several processes: shard the model over them (FSDP2's `fully_shard`, `parallelize_module`, or
    both, on a mesh of the replica's own), and give each process an exchange with those of its place in the other
    replicas; or a rendezvous, where the first process meets the others, and keeps Θ whole in host memory.

        Δ_{m,p} = Θ_p − θ_{m,p};   Δ_p = (1/M) Σ_m decode(encode(Δ_{m,p}))
        Θ_p ← OuterOpt(Θ_p, Δ_p);  θ_{m,p} ← α θ_{m,p} + (1 − α) Θ_p

    Args:
        model: the replica's copy, with the same initial parameters on all replicas.
        fragments: the way to cut the model: `strided`, `sequential` or `whole`, or what a function of such a name
            returns, or your own partition of the parameters.
        sync_every: H, inner steps between two syncs of the same fragment; None is 100.
        overlap_steps: τ, inner steps between sending a fragment and merging it, below H; None is 5.
        schedule: in the place of these two, when each fragment is sent and merged.
        exchange: the transport of the payloads between the replicas of a fixed group.
        rendezvous: in the place of an exchange, where replicas come and go.
        outer: the outer rule, or its spelling, such as `nesterov:lr=0.7`, or a torch optimizer, or its class, of
            which class and settings are taken: SGD with Nesterov's momentum is `Nesterov`, and any other runs on Θ
            as it is. None is `Nesterov()`.
        mixing: α, how much of its own parameters a replica keeps at a merge, another merge rule, or its spelling.
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
        buffers: `average`: `finish()` gives the floating-point buffers that training has changed, such as the
            statistics of BatchNorm, the mean of all replicas; `own`: they stay each replica's own.
        weights: of the replicas of a fixed group in Δ_p: `equal`, or in proportion to the `tokens` that each has
            read since it sent the fragment last, or to `tokens_squared_per_step`; a rendezvous has its own.
        num_steps: T, the inner steps of the whole run, by which `outer="auto"` chooses; for nothing else.

    Raises:
        UserError: if the settings contradict each other or the model.
        DisagreementError: if the replicas were given different settings or initial parameters.

    >>> import diloco, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine = diloco.StreamingDiLoCo(
    ...     model, fragments="whole", sync_every=2, overlap_steps=0, exchange=diloco.LoopbackExchange()
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
        fragments: str | Sequence[Fragment] = "strided",
        sync_every: int | None = None,
        overlap_steps: int | tuple[int, ...] | None = None,
        schedule: Schedule | None = None,
        exchange: Transport | None = None,
        rendezvous: Rendezvous | None = None,
        outer: str | OuterRule | torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
        mixing: str | float | MergeRule = 0.5,
        wire: str | Codec = "e3m0",
        combine: str = "gather",
        error_feedback: float | None = None,
        seed: int = 0,
        offload: bool = False,
        masters: Masters | Mapping[str, Tensor] | None = None,
        buffers: Literal["own", "average"] = "own",
        weights: Weights | Literal["equal"] = "equal",
        num_steps: int | None = None,
    ) -> None:
        check_exchange(exchange, rendezvous)
        self.exchange, self.rendezvous = exchange, rendezvous
        with fail_together(cast(Abortable, rendezvous if exchange is None else exchange)):
            check_model(model, exchange)
            check_type("schedule", schedule, Schedule | None, "diloco.Schedule(sync_every=…, num_fragments=…)")
            self.settings = settings_of(
                model,
                fragments=fragments,
                schedule_for=partial(
                    schedule_of, schedule=schedule, sync_every=sync_every, overlap_steps=overlap_steps
                ),
                outer=outer,
                mixing=mixing,
                wire=wire,
                combine=combine,
                error_feedback=error_feedback,
                seed=seed,
                buffers=buffers,
                weights=weights,
                num_steps=num_steps,
                num_replicas=None if exchange is None else exchange.num_replicas,
            )
            """The arguments that decide what is computed."""
            self._membership = _membership(
                self.settings, model, masters, exchange=exchange, rendezvous=rendezvous, offload=offload
            )
        self._replica = self._membership.replica
        self._warn_of_frequent()
        self._attachment: Attachment | None = None
        self._loads = ModelLoads(model, self._replica)
        self._buffers, self._is_first_step = Buffers(model), True
        self._sound, self._stands_in = True, False  # Θ for θ, in the model
        self._kept_steps, self._num_changes = 0, self._count_changes()
        self._is_watched = True
        _WATCHED.add(self)

    def _warn_of_frequent(self) -> None:
        """Name outer steps that follow each other too soon; of a machine's processes the first says so."""
        rule, is_first = self.settings.outer, os.environ.get("LOCAL_RANK", "0") == "0"
        if isinstance(rule, Nesterov) and self._replica.number == 0 and is_first:
            merge_rule, sync_every = self.settings.mixing, self.settings.schedule.sync_every
            alpha = merge_rule.alpha if isinstance(merge_rule, Mixing) else 0.0
            warning = warning_of_frequent(rule.lr, rule.momentum, sync_every, alpha)
            if warning is not None:
                _LOG.warning(warning)

    _is_watched = False
    """True if this engine's end will be checked for lost work; False if it was never built."""

    def __del__(self) -> None:
        if self._is_watched and sys.exc_info()[0] is None:  # else an error is being handled, which says more
            self._warn_of_the_end()

    def step(self, *, tokens: int | None = None, loss: float | Tensor | None = None) -> tuple[OuterStep, ...]:
        """Count an inner step, send the fragments that are due, merge those whose overlap has passed.

        Args:
            tokens: how many this replica, all of its processes together, has read in the step, added to `tokens`:
                the weight of what it has learnt, which a rendezvous needs, and `weights` other than equal.
            loss: the replica's training loss in the step; where replicas come and go the store's log shows it.
                A tensor is read when something is sent, and may lie on a GPU.

        Returns:
            The outer steps that were taken; none on most steps.

        Raises:
            NonFiniteError, UserError: if an outer gradient is not finite, or a parameter was replaced or loaded
                since the engine was built, or Θ stands in its place; this process sent nothing of this step.
            ExchangeError, PayloadError: if a payload is late or damaged; nothing of this step was merged.
        """
        self._check_own_parameters("step")
        attachment = self._attachment
        if attachment is not None and not attachment.is_counting and attachment.is_attached:
            raise UserError(
                "the engine is attached to an optimizer and counts its steps: leave out engine.step(), or call "
                "remove() of what attach() returned"
            )
        self._check_going_on()
        if self._loads.pending:
            self._loads.check()
        num_tokens = _checked_tokens(tokens)
        if loss is not None:
            self._membership.take_loss(_checked_loss(loss))
        if self._is_first_step:
            self._is_first_step = False
            self._warn_of_buffers()
        self._replica.num_steps += 1
        self._replica.tokens += num_tokens
        if not self._membership.look():
            return ()  # most steps
        with self._fail_together():
            return self._membership.advance()

    def attach(self, optimizer: Any, scaler: GradScaler | None = None, *, tokens: int | None = None) -> Attachment:
        """Call `step()` after every inner step until `remove()` of what it returns; an engine is attached once.

        Args:
            optimizer: the torch optimizer that steps last, or a wrapper such as accelerate's or torchtitan's.
            scaler: the GradScaler that steps it: a step that it skips counts, so that replicas stay in step.
            tokens: of each inner step, as in `step()`.

        Raises:
            UserError: if the engine or the optimizer is attached already, or the optimizer trains none of the
                engine's parameters.
        """
        _checked_tokens(tokens)
        if self._attachment is not None and self._attachment.is_attached:
            raise UserError(
                "the engine is attached already, and would count every inner step twice: attach it alone to the "
                "optimizer that steps last"
            )
        check_optimizers(self, [optimizer])
        patience = max(10, self.settings.schedule.sync_every)
        self._attachment = Attachment(partial(self.step, tokens=tokens), optimizer, scaler, patience=patience)
        return self._attachment

    def on_merge(self, hook: Callable[[tuple[str, ...]], object]) -> RemovableHandle:
        """Call `hook(names)` after each merge with the names of the changed parameters, until its removal."""
        return self._replica.parameters.on_merge(hook)

    def finish(self, *, flush: bool = False, close: bool = False) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step.

        It raises what `step()` raises; after any error, load the last saved state in a new engine.

        Args:
            flush: then send and merge every fragment once more, so that Θ, which is what to ship, holds the last
                work of all. A warning names the fragments whose last work was not counted, or, without `flush`,
                those that were never sent. With a number as quorum what was not sent is sent in any case.
            close: where replicas come and go, end the run for all of them, since its token budget is spent. Each
                then takes every outer step up to the entry that closes the log, so that all have the same Θ; one
                that finishes after another has called this does so, too. The wait is bounded by the rendezvous'
                `timeout_seconds`; after it `rendezvous.leave()` warns which entry's Θ this replica has.
        """
        self._check_own_parameters("finish")
        self._check_going_on()
        if flush and self._loads.pending:
            self._loads.check()
        with self._fail_together():
            merged = self._membership.finish(flush=flush, close=close)
            if self.settings.buffers == "average" and self.exchange is not None:
                self._buffers.average(self.exchange)
        self._warn_of_unsent()
        if flush:
            self._warn_of_uncounted()
        self._mark_saved()
        return merged

    def reset_outer(self) -> None:
        """Make the parameters that were loaded into the model Θ, with zero outer momentum and error.

        All replicas call it after the same step, with the same parameters and nothing in flight.

        Raises:
            DisagreementError: if the replicas' parameters or numbers of steps differ; nothing is changed.
            UserError: if something is in flight, or was loaded without its master; nothing is changed.
        """
        self._check_own_parameters("reset_outer")
        self._check_going_on()
        self._membership.reset_outer()
        self._loads.accept()
        self._mark_saved()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included; model and optimizer apart.

        Plain values, and dicts of FP32 tensors by parameter name, views of the engine's own where they can be:
        `outer`, the outer rule's slots (`velocity`), `error`, and `sent`, the decoded outer gradients in flight
        and zeros elsewhere. Keys and shapes are always the same: torch.distributed.checkpoint saves the engine
        itself, and loads in place. Of a sharded model they are DTensors, and every process of the replica must
        call it; examples/sharded_replicas.py resumes on other shards.
        """
        self._check_own_parameters("state_dict")
        self._check_sound()
        state = {"format": FORMAT, **self._membership.state_dict()}
        self._mark_saved()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and send again what was in flight; every replica must load the same step.

        Build the engine on parameters that all replicas share, the initial ones or Θ, and load the model's own
        after that; before or after the engine's does not matter. With nothing in flight, as after `finish()`,
        this engine may have other settings, all but the outer rule's class, and be any replica of any number.
        Then parameters frozen since are ignored, and those unfrozen since start with Θ = θ: load the model first.
        The error is zero unless replica and β are those of the state.

        Raises:
            DisagreementError: if the replicas load different steps, or states of different runs, or do so after
                different numbers of steps.
            UserError: if this engine failed; if the state is not of an engine, of another model, or of other
                settings while something is in flight. A refusal changes nothing, but torch.distributed.checkpoint
                has read into Θ and the slots before: build a new engine then.
        """
        self._check_own_parameters("load_state_dict")
        accepted, unfrozen = self._membership.accepted(state)
        with self._fail_together():
            self._membership.load(accepted)
        self._loads.accept(until_next_step=not unfrozen)
        self._buffers.begin()
        self._mark_saved()

    @property
    def num_steps(self) -> int:
        """Inner steps taken."""
        return self._replica.num_steps

    @property
    def tokens(self) -> int:
        """Tokens that this replica has read: the sum of `step(tokens=…)`, or what the loop sets here."""
        return self._replica.tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self._replica.tokens = _checked_tokens(tokens)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all shards, each destination counted."""
        return self._replica.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all shards from the other replicas that were merged."""
        return self._replica.bytes_received

    @property
    def blocked_seconds(self) -> float:
        """Time in which training has waited for payloads."""
        return self._replica.blocked_seconds

    def logs(self, *, computed: bool = True) -> dict[str, float]:
        """The numbers for a tracker, by names that stay as they are.

        - `num_steps`, `bytes_sent`, `bytes_received`, `blocked_seconds`: as the properties.
        - `encode_seconds`, `merge_seconds`: time spent on making and encoding outer gradients, and on decoding,
          averaging, outer steps and merges, since the engine was built; on a GPU, the time of the CPU.
        - `distance_to_outer`: ‖θ − Θ‖₂ over all fragments and shards, computed now; not where Θ is in the model.
        - `codec_error`: ‖Δ − decode(encode(Δ))‖ / ‖Δ‖ of the fragment sent last, computed now on up to 16,384 of
          its elements a shard, without error feedback; after the first sync.
        - `successive_cosine`: ρ, the cosine of the last two averages of the fragment merged last; and `gain`, the
          part of the outer step along them, η (1 + μ/(1 − μρ)); from the second outer step on.
        - `exchange_mbit_s`: payload bits that this process sent in the last exchange over the seconds until the
          others' had come; `exchange_mbit_s_at_least` in its place if they had come before training needed them.
        - `lateness_seconds/replica_1`, …: how long the last wait waited for the payload of each other replica,
          after those of the replicas before it; with `reduce_scatter` a thread waits, and training maybe not.
        - `last_heard_seconds/replica_1`, …: seconds since a message of each other replica was last taken. Both
          are known to the processes that exchange with other replicas.

        Every process of a sharded replica, and of one under DeepSpeed, must call it, between steps.

        Args:
            computed: with those that are computed now; without them, any process and thread may call it at any
                time.
        """
        logs = begin_logs(self)() if computed else _counters(self._membership)
        if self._stands_in:  # then θ is not in the model
            logs.pop("distance_to_outer", None)
        return logs

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped and sharded as in the model: what to ship.

        They are views, which the next outer step changes; with `offload` of host memory. Of a sharded replica of a
        rendezvous they are copies, and every process must call it. Evaluate a sharded model in
        `outer_parameters_applied`: `functional_call` would silently take the parameters that FSDP has gathered.
        """
        return self._replica.parameters.all_named(self._replica.state.at_home(OUTER))

    @contextmanager
    def outer_parameters_applied(self) -> Iterator[None]:
        """A context in which the model holds Θ; at its end the model gets its own parameters back.

        Evaluate in there, and save a model to ship; inner steps and the engine's state are refused.
        """
        stood_in, num_changes = self._stands_in, self._count_changes()
        with self._loads.undone(), self._replica.parameters.replaced_by(self.outer_parameters()):
            self._stands_in = True
            try:
                yield
            finally:
                self._stands_in = stood_in
        self._num_changes += self._count_changes() - num_changes

    def copy_outer_to_model(self) -> None:
        """Write Θ into the model, and its masters, for good, after `finish()`, so that saving it saves Θ."""
        self._check_own_parameters("copy_outer_to_model")
        self._replica.parameters.leave(self.outer_parameters())

    def outer_hash(self) -> str:
        """SHA-256 over Θ, equal on all replicas after `finish()`; every process of a replica must call it."""
        return parameters_hash(self.outer_parameters(), gathered)

    def _warn_of_buffers(self) -> None:
        """Warn of buffers that differ between replicas; the warning points to the caller of `step`."""
        if self.settings.buffers == "own" and (self.exchange is None or self.exchange.num_replicas > 1):
            way = "" if self.exchange is None else "pass buffers='average', or "
            self._buffers.warn(f"{way}estimate them anew for Θ (torch.optim.swa_utils.update_bn)")

    def _warn_of_unsent(self) -> None:
        """Name the fragments that were never sent; the warning points to the caller of `finish`."""
        if not (unsent := self._membership.initial_fragments()):
            return
        if self.num_steps:
            fragments = self.settings.fragments
            names = ", ".join(f"fragment {p} ({fragments[p].parameters[0]}, …) was never sent" for p in unsent)
            message = (
                f"after {self.num_steps} inner steps {names}, and its outer parameters are the initial ones: call "
                "finish(flush=True), or choose a smaller sync_every"
            )
        else:
            message = f"no inner step was counted, and nothing exchanged: {self._how_to_count()}"
        warnings.warn(message, stacklevel=3)

    def _warn_of_uncounted(self) -> None:
        """Warn of fragments whose last work no outer step has counted; it points to the caller of `finish`."""
        if uncounted := self._membership.uncounted_fragments():
            warnings.warn(lack_of(uncounted), stacklevel=3)

    def _mark_saved(self) -> None:
        """Note that this engine may end after this step: it has finished, or its state was saved or loaded."""
        self._kept_steps, self._num_changes = self.num_steps, self._count_changes()

    def _count_changes(self) -> int:
        """The number of operations that have changed the model's parameters in place."""
        return sum(map(changes_of, self._replica.parameters.by_name.values()))

    def _warn_of_the_end(self) -> None:
        """Warn once which line the loop lacks if work of this engine would be lost; not after its own error."""
        self._is_watched = False
        if self.num_steps > self._kept_steps:
            warning = (
                f"an engine ends after {self.num_steps} inner steps without finish(): what was in flight is lost, "
                "and the model holds this replica's own parameters: add engine.finish() after the loop, unless an "
                "error ended it"
            )
        elif not self.num_steps and self._loads.pending is None and self._count_changes() > self._num_changes:
            warning = (
                f"an engine ends whose model has changed, and no inner step was counted: {self._how_to_count()}"
            )
        else:
            return
        if self._sound and self._membership.failure is None:
            _LOG.warning(warning)

    def _how_to_count(self) -> str:
        """The remedy where no inner step was counted."""
        if self._attachment is None:
            return (
                "add engine.attach(optimizer) before the loop, with the optimizer whose step() it calls, or "
                "engine.step() after each inner step"
            )
        return (
            "step() of the attached optimizer was never called: attach the one whose step() the loop calls, such "
            "as the base optimizer of SAM, or, in the place of attach(), call engine.step() after each inner step"
        )

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """A context for work that succeeds whole: an error ends this engine, and the other replicas hear of it."""
        self._check_sound()
        self._sound = False
        with self._membership.fail_together():
            yield
        self._sound = True

    def _check_own_parameters(self, method: str) -> None:
        """Refuse a method that needs θ while Θ stands in the model."""
        if self._stands_in:
            raise UserError(
                f"engine.{method}() inside outer_parameters_applied(), where the model has Θ in the place of its "
                "own parameters: call it after the context, which is to evaluate, and to save a model to ship"
            )

    def _check_sound(self) -> None:
        """Refuse to use the state that a half-finished step has left."""
        if not self._sound:
            raise UserError(
                f"step {self.num_steps} failed: build a new engine and load the last state that was saved"
            )

    def _check_going_on(self) -> None:
        """Refuse to go on after a failure, here or in another replica."""
        self._check_sound()
        if (failure := self._membership.failure) is not None:
            raise ExchangeError(f"step {self.num_steps}: {failure}")


def _membership(
    settings: Settings,
    model: nn.Module,
    masters: Masters | Mapping[str, Tensor] | None,
    *,
    exchange: Transport | None,
    rendezvous: Rendezvous | None,
    offload: bool,
) -> Membership:
    """This replica among the others, or this process's part in it where a sharded one comes and goes.

    Raises:
        UserError: if the settings contradict each other, the model or the way to the others.
        DisagreementError: if the others were given different settings or initial parameters.
    """
    settings.check(model, None if exchange is None else exchange.num_replicas)
    if exchange is not None:
        settings.check_transport(exchange, model)
        parameters = FragmentParameters(model, settings.fragments, masters)
        state = outer_state(settings, parameters, offload=offload)
        lane = device_lane(parameters.device, exchange.device)
        return FixedMembership(Replica(settings, parameters, state, exchange.replica, lane), exchange)
    assert rendezvous is not None, "one of the two is given"
    settings.check_rendezvous()
    # Imported here, since a fixed group needs nothing of the store, nor of its keys.
    if any(is_sharded(parameter) for parameter in model.parameters() if parameter.requires_grad):
        from diloco.engine.elastic_shards import sharded_membership

        return sharded_membership(settings, rendezvous, model, masters)
    from diloco.engine.elastic import ElasticMembership

    parameters = FragmentParameters(model, settings.fragments, masters)
    state = outer_state(settings, parameters, offload=offload)
    return ElasticMembership(Replica(settings, parameters, state), rendezvous)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Buffers:
    """The persistent floating-point buffers of a model, such as the running statistics of BatchNorm.

    Caches, which are no part of the model's state, and sparse tensors are left out.

    Args:
        model: the replica's copy, as it begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = model.state_dict().keys() & dict(model.named_buffers()).keys()
        self.begin()

    def begin(self) -> None:
        """Remember the present buffers, such as after a load, as those with which training begins."""
        self._digests = self._digests_now()

    def _named(self) -> dict[str, Tensor]:
        named = {name: buffer for name, buffer in self._model.named_buffers() if name in self._names}
        return {
            name: local(buffer)
            for name, buffer in named.items()
            if buffer.layout is torch.strided and buffer.dtype in _DTYPES
            if not (buffer.is_meta or buffer.is_nested)
        }

    def _digests_now(self) -> dict[str, int]:
        return {name: outer_digest(_as_fp32(buffer.reshape(-1))) for name, buffer in self._named().items()}

    def changed(self) -> list[str]:
        """The names of those that have changed since the beginning."""
        return [name for name, digest in self._digests_now().items() if self._digests.get(name) != digest]

    def warn(self, remedy: str) -> None:
        """Name those that training has changed; the warning points to the caller of `step`."""
        if names := self.changed():
            warnings.warn(
                f"training changes buffers, which are not exchanged: {listed(names, 3)} stay each "
                f"replica's own, and the outer parameters are evaluated with them: {remedy}",
                stacklevel=4,
            )

    def average(self, transport: Transport) -> None:
        """Average the buffers that have changed on any replica; all replicas get the same bits.

        Raises:
            ExchangeError: if a replica sends none.
            DisagreementError: if the replicas have different buffers.
        """
        shapes = {f"the shape of buffer {name}": list(buffer.shape) for name, buffer in self._named().items()}
        agree(transport, shapes, remedies=dict.fromkeys(shapes, "leave buffers='average' out"))
        names = {name for changed in share(transport, self.changed(), list[str]) for name in changed}
        buffers = [buffer for name, buffer in self._named().items() if name in names]
        if not buffers:
            return
        own_B = torch.cat([buffer.reshape(-1).to("cpu", torch.float64) for buffer in buffers])
        sent = swap(transport, own_B.numpy().tobytes())
        total_B = torch.zeros_like(own_B)
        for message in sent:  # in the order of the replicas
            total_B += torch.frombuffer(bytearray(message), dtype=torch.float64)
        for buffer, part_B in zip(buffers, (total_B / len(sent)).split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part_B.view(buffer.shape))


def _as_fp32(values: Tensor) -> Tensor:
    """The values as FP32, and an FP64 value as two of them, so that different buffers stay different."""
    return values.contiguous().view(torch.float32) if values.dtype == torch.float64 else values.float()


_LOG = logging.getLogger("diloco")
_WATCHED: "weakref.WeakSet[StreamingDiLoCo]" = weakref.WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    """Check the engines that the program still holds for lost work, unless an error has ended the program."""
    for engine in [*_WATCHED]:
        if engine._is_watched and getattr(sys, "last_value", None) is None:
            engine._warn_of_the_end()
        engine._is_watched = False


def _forget_in_fork() -> None:
    """Leave the engines to the process from which this one was forked."""
    for engine in _WATCHED:
        engine._is_watched = False


os.register_at_fork(after_in_child=_forget_in_fork)


def silence_end_warning(engine: StreamingDiLoCo) -> None:
    """Silence the warning at an engine's end: its loop finishes it, and says itself why it ends early."""
    engine._is_watched = False


def _checked_tokens(tokens: object) -> int:
    """The tokens of an inner step; None is 0.

    Raises:
        UserError: if it is no whole number of 0 or more.
    """
    if tokens is None:
        return 0
    if isinstance(tokens, torch.Tensor):  # whose number may still be on its way from a GPU
        raise UserError("tokens must be a whole number of 0 or more, not a tensor: call .item()", "tokens")
    if not isinstance(tokens, SupportsIndex) or operator.index(tokens) < 0:
        raise UserError(f"tokens must be a whole number of 0 or more, not {tokens!r}", "tokens")
    return operator.index(tokens)


def _checked_loss(loss: object) -> float | Tensor:
    """The training loss of an inner step.

    Raises:
        UserError: for what is not a number.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    if isinstance(loss, SupportsFloat) and not isinstance(loss, Tensor):
        return float(loss)
    raise UserError(f"loss must be a number, or a tensor of one, not {loss!r}", "loss")


def _counters(membership: Membership) -> dict[str, float]:
    """The logs that need no computation: counters, times, the last exchange, the other replicas' answers."""
    replica, record = membership.replica, membership.replica.record
    values: dict[str, float] = {
        "num_steps": replica.num_steps,
        "bytes_sent": replica.bytes_sent,
        "bytes_received": replica.bytes_received,
        "blocked_seconds": replica.blocked_seconds,
        "encode_seconds": record.encode_seconds,
        "merge_seconds": record.merge_seconds,
    }
    if record.exchange_mbit_s is not None:
        name = "exchange_mbit_s" if record.was_waited_for else "exchange_mbit_s_at_least"
        values[name] = record.exchange_mbit_s
    if (answers := membership.answers) is not None:
        lateness, heard_at, now = answers.lateness_seconds, answers.heard_at, time.monotonic()
        values |= {f"lateness_seconds/replica_{other}": seconds for other, seconds in sorted(lateness.items())}
        values |= {f"last_heard_seconds/replica_{other}": now - then for other, then in sorted(heard_at.items())}
    return {name: float(value) for name, value in values.items()}


def begin_logs(engine: StreamingDiLoCo) -> Callable[[], dict[str, float]]:
    """Start computing an engine's logs as of now; the returned function waits for them."""
    membership, replica = engine._membership, engine._replica
    errors = replica.record.codec_errors(replica.settings.wire)
    none = torch.zeros(2, dtype=torch.float32, device=replica.parameters.device)
    samples = next(reversed(replica.samples.values()), None)
    products = products_of(samples, none.device)
    squares = torch.cat(
        [_squared_distance(membership)[None], none if errors is None else torch.stack(errors), products]
    )
    squares, counted = begin_to_host(replica.parameters.group.reduce(squares)), _counters(membership)

    def read() -> dict[str, float]:
        values = squares()
        distance, error, delta = values[:3].tolist()
        computed = {"distance_to_outer": math.sqrt(distance)}
        if errors is not None or delta:  # where replicas come and go, the first process of one has the sample
            computed["codec_error"] = math.sqrt(error / delta) if delta else 0.0
        if (rho := cosine_of(values[3:])) is not None:
            computed["successive_cosine"] = rho
            if (gain := replica.settings.outer.gain(rho)) is not None:
                computed["gain"] = gain
        return counted | computed

    return read


def _squared_distance(membership: Membership) -> Tensor:
    """‖θ − Θ‖² over the elements that this process holds."""
    parameters = membership.replica.parameters
    total = torch.zeros((), dtype=torch.float32, device=parameters.device)
    for p, home_N in enumerate(membership.replica.state.at_home(OUTER)):
        outer_N = home_N.to(parameters.device)
        delta_N = parameters.outer_gradient(p, outer_N, torch.empty_like(outer_N))
        total += torch.linalg.vector_norm(delta_N).square()
    membership.expect_next()
    return total


def uncounted_tokens(engine: StreamingDiLoCo) -> float:
    """Tokens that a replica has read and no outer step has counted yet, on average over the fragments."""
    return engine._membership.uncounted_tokens


def check_job(num_processes: int, engine: StreamingDiLoCo) -> Transport:
    """The exchange of an engine in a framework's job.

    The processes of a framework's job can't be replicas: they average their gradients at every step. Nor can the
    job come and go: a framework that starts again begins its text again, and leaves no run at its end.

    Raises:
        UserError: that says how to start the replicas.
    """
    if (rendezvous := engine.rendezvous) is not None:
        with suppress(DilocoError):  # the engine has joined
            rendezvous.leave()
        raise UserError(
            "a framework's job can't be a replica that comes and goes: train with diloco's own trainer, or in a "
            "loop of your own, which reads from rendezvous.slot and rendezvous.start, or join the jobs with "
            "exchange=diloco.connect(...)",
            "rendezvous",
        )
    assert engine.exchange is not None, "one of the two is given"
    if num_processes > 1 and isinstance(engine.exchange, ProcessGroupExchange):
        raise UserError(
            f"the {num_processes} processes of this job average their gradients, and can't be replicas: start a "
            "job with exchange=diloco.connect(...) for each replica",
            "exchange",
        )
    return engine.exchange


def is_trained_by(engine: StreamingDiLoCo, optimizer: object) -> bool:
    """True if an optimizer trains a parameter that the engine exchanges."""
    own = {id(parameter) for parameter in engine._replica.parameters.by_name.values()}
    return any(id(parameter) in own for _, parameter in trained_by(optimizer))


def check_optimizers(engine: StreamingDiLoCo, optimizers: Sequence[object]) -> None:
    """Refuse optimizers of other parameters than the engine's; a warning names those that they train beside them.

    Raises:
        UserError: if none trains a parameter that the engine exchanges, or one is no optimizer, or lacks the
            wrapper that the masters name.
    """
    parameters = engine._replica.parameters
    if not parameters.has_masters:  # else the optimizer may train these
        check_trains(optimizers, parameters.by_name)
    elif parameters.wrapper is not None:
        check_wrapped(optimizers, parameters.wrapper)
