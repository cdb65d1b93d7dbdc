"""A replica of torchft's streaming DiLoCo, as its documentation sets it up, until it is killed."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peer_study.common import ALPHA, Diary, Training, settings_of_arguments


def main() -> None:
    torchft, local_sgd = importlib.import_module("torchft"), importlib.import_module("torchft.local_sgd")
    settings = settings_of_arguments()
    diary = Diary(settings.diary)
    traffic = [0]
    training = Training(settings, diary, lambda: (traffic[0], traffic[0]))
    model, optimizer = training.model, training.optimizer
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=settings.num_replicas - 1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=settings.url,
        replica_id=f"replica{settings.name}",
        hostname="127.0.0.1",
        init_sync=False,  # the seed is the same
    )
    group.allreduce = _counting(group.allreduce, manager, traffic, diary)
    parts = [model.get_submodule(f"blocks.{p}") for p in range(settings.num_fragments)]
    with local_sgd.DiLoCo(
        manager,
        parts,
        optimizer,
        [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts],
        sync_every=settings.sync_every,
        use_bucketization=True,
        fragment_sync_delay=settings.overlap_steps,
        fragment_update_alpha=ALPHA,
    ) as outer:
        for p, fragment in enumerate(outer._fragments):
            fragment.perform_sync = _noting(p, fragment.perform_sync, training, diary, settings.overlap_steps)
        diary.note("joined")
        while True:
            training.inner_step()


def _counting(allreduce: Callable[..., Any], manager: Any, traffic: list[int], diary: Diary) -> Callable[..., Any]:
    """`allreduce`, with the bytes that each of M members sends at the least: 2 (M − 1) / M of the tensor's."""

    def counted(tensors: list[torch.Tensor], options: Any) -> Any:
        diary.sending()
        num_members = manager.num_participants()
        traffic[0] += sum(tensor.nbytes for tensor in tensors) * 2 * (num_members - 1) // num_members
        return allreduce(tensors, options)

    return counted


def _noting(
    p: int, perform_sync: Callable[[], bool], training: Training, diary: Diary, delay_steps: int
) -> Callable[[], bool]:
    """`perform_sync` of a fragment, noted. One that fails puts θ_p back to what it was H steps ago."""
    aligned_step = 0

    def noted() -> bool:
        nonlocal aligned_step
        committed = perform_sync()
        lost_steps = (1 - ALPHA) * delay_steps if committed else float(training.num_steps - aligned_step)
        training.outer_step(p, lost_steps=lost_steps, counted=committed)
        if committed:
            diary.note("commit")
        aligned_step = training.num_steps
        return committed

    return noted


if __name__ == "__main__":
    main()
