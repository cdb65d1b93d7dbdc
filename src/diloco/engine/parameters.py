"""The parameters of a model by fragment, and each fragment as one flat FP32 vector.

A replica may be several processes: its parameters are DTensors then, of which each process holds a shard. Where n
processes hold the same shard, along a dimension of the mesh on which it is replicated, each has a *part* of it,
one of n chunks along its first dimension. So the parts of all processes are the parameters, each element once.
Process i of a replica exchanges its parts with process i of the others, and a merge ends with an all-gather among
the n. For a replica of one process, the functions at the end return its plain tensors.

Shapes: N elements of one fragment of which this process has the part, K sampled ones.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco.errors import UserError
from diloco.exchange.private_torch import dtensor_like, is_cut_again, timeout_seconds_of
from diloco.exchange.process_group import TorchGroup
from diloco.exchange.transport import Group, OneProcess
from diloco.fragments import Fragment, block_spans
from diloco.outer.digest import outer_digest_on_device, parameters_hash
from diloco.outer.rule import Span
from diloco.wire.kernels.memory import begin_to_host, empty

if TYPE_CHECKING:  # they take a second to import, and most replicas are one process
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

INITIAL = "initial parameters (SHA-256)"
"""The fact that proves the initial parameters equal."""


class Masters(Protocol):
    """Access to weights that an optimizer updates in the place of the model's parameters; they are θ then.

    Every process of a replica calls both methods for the same parameters in the same order. An optimizer whose
    parameters are not θ in training has a third one, `expose`, as in `ScheduleFreeMasters`. Where a wrapper's step
    is the inner step, `wrapper` is it, as in `DeepSpeedMasters`.
    """

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The FP32 masters of these parameters, by name, shaped, sharded and placed as the parameters are.

        Before `write` the engine may change them in place.
        """
        ...

    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Take masters that a merge has changed, by name, and give the model's parameters the new values."""
        ...


class MasterTensors:
    """Masters that are plain tensors, as Apex and most mixed-precision optimizers keep them.

    Args:
        model: the replica's copy.
        tensors: the FP32 master of each parameter, by its name in the model; looked up anew at each use.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._parameters, self._tensors = dict(model.named_parameters()), tensors

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors themselves.

        Raises:
            UserError: naming a parameter that has none.
        """
        for name in names:
            if name not in self._tensors:
                raise UserError(f"masters has no tensor for parameter {name}: give one per parameter", "masters")
        return {name: self._tensors[name] for name in names}

    @torch.no_grad()
    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Take masters, which a merge changes in place, and round them to the parameters' dtype."""
        for name, master in masters.items():
            if _memory_of(self._tensors[name]) != _memory_of(master):
                local(self._tensors[name]).copy_(local(master))
            local(self._parameters[name]).copy_(local(master))


def masters_of(model: nn.Module, masters: "Masters | Mapping[str, Tensor] | None") -> Masters | None:
    """The adapter that the user gave, or one for the tensors that he gave.

    Raises:
        UserError: if it is neither.
    """
    if isinstance(masters, Mapping):
        return MasterTensors(model, masters)
    if masters is None or (hasattr(masters, "read") and hasattr(masters, "write")):
        return masters
    raise UserError(
        f"masters={masters!r} must map each parameter's name to its FP32 tensor, or be an adapter of "
        "diloco.integrations, with read() and write()",
        "masters",
    )


def check_master(name: str, master: Tensor, parameter: Tensor) -> None:
    """Refuse a master that the engine can't compute with.

    Raises:
        UserError: naming the parameter.
    """
    actual, expected = local(master), local(parameter)
    if (actual.dtype, actual.shape, actual.device) != (torch.float32, expected.shape, expected.device):
        raise UserError(
            f"the master of parameter {name} is {tuple(actual.shape)}, {actual.dtype}, on {actual.device}: it "
            f"must be {tuple(expected.shape)}, torch.float32, on {expected.device}",
            "masters",
        )


class FragmentParameters:
    """A model's parameters by fragment, in the fragments' order.

    Args:
        model: on one device.
        fragments: a partition of its trainable parameters.
        masters: the weights that the optimizer keeps beside them, which are θ then.

    Raises:
        UserError: if the parameters are not all cut into shards alike, or the masters are not those of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        masters: Masters | Mapping[str, Tensor] | None = None,
    ) -> None:
        reshard(model)
        self._model, named = model, dict(model.named_parameters())
        self._by_fragment = [{name: named[name] for name in fragment.parameters} for fragment in fragments]
        self._kinds = {name: (parameter.dtype, parameter.device) for name, parameter in named.items()}
        self.group = replica_group({name: p for part in self._by_fragment for name, p in part.items()})
        """The processes that hold this replica's shards."""
        self.part = self.group.index, self.group.size
        """The part of the parameters that the flat vectors hold, and the number of parts."""
        self.device = self.shards(0)[0].device
        """The device of the flat vectors, and of all parameters."""
        sizes = {name: self.shape_in_flat(parameter).numel() for name, parameter in self.by_name.items()}
        self.spans = [block_spans(fragment, sizes) for fragment in fragments]
        """The places of each fragment's blocks in its flat vector."""
        self.places = [dict(self._places(part)) for part in self._by_fragment]
        """The places of each fragment's parameters in its flat vector, in their order."""
        self.watch = MergeWatch()
        """Guards the merges."""
        self._merge_hooks: OrderedDict[int, Callable[[tuple[str, ...]], object]] = OrderedDict()
        self._masters = masters_of(model, masters)

    @staticmethod
    def shape_in_flat(parameter: Tensor) -> torch.Size:
        """The shape of what a flat vector holds of a parameter: this process's part."""
        return part_of(local(parameter), parameter).shape

    def _places(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Span]]:
        start = 0
        for name, parameter in parameters.items():
            yield name, (span := Span(tuple(self.shape_in_flat(parameter)), start))
            start = span.stop

    def sum_over_parts(self, values: Tensor) -> Tensor:
        """The sum over the processes whose flat vectors are the replica's together; all of them call it."""
        return self.group.reduce(values)

    @property
    def has_masters(self) -> bool:
        """True if the optimizer updates other weights, which are θ."""
        return self._masters is not None

    @property
    def wrapper(self) -> object | None:
        """The wrapper whose step is the inner step, if the masters name one."""
        return getattr(self._masters, "wrapper", None)

    def check_masters(self, trained: Iterable[Tensor] | None = None) -> None:
        """Refuse masters that are plain tensors, and of which a parameter is not the rounded value.

        Args:
            trained: tensors that an optimizer trains; only masters in their memory are looked at. None is all.

        Raises:
            UserError: naming the parameter.
        """
        if not isinstance(self._masters, MasterTensors):
            return
        places = None if trained is None else {_memory_of(tensor) for tensor in trained}
        for fragment, parameters in enumerate(self._by_fragment):
            for (name, parameter), master in zip(parameters.items(), self._theta_shards(fragment), strict=True):
                own, is_trained = local(parameter), places is None or _memory_of(master) in places
                if is_trained and not torch.equal(master.to(own.dtype), own):
                    raise UserError(
                        f"parameter {name} was loaded without its master, which has another value, and which an "
                        "inner step writes over the parameter: copy the model into the masters, or save and load "
                        "them with it",
                        "masters",
                    )

    @property
    def has_master_tensors(self) -> bool:
        """True if the masters are plain tensors."""
        return isinstance(self._masters, MasterTensors)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters of all fragments."""
        return {name: parameter for part in self._by_fragment for name, parameter in part.items()}

    def shards(self, fragment: int) -> list[Tensor]:
        """The parameters, or this process's shards of them, in their own memory."""
        return [local(parameter) for parameter in self._by_fragment[fragment].values()]

    def theta(self, fragment: int) -> list[Tensor]:
        """This process's parts of θ_p, tensor by tensor, in the memory of the masters or of the parameters.

        Raises:
            UserError: naming a master that is not its parameter's.
        """
        return self._parts_of(fragment, self._theta_shards(fragment))

    def _theta_shards(self, fragment: int) -> list[Tensor]:
        if self._masters is None:
            return self.shards(fragment)
        parameters = self._by_fragment[fragment]
        masters = self._masters.read(tuple(parameters))
        for name, parameter in parameters.items():
            check_master(name, masters[name], parameter)
        return [local(masters[name]) for name in parameters]

    def _parts_of(self, fragment: int, shards: Iterable[Tensor]) -> list[Tensor]:
        likes = self._by_fragment[fragment].values()
        return [part_of(shard, like) for shard, like in zip(shards, likes, strict=True)]

    @contextmanager
    def merging(self, fragment: int, step: int) -> Iterator[list[Tensor]]:
        """θ_p, to be changed in place by a merge after an inner step; the model has the new values at the end.

        Raises:
            UserError: naming a parameter that the model does not have any more.
        """
        self._check_in_model(fragment, where=f"step {step}: ")
        parameters, before_K = self._by_fragment[fragment], sample(self.shards(fragment))
        shards = self._theta_shards(fragment)
        yield self._parts_of(fragment, shards)
        spread(shards, [*parameters.values()])
        if self._masters is not None:
            named = zip(parameters.items(), shards, strict=True)
            self._masters.write({name: sharded_like(master, like) for (name, like), master in named})
        self.watch.merged(fragment, step, before_K, self.shards(fragment))
        for hook in tuple(self._merge_hooks.values()):
            hook(tuple(parameters))

    def on_merge(self, hook: Callable[[tuple[str, ...]], object]) -> RemovableHandle:
        """Call `hook(names)` after each merge with the names of the changed parameters, until its removal."""
        handle = RemovableHandle(self._merge_hooks)
        self._merge_hooks[handle.id] = hook
        return handle

    def look_at_merges(self, step: int) -> None:
        """Judge the merges that this inner step follows."""
        for fragment in tuple(self.watch.merges):
            self.watch.look(fragment, step, self.shards(fragment))

    def flat(self, fragment: int) -> Tensor:
        """A copy of θ_p, FP32 (N)."""
        shards = self.theta(fragment)
        return joined(shards, empty(sum(shard.numel() for shard in shards), torch.float32, self.device))

    def outer_gradient(self, fragment: int, outer_N: Tensor, to_N: Tensor) -> Tensor:
        """Write Δ_{m,p} = Θ_p − θ_{m,p} to `to_N`, and return it."""
        theta, results = self.theta(fragment), self._parts(fragment, to_N)
        if all(own.device.type == "cpu" and own.dtype == torch.float32 for own in theta):
            for own, part, result in zip(theta, self._parts(fragment, outer_N), results, strict=True):
                torch.sub(part, own, out=result)  # one pass over memory
            return to_N
        torch._foreach_copy_(results, theta)  # two launches, however many tensors there are
        return torch.sub(outer_N, to_N, out=to_N)

    def named(self, fragment: int, flat_N: Tensor) -> dict[str, Tensor]:
        """A fragment's flat vector (N) by parameter name, sharded as the parameters are: views, of whole shards.

        Every process of the replica must call it.
        """
        return self._sharded(fragment, self._parts(fragment, flat_N))

    def _sharded(self, fragment: int, parts: Iterable[Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter name, sharded as the parameters are, from every process's parts of them."""
        shards, named = [], self._by_fragment[fragment]
        for part, like in zip(parts, named.values(), strict=True):
            if is_sharded(like) and _replicated(like):
                shards.append(part.new_empty(local(like).shape))
                part_of(shards[-1], like).copy_(part)
            else:
                shards.append(part)
        spread(shards, [*named.values()])
        return {name: sharded_like(shard, like) for (name, like), shard in zip(named.items(), shards, strict=True)}

    def all_named(self, flat: Iterable[Tensor]) -> dict[str, Tensor]:
        """The flat vectors of all fragments, given in order, by parameter name, as `named`."""
        return {
            name: view
            for fragment, flat_N in enumerate(flat)
            for name, view in self.named(fragment, flat_N).items()
        }

    def flat_of(self, fragment: int, by_name: Mapping[str, Tensor]) -> Tensor:
        """A fragment's flat FP32 vector (N), from tensors by parameter name, sharded as the parameters are.

        It lies where the first of them does; of a saved state some may lie in host memory.
        """
        parts = self._parts_of(fragment, (local(by_name[name]) for name in self._by_fragment[fragment]))
        return joined(part.to(parts[0].device) for part in parts)

    def fail_together(self, another: str) -> AbstractContextManager[None]:
        """A context that fails in all shards of this replica if it fails in one; `another` is one in messages."""
        return self.group.fail_together(another)

    def names_in_model(self) -> set[str]:
        """The names of all parameters of the model, frozen ones included."""
        return {name for name, _ in self._model.named_parameters()}

    def first_not_finite(self, fragment: int, flat_N: Tensor) -> str | None:
        """The first parameter for which a flat vector holds NaN or an infinity."""
        parts = zip(self._by_fragment[fragment], self._parts(fragment, flat_N), strict=True)
        return next((name for name, part in parts if not part.isfinite().all()), None)

    def facts(self, initial: Iterable[Tensor]) -> dict[str, Any]:
        """The facts on which all replicas must agree: shards, shapes, places, values.

        Args:
            initial: θ before the first step, a flat vector (N) for each fragment in order.
        """
        name_of_shard = (
            "which shard of how many this process holds (a replica's mesh has no process of another replica)"
        )
        facts: dict[str, Any] = {name_of_shard: list(self.part)}
        # Θ would differ between replicas in the numbers below 2^-126.
        flushes = (torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1.0 == 0).item()
        facts["whether the CPU flushes subnormal numbers to zero (torch.set_flush_denormal)"] = flushes
        values: dict[str, Tensor] = {}
        for fragment, flat_N in enumerate(initial):
            for name, span in self.places[fragment].items():
                facts[f"shape, fragment and place of parameter {name}"] = [list(span.shape), fragment, span.start]
                values[name] = span.of(flat_N)
        return {**facts, INITIAL: parameters_hash(values)}

    @contextmanager
    def replaced_by(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the parameters other values, by name, and put their own back at the end.

        Raises:
            UserError: naming a parameter that the model does not have, at the beginning or at the end.
        """
        self._check_all_in_model()
        shards = [local(parameter) for part in self._by_fragment for parameter in part.values()]
        own, undo = [(shard, shard.clone()) for shard in shards], self._expose()
        try:
            self.set(others)
            yield
        finally:
            for shard, kept in own:
                shard.copy_(kept)
            undo()
            reshard(self._model)
        self._check_all_in_model()

    def _expose(self) -> Callable[[], None]:
        """Tell masters that ask for it that the parameters stand for θ; the returned function undoes it."""
        expose = getattr(self._masters, "expose", None)
        return (lambda: None) if expose is None else expose()

    def set(self, others: Mapping[str, Tensor]) -> None:
        """Give the parameters other values, by name.

        Raises:
            UserError: naming a parameter that the model does not have any more.
        """
        self._check_all_in_model()
        for part in self._by_fragment:
            for name, parameter in part.items():
                local(parameter).copy_(local(others[name]))
        reshard(self._model)

    def leave(self, others: Mapping[str, Tensor]) -> None:
        """Give the parameters, and the masters, other values for good, by name.

        Raises:
            UserError: naming a parameter that the model does not have any more.
        """
        self._check_all_in_model()
        if self._masters is not None:
            on_device = ((name, like, local(others[name]).to(self.device)) for name, like in self.by_name.items())
            self._masters.write({name: sharded_like(other, like) for name, like, other in on_device})
        self._expose()
        self.set(others)

    def check_still_the_models(self, fragments: Iterable[int]) -> None:
        """Refuse a model whose parameters are no longer those of the fragments.

        Raises:
            UserError: naming the parameter.
        """
        reshard(self._model)
        placed = {name for part in self._by_fragment for name in part}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in placed:
                raise UserError(
                    f"parameter {name} was unfrozen or added after the fragments were cut, and would differ "
                    "between the replicas: cut them, and build the engine, after that"
                )
        for fragment in fragments:
            self._check_in_model(fragment)
            for name, parameter in self._by_fragment[fragment].items():
                if (now := (parameter.dtype, parameter.device)) != (then := self._kinds[name]):
                    raise UserError(
                        f"parameter {name} was {then[0]} on {then[1]} when the engine was built, and is {now[0]} "
                        f"on {now[1]}, as model.double() and model.to(...) do: build the engine after that"
                    )

    def _check_in_model(self, fragment: int, *, where: str = "") -> None:
        """Refuse a model that has other parameters in the place of a fragment's, which no merge would reach."""
        reshard(self._model)
        for name, parameter in self._by_fragment[fragment].items():
            if self._in_model(name) is not parameter:
                raise UserError(
                    f"{where}parameter {name} was replaced after the engine was built, as "
                    "load_state_dict(assign=True), tying, and fully_shard do: build the engine last"
                )

    def _check_all_in_model(self) -> None:
        for fragment in range(len(self._by_fragment)):
            self._check_in_model(fragment)

    def check_copies(self, fragments: Iterable[int]) -> None:
        """Refuse shards that differ between processes that hold the same; all of the replica must call it.

        Raises:
            UserError: naming the parameter.
        """
        refusals: list[UserError] = []
        for fragment in fragments:
            likes = self._by_fragment[fragment]
            for mesh, dim, names in _copied(likes):
                digests = [outer_digest_on_device(local(likes[name]).reshape(-1).float()) for name in names]
                everyones = _everyones(torch.cat(digests), mesh, dim)
                differs = torch.stack(everyones).ne(everyones[0]).any(0).tolist()
                refusals += [
                    UserError(
                        f"processes of this replica hold the same shard of parameter {name}, along dimension "
                        f"{(mesh.mesh_dim_names or range(mesh.ndim))[dim]} of its mesh, with different values: "
                        "start them from the same parameters (one seed), and sum its gradients over them"
                    )
                    for name in compress(names, differs)
                ]
        for refusal in refusals[:1]:  # not before: others that see no difference would wait for this process
            raise refusal

    def _in_model(self, name: str) -> Tensor | None:
        """The parameter that the model has by a name now; None if it has none."""
        try:
            return self._model.get_parameter(name)
        except AttributeError:
            return None

    def _parts(self, fragment: int, flat_N: Tensor) -> list[Tensor]:
        """Views of a flat vector, one per parameter, in its shape."""
        return [span.of(flat_N).view(span.shape) for span in self.places[fragment].values()]


def local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def _memory_of(tensor: Tensor) -> int:
    """The address of the memory in which this process's shard lies, of which it may be a part."""
    return local(tensor).untyped_storage().data_ptr()


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, from all shards; every process of the replica must call it."""
    if not is_sharded(tensor):
        return tensor
    on_device = local(tensor).to(tensor.device_mesh.device_type)
    return sharded_like(on_device, tensor).full_tensor()  # pyrefly: ignore[missing-attribute]


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """A tensor that is sharded as `like` is, from this process's shard in any memory and of any dtype."""
    return dtensor_like(part, like) if is_sharded(like) else part


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of this process's shard on the CPU, sharded as the tensor is."""
    return sharded_like(local(tensor).to("cpu", copy=True), tensor)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True for a DTensor."""
    return hasattr(tensor, "to_local")


def place_of(like: "DTensor", coordinate: Sequence[int], *, part: bool) -> tuple[slice, ...]:
    """The place in the whole tensor of the shard of a process, or of its part.

    Args:
        like: cut into shards, or replicated, on each dimension of a mesh.
        coordinate: of the process in the mesh.
        part: the place of the part.
    """
    ends = [(0, size) for size in like.shape]
    order = sorted(enumerate(like.placements), key=lambda each: is_cut_again(each[1]))
    cuts = [(dim, placement.dim) for dim, placement in order if not placement.is_replicate()]  # pyrefly: ignore[missing-attribute]
    for mesh_dim, dim in [*cuts, *((mesh_dim, 0) for mesh_dim in _replicated(like) if part)]:
        start, end = ends[dim]
        each = math.ceil((end - start) / like.device_mesh.size(mesh_dim))
        first = min(end, start + each * coordinate[mesh_dim])
        ends[dim] = first, min(end, first + each)
    return tuple(slice(*each) for each in ends)


def own_place(tensor: Tensor, *, part: bool) -> tuple[slice, ...]:
    """The place of this process's shard in the whole tensor, or of its part."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process holds a shard"
    shard = place_of(tensor, coordinate, part=False)
    assert tuple(each.stop - each.start for each in shard) == local(tensor).shape, (
        "shards are chunks of torch.chunk"
    )
    return place_of(tensor, coordinate, part=True) if part else shard


def _replicated(like: "DTensor") -> list[int]:
    """The dimensions of the mesh along which several processes hold the same shard."""
    sizes = zip(like.placements, like.device_mesh.shape, strict=True)
    return [dim for dim, (placement, size) in enumerate(sizes) if placement.is_replicate() and size > 1]


def part_of(shard: Tensor, like: Tensor, *, before: int | None = None) -> Tensor:
    """This process's part of its shard, a view.

    Args:
        shard: in any memory.
        like: the parameter, which is sharded so.
        before: cut along the dimensions of the mesh before this one alone.
    """
    if is_sharded(like):
        for dim in _replicated(like):
            if before is None or dim < before:
                shard = _chunks(shard, like.device_mesh.size(dim))[like.device_mesh.get_local_rank(dim)]
    return shard


def _chunks(shard: Tensor, number: int) -> list[Tensor]:
    """Views of as many chunks along the first dimension, the last of which may be empty."""
    chunks = shard.chunk(number)
    return [*chunks, *[shard[:0]] * (number - len(chunks))]


def spread(shards: Sequence[Tensor], likes: Sequence[Tensor]) -> None:
    """Fill shards, of which each process has its part, from those that hold the same; all call it together.

    Args:
        shards: in any memory.
        likes: for each the parameter, which is sharded so.
    """
    for mesh, dim, indices in reversed(_copied(dict(enumerate(likes)))):
        rows = [_chunks(part_of(shards[i], likes[i], before=dim), mesh.size(dim)) for i in indices]
        # The first chunk is the largest. Bytes of whole words, so that several types travel together.
        sizes, rank = [-(-chunks[0].nbytes // 8) * 8 for chunks in rows], mesh.get_local_rank(dim)
        mine = torch.zeros(sum(sizes), dtype=torch.uint8, device=mesh.device_type)
        for chunks, place in zip(rows, mine.split(sizes), strict=True):
            own = chunks[rank]
            place[: own.nbytes].copy_(own.contiguous().view(-1).view(torch.uint8))
        for index, theirs in enumerate(_everyones(mine, mesh, dim)):
            for chunks, place in zip(rows, theirs.split(sizes), strict=True):
                if index != rank:
                    chunk = chunks[index]
                    chunk.copy_(place[: chunk.nbytes].view(chunk.dtype).view(chunk.shape))


_Key = TypeVar("_Key")


def _copied(likes: Mapping[_Key, Tensor]) -> "list[tuple[DeviceMesh, int, list[_Key]]]":
    """For each dimension of the mesh the parameters of which several processes along it hold the same shard."""
    sharded = {key: like for key, like in likes.items() if is_sharded(like)}
    mesh = next((like.device_mesh for like in sharded.values()), None)
    if mesh is None:
        return []
    keys = ((dim, [key for key, like in sharded.items() if dim in _replicated(like)]) for dim in range(mesh.ndim))
    return [(mesh, dim, copied) for dim, copied in keys if copied]


def _everyones(mine: Tensor, mesh: "DeviceMesh", dim: int) -> list[Tensor]:
    """The tensors of all processes along a dimension of a mesh; each of them must call it."""
    mine = mine.to(mesh.device_type)
    everyones = [torch.empty_like(mine) for _ in range(mesh.size(dim))]
    dist.all_gather(everyones, mine, group=mesh.get_group(dim))
    return everyones


def replica_group(parameters: Mapping[str, nn.Parameter]) -> Group:
    """The processes that hold a replica's shards.

    Raises:
        UserError: if the parameters are not all cut into shards, or replicated, over the same processes.
    """
    meshes = {
        name: parameter.device_mesh if is_sharded(parameter) else None for name, parameter in parameters.items()
    }
    first_name, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise UserError(
                f"parameter {name} is on {other or 'one process'}, and {first_name} on {mesh or 'one process'}: "
                "shard the whole model over one mesh, fully_shard(model, mesh=mesh['shard']), and give tensor "
                "parallelism a plan for every module, such as SequenceParallel() for norms"
            )
    if mesh is None:
        return OneProcess()
    for name, parameter in parameters.items():
        assert is_sharded(parameter), "all are on the mesh"
        if any(placement.is_partial() for placement in parameter.placements):
            raise UserError(
                f"parameter {name} is {parameter.placements} on {mesh}, a sum that is not taken: redistribute it"
            )
        if not parameter.ndim and _replicated(parameter):
            raise UserError(f"parameter {name} is a scalar on {mesh}: make it a vector of one element")
    device = local(next(iter(parameters.values()))).device
    several = [dim for dim, size in enumerate(mesh.shape) if size > 1] or [0]
    if len(several) == 1:
        return TorchGroup(mesh.get_group(several[0]), device)
    seconds = timeout_seconds_of(mesh.get_group(several[0]))
    # torch names it by its ranks and by how many groups a process has: as many in all processes of a replica.
    ranks = sorted(mesh.mesh.flatten().tolist())
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this process is a member"
    return TorchGroup(group, device)


def reshard(model: nn.Module) -> None:
    """Give FSDP2's parameters, which it keeps gathered after a pass without a backward, back to their shards.

    By default it keeps those of the outermost module. They hide the shards, and do not see a change of them.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return  # nothing is sharded
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def joined(tensors: Iterable[Tensor], out_N: Tensor | None = None) -> Tensor:
    """The local shards of tensors, one after the other, as one FP32 vector."""
    return torch.cat([local(tensor).reshape(-1).float() for tensor in tensors], out=out_N)


_MIN_ELEMENTS = 16
"""Fewest elements that are judged: fewer may return to where they were by chance."""


@dataclass
class _Merge:
    """A merge to judge."""

    step: int
    """The inner step after which the merge was."""
    resolution: float
    """Smallest move, relative to the parameter, that is no rounding."""
    samples: list[Tensor]
    """The fragment's samples before and after the merge, and after each of the next two inner steps."""


class MergeWatch:
    """Notices an optimizer that overwrites merged parameters with weights of its own, which saw no merge.

    With b before and a after a merge, c after the next inner step and d after the one that follows, an inner step
    is about s = ‖d − c‖ long. An optimizer that started from a has gone ‖c − a‖ ≈ s, one that started beside b
    ‖c − b‖ ≈ s. The merge counts as undone if ‖c − a‖ > 3 s, s / 3 < ‖c − b‖ < 10 s, and c is three times
    nearer to b than to a, also in 85 % of the elements. K elements of a fragment are looked at, and of those the
    half that the merge moved the most, each by more than the rounding of its dtype. Where these are few, or the
    merge is no longer than three inner steps, nothing is concluded.
    """

    def __init__(self) -> None:
        self.merges: dict[int, _Merge] = {}
        """The merges to look at after the next two inner steps, by fragment."""
        self._verdicts: list[tuple[int, int, Callable[[], Tensor]]] = []
        """Fragment and step of each merge that was judged, and a function that reads whether it was undone."""

    def merged(self, fragment: int, step: int, before_K: Tensor, shards: Sequence[Tensor]) -> None:
        """Remember a merge, from the sample before it and this process's shards after it."""
        if before_K.numel() >= 2 * _MIN_ELEMENTS:
            resolution = 8 * max(torch.finfo(shard.dtype).eps for shard in shards)
            self.merges[fragment] = _Merge(step, resolution, [before_K, sample(shards)])

    def look(self, fragment: int, step: int, shards: Sequence[Tensor]) -> None:
        """Look at a fragment after an inner step; the device need not be waited for."""
        merge = self.merges[fragment]
        if step != merge.step + len(merge.samples) - 1:  # another state was loaded
            del self.merges[fragment]
            return
        merge.samples.append(sample(shards))
        if len(merge.samples) == 4:
            verdict = begin_to_host(_undone(merge.samples, merge.resolution))
            self._verdicts.append((fragment, merge.step, verdict))
            del self.merges[fragment]

    def check_of_merges(self, step: int) -> Callable[[], None]:
        """A function that refuses to go on after an inner step if a merge that was judged so far was undone.

        It waits for what a GPU has to do until then, and may be called by any thread.

        Raises:
            UserError: by that function, naming the fragment and the step of the merge.
        """
        verdicts, self._verdicts = self._verdicts, []

        def check() -> None:
            for fragment, merged, is_undone in verdicts:
                if is_undone():
                    raise UserError(
                        f"step {step}: the merge of fragment {fragment} after step {merged} was undone by the "
                        "next inner step: the optimizer keeps weights of its own and overwrote the merged "
                        "parameters with them: give them to the engine as masters=, a tensor by parameter name or "
                        "an adapter of diloco.integrations",
                        "masters",
                    )

        return check


def fill(theta: Sequence[Tensor], vector_N: Tensor) -> None:
    """Write a flat vector (N) into tensors, one after the other."""
    for own, part_n in zip(theta, vector_N.split([own.numel() for own in theta]), strict=True):
        own.copy_(part_n.view(own.shape))


def sample(shards: Sequence[Tensor]) -> Tensor:
    """A copy of at most 64 elements, FP32 (K), spread over the four largest of the shards."""
    largest = sorted(shards, key=Tensor.numel)[-4:]
    strides = [max(1, -(-shard.numel() // 16)) for shard in largest]
    parts = [shard.reshape(-1)[::stride].float() for shard, stride in zip(largest, strides, strict=True)]
    return torch.cat(parts)


def _undone(samples: Sequence[Tensor], resolution: float) -> Tensor:
    """A bool on the samples' device: True if the inner step after a merge began where the merge had begun."""
    before_K, after_K, next_K, last_K = samples
    size_K = (after_K - before_K).abs()
    is_large_K = (size_K >= size_K.median()) & (size_K > resolution * before_K.abs())
    from_before_K, from_after_K, step_K = (
        (end_K - start_K) * is_large_K
        for start_K, end_K in ((before_K, next_K), (after_K, next_K), (next_K, last_K))
    )
    from_before, from_after, step = (torch.linalg.vector_norm(v) for v in (from_before_K, from_after_K, step_K))
    is_nearer_K = is_large_K & (from_before_K.abs() < from_after_K.abs())
    num_large, num_nearer = is_large_K.sum(), is_nearer_K.sum()
    return (
        (num_large >= _MIN_ELEMENTS)
        & (num_nearer >= 0.85 * num_large)
        & (3 * from_before < from_after)
        & (3 * step < from_after)
        & (3 * from_before > step)
        & (from_before < 10 * step)
    )
