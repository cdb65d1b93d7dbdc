"""Other ways to keep replicas together, in the engine's place in the training loop: none, DDP, torchft."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from diloco.files import require
from diloco.outer.nesterov import Nesterov
from diloco.outer.rules import rules_of
from diloco.outer.step import parameters_hash
from diloco.training.config.config import DilocoConfig
from diloco.training.state import TrainState
from diloco.training.world import World


class Alone:
    """No exchange: inner steps while all replicas compute."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.forward, self.bytes_sent = model, model, 0
        self.last_gradient = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def passes(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> tuple[()]:
        return ()

    def finish(self) -> tuple[()]:
        return ()

    def outer_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @contextmanager
    def outer_parameters_applied(self) -> Iterator[None]:
        """The model with the outer parameters in the place of its own."""
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict(self.outer_parameters())
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def outer_hash(self) -> str:
        return parameters_hash(self.outer_parameters())

    def close(self) -> None:
        """End threads and connections."""


class DDP(Alone):
    """torch's DistributedDataParallel as its documentation recommends it.

    Args:
        model: the replica's copy.
        options: the bucket size in MB, and after a comma `bf16` for the bf16 hook.
    """

    def __init__(self, model: nn.Module, options: str) -> None:
        super().__init__(model)
        bucket_mb, *hook = options.split(",")
        self.forward = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=float(bucket_mb)
        )
        if hook:
            # By another name: torch refuses its own hook on gloo, although gloo can add in bf16.
            self.forward.register_comm_hook(dist.group.WORLD, _compress_to_bf16)


def _compress_to_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return bf16_compress_hook(group, bucket)


class Torchft(Alone):
    """torchft's streaming DiLoCo: the engine's fragments, at most one of them in flight."""

    def __init__(self, state: TrainState, settings: DilocoConfig, world: World, lighthouse: str) -> None:
        torchft, local_sgd = require("torchft", extra="peers"), require("torchft.local_sgd", extra="peers")
        super().__init__(state.model)
        model, hour = state.model, timedelta(hours=1)
        num_blocks = len(model.blocks) // settings.layers_per_fragment
        parts: list[nn.Module] = [nn.ModuleList(model.blocks[b::num_blocks]) for b in range(num_blocks)]
        self.parts = [*parts, nn.ModuleList([model.get_submodule("embedding"), model.get_submodule("norm")])]
        address = os.environ["REPLICA_ADDRESS"]
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.group = torchft.ProcessGroupGloo(timeout=hour)
        self.manager = torchft.Manager(
            pg=self.group,
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=world.num_replicas,
            use_async_quorum=False,
            timeout=hour,
            quorum_timeout=hour,
            connect_timeout=timedelta(seconds=60),
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{world.replica}",
            hostname=address,
            heartbeat_interval=timedelta(seconds=1),
            init_sync=False,
            max_retries=0,
        )
        rule = rules_of(settings)[0]
        assert isinstance(rule, Nesterov), "torchft's outer optimizer here"
        lr, momentum = rule.lr, rule.momentum
        self.diloco = local_sgd.DiLoCo(
            self.manager,
            self.parts,
            state.optimizer,
            [torch.optim.SGD(part.parameters(), lr=lr, momentum=momentum, nesterov=True) for part in self.parts],
            sync_every=settings.sync_every,
            use_bucketization=True,
            should_quantize=False,
            fragment_sync_delay=settings.sync_every // len(self.parts) - 1,
            fragment_update_alpha=0.5,
        )
        self.manager.start_quorum()  # joins the others, and connects, before the clock starts
        self.diloco.__enter__()

    def outer_parameters(self) -> dict[str, Tensor]:
        """The outer parameters, which torchft calls the original ones."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        outer: dict[str, Tensor] = {}
        for part, fragment in zip(self.parts, self.diloco._fragments, strict=True):
            for name, parameter in part.named_parameters():
                outer[names[id(parameter)]] = fragment.original_parameters[name]
        return outer

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        self.group.shutdown()
