"""The parameters of a model by fragment, and each fragment as one flat FP32 vector.

A process of a sharded replica sees, and exchanges, the shards that it holds.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diloco.fragments import Fragment, block_spans
from diloco.native import empty
from diloco.sharded import joined, local, reshard, shard_group, sharded_like


class FragmentParameters:
    """What fragments name, in the order in which they name it.

    Args:
        model: their model.
        fragments: a partition of its trainable parameters.

    Raises:
        ValueError: if the parameters are not all cut into shards alike.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model, named = model, dict(model.named_parameters())
        self._of = [{name: named[name] for name in fragment.parameters} for fragment in fragments]
        self.shard_group = shard_group({name: p for part in self._of for name, p in part.items()})
        """The processes that hold a replica's shards; None if it is one process."""
        self.device = self.shards(0)[0].device
        """Where they are, all of them."""
        sizes = {name: local(parameter).numel() for name, parameter in named.items()}
        self.spans = [block_spans(fragment, sizes) for fragment in fragments]
        """Where the blocks of each fragment lie in its flat vector."""

    def shards(self, fragment: int) -> list[Tensor]:
        """The parameters, or this process's shards of them, in their own memory."""
        return [local(parameter) for parameter in self._of[fragment].values()]

    def flat(self, fragment: int) -> Tensor:
        """A copy of a fragment, FP32 (N)."""
        shards = self.shards(fragment)
        return joined(shards, empty(sum(shard.numel() for shard in shards), torch.float32, self.device))

    def outer_gradient(self, fragment: int, outer_N: Tensor, to_N: Tensor) -> Tensor:
        """Δ_{m,p} = Θ_p − θ_{m,p}, written to the vector that is given."""
        shards = self.shards(fragment)
        sizes = [shard.numel() for shard in shards]
        for shard, part_N, out_N in zip(shards, outer_N.split(sizes), to_N.split(sizes), strict=True):
            torch.sub(part_N.view(shard.shape), shard, out=out_N.view(shard.shape))
        return to_N

    def named(self, fragment: int, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of a fragment's flat vector, by parameter name, shaped and sharded as the parameters are."""
        shards = self.shards(fragment)
        parts = flat_N.split([shard.numel() for shard in shards])
        return {
            name: sharded_like(part_N.view(shard.shape), parameter)
            for (name, parameter), shard, part_N in zip(self._of[fragment].items(), shards, parts, strict=True)
        }

    def all_named(self, flat: Iterable[Tensor]) -> dict[str, Tensor]:
        """The same of the flat vectors of all fragments, in order."""
        return {
            name: view
            for fragment, flat_N in enumerate(flat)
            for name, view in self.named(fragment, flat_N).items()
        }

    def joined(self, fragment: int, by_name: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of what stands under a fragment's names, FP32 (N)."""
        return joined(by_name[name] for name in self._of[fragment])

    def first_not_finite(self, fragment: int, flat_N: Tensor) -> str | None:
        """The first parameter for which a flat vector holds NaN or an infinity."""
        parts = self.named(fragment, flat_N).items()
        return next((name for name, part in parts if not local(part).isfinite().all()), None)

    def places(self) -> dict[str, list[object]]:
        """Of each parameter its shape in this process, its fragment, and where it begins there."""
        places: dict[str, list[object]] = {}
        for fragment, parameters in enumerate(self._of):
            start = 0
            for name, shard in zip(parameters, self.shards(fragment), strict=True):
                places[name] = [list(shard.shape), fragment, start]
                start += shard.numel()
        return places

    @contextmanager
    def replaced_by(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with others' values, by name; at the end it gets its own back, which are kept on the side."""
        own = [(shard, shard.clone()) for fragment in range(len(self._of)) for shard in self.shards(fragment)]
        reshard(self._model)
        try:
            for part in self._of:
                for name, parameter in part.items():
                    local(parameter).copy_(local(others[name]))
            yield
        finally:
            for shard, kept in own:
                shard.copy_(kept)
            reshard(self._model)

    def check_unchanged(self, fragments: Iterable[int]) -> None:
        """Refuse to leave out parameters that need a gradient by now, or to send ones that the model has no more.

        Raises:
            ValueError: naming the parameter.
        """
        placed = {name for part in self._of for name in part}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in placed:
                raise ValueError(
                    f"parameter {name} was unfrozen or added after the fragments were cut, and would differ "
                    "between the replicas: cut them, and build the engine, after that"
                )
        for fragment in fragments:
            for name, parameter in self._of[fragment].items():
                if self._model.get_parameter(name) is not parameter:
                    raise ValueError(
                        f"parameter {name} was replaced after the engine was built, as "
                        "load_state_dict(assign=True), tying, and fully_shard do: build the engine last"
                    )
