"""The parameters of a sharded replica, whose flat vectors hold whole fragments, in its first process alone.

So the first process can be the replica for all others, with the bits of a replica of one process. In its other
processes the flat vectors are empty.

Shapes: N elements of one fragment in the first process, and 0 in the others; n those of a process's own shards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from diloco.engine.masters import Masters
from diloco.engine.parameters import FragmentParameters
from diloco.engine.sharded import is_sharded, joined, local, sharded_like
from diloco.exchange.gloo import group_like
from diloco.exchange.inside import Call, Inside
from diloco.fragments import Fragment
from diloco.kernels.memory import empty


class GatheredParameters(FragmentParameters):
    """A sharded model's parameters by fragment; every process calls the same methods in the same order.

    Where the first process alone knows what comes next, it calls `flat`, `outer_gradient` and `merging`, and the
    others answer with `give` and `take`.

    Args:
        model: sharded over the replica's processes.
        fragments: a partition of its trainable parameters.
        masters: as of `FragmentParameters`.
        timeout_seconds: how long a wait for another process of the replica may take.

    Raises:
        UserError: as `FragmentParameters`.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        masters: Masters | Mapping[str, Tensor] | None = None,
        *,
        timeout_seconds: float,
    ) -> None:
        super().__init__(model, fragments, masters)
        assert self.shard_group is not None, "the model is sharded"
        self.shard_group = group_like(self.shard_group, timeout_seconds)
        self.inside = Inside(self.shard_group, timeout_seconds)
        """The replica's processes."""
        self.part, self.device = (0, 1), torch.device("cpu")

    @staticmethod
    def shape_in_flat(parameter: Tensor) -> torch.Size:
        """The shape of what a flat vector holds of a parameter: the whole."""
        return parameter.shape

    def flat(self, fragment: int) -> Tensor:
        """A copy of θ_p, FP32 (N)."""
        self.inside.together(Call.THETA, fragment)
        return self.give(fragment)

    def outer_gradient(self, fragment: int, outer_N: Tensor, to_N: Tensor) -> Tensor:
        """Write Δ_{m,p} = Θ_p − θ_{m,p} to `to_N`, and return it."""
        return torch.sub(outer_N, self.flat(fragment), out=to_N)

    @contextmanager
    def merging(self, fragment: int, step: int) -> Iterator[list[Tensor]]:
        """θ_p, whole, to be changed in place by a merge; all shards have the new values at the end."""
        theta_N = self.flat(fragment)
        yield self._parts(fragment, theta_N) if self.inside.is_first else []
        self.inside.together(Call.MERGE, fragment)
        self.take(fragment, step, theta_N)

    def give(self, fragment: int) -> Tensor:
        """Gather θ_p, FP32 (N): every process's part of `flat`."""
        return self._gathered(fragment, self.theta(fragment))

    def take(self, fragment: int, step: int, theta_N: Tensor | None = None) -> None:
        """Take this process's shards of θ_p after a merge, which the first process has whole."""
        with super().merging(fragment, step) as theta:
            parts = self._scattered(fragment, theta_N).split([own.numel() for own in theta])
            for own, part_n in zip(theta, parts, strict=True):
                own.copy_(part_n.view(own.shape))

    def named(self, fragment: int, flat_N: Tensor) -> dict[str, Tensor]:
        """A fragment's flat vector (N) by parameter name: copies in host memory, sharded as the parameters are."""
        self.inside.together(Call.SCATTER, fragment)
        shards = self.shards(fragment)
        parts = self._scattered(fragment, flat_N).split([shard.numel() for shard in shards])
        likes = self._by_fragment[fragment].items()
        return {
            name: sharded_like(part_n.view(shard.shape), like)
            for (name, like), shard, part_n in zip(likes, shards, parts, strict=True)
        }

    def flat_of(self, fragment: int, by_name: Mapping[str, Tensor]) -> Tensor:
        """A fragment's flat FP32 vector (N), from tensors by parameter name, sharded as the parameters are."""
        self.inside.together(Call.GATHER, fragment)
        return self._gathered(fragment, [by_name[name] for name in self._by_fragment[fragment]])

    def all_or_none(self, another: str) -> AbstractContextManager[None]:
        """A context that fails in all processes of this replica if it fails in one, as soon as they next meet."""
        return self.inside.failing_together()

    def _gathered(self, fragment: int, tensors: Iterable[Tensor]) -> Tensor:
        """The whole of what every process has its shards of, FP32 (N)."""
        own_n = joined(local(tensor).cpu() for tensor in tensors)
        if not self.inside.is_first:
            self.inside.send(own_n, 0)
            return own_n.new_empty(0)
        shapes = [self.shape_in_flat(parameter) for parameter in self._by_fragment[fragment].values()]
        whole_N = empty(sum(shape.numel() for shape in shapes), torch.float32, self.device)
        for index, parts in enumerate(self._cut(fragment, whole_N)):
            sizes = [part.numel() for part in parts]
            shard_n = self.inside.receive(index, sum(sizes)) if index else own_n
            for part, part_n in zip(parts, shard_n.split(sizes), strict=True):
                part.copy_(part_n.view(part.shape))
        return whole_N

    def _scattered(self, fragment: int, whole_N: Tensor | None) -> Tensor:
        """This process's shards (n) of what the first process has whole."""
        if not self.inside.is_first:
            return self.inside.receive(0, sum(shard.numel() for shard in self.shards(fragment)))
        assert whole_N is not None, "the first process has the whole"
        shards = self._cut(fragment, whole_N)
        for index in range(1, len(shards)):
            self.inside.send(joined(shards[index]), index)
        return joined(shards[0])

    def _cut(self, fragment: int, whole_N: Tensor) -> list[list[Tensor]]:
        """Views of every process's shards of a whole flat vector, parameter by parameter."""
        parameters = self._by_fragment[fragment].values()
        parts = zip(parameters, self._parts(fragment, whole_N), strict=True)
        return [list(shards) for shards in zip(*(cut(part, parameter) for parameter, part in parts), strict=True)]


def cut(whole: Tensor, like: Tensor) -> list[Tensor]:
    """Views of the shards of a tensor, some of them empty, as a DTensor of its shape is cut.

    Args:
        whole: of any memory and dtype.
        like: a DTensor on a mesh of one dimension, cut into shards.
    """
    assert is_sharded(like), "the model is sharded"
    dim = like.placements[0].dim  # pyright: ignore[reportAttributeAccessIssue]
    chunks = whole.chunk(like.device_mesh.size(), dim)
    shards = [*chunks, *[whole.narrow(dim, 0, 0)] * (like.device_mesh.size() - len(chunks))]
    own = shards[like.device_mesh.get_local_rank()]
    assert own.shape == local(like).shape, "a shard is a chunk of torch.chunk"
    return shards
