"""The parameters of a model by fragment, and each fragment as one flat FP32 vector.

A replica may be several processes: its parameters are DTensors then, of which each process sees the shards that it
holds, and shard i exchanges with shard i of the other replicas. For a replica of one process, the functions at the
end return its plain tensors.

Shapes: N elements of one fragment that this process holds.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco.engine.guards import MergeWatch, sample
from diloco.errors import UserError
from diloco.exchange.group import TorchGroup
from diloco.exchange.private_torch import dtensor_like
from diloco.exchange.transport import Group, OneProcess
from diloco.fragments import Fragment, block_spans
from diloco.outer.digest import parameters_hash
from diloco.wire.kernels.memory import empty

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes a second to import, and most replicas are one process


INITIAL = "initial parameters (SHA-256)"
"""The fact that proves the initial parameters equal."""


class Masters(Protocol):
    """The way to weights that an optimizer updates in the place of the model's parameters: they are θ then.

    Every process of a replica calls both methods for the same parameters in the same order.
    """

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The FP32 masters of these parameters, by name, shaped, sharded and placed as the parameters are.

        Before `write` the engine may change them in place.
        """
        ...

    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Take what a merge made of masters, by name, and give the model's parameters their new values."""
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
        """Round the masters, which were changed in place, to the parameters' dtype."""
        for name, master in masters.items():
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
        sizes = {name: self.shape_in_flat(parameter).numel() for name, parameter in named.items()}
        self.spans = [block_spans(fragment, sizes) for fragment in fragments]
        """The places of each fragment's blocks in its flat vector."""
        self.watch = MergeWatch()
        """Guards the merges."""
        self._merge_hooks: OrderedDict[int, Callable[[tuple[str, ...]], object]] = OrderedDict()
        self._masters = masters_of(model, masters)

    @staticmethod
    def shape_in_flat(parameter: Tensor) -> torch.Size:
        """The shape of what a flat vector holds of a parameter: this process's shard."""
        return local(parameter).shape

    @property
    def has_masters(self) -> bool:
        """True if the optimizer updates other weights, which are θ."""
        return self._masters is not None

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters of all fragments."""
        return {name: parameter for part in self._by_fragment for name, parameter in part.items()}

    def shards(self, fragment: int) -> list[Tensor]:
        """The parameters, or this process's shards of them, in their own memory."""
        return [local(parameter) for parameter in self._by_fragment[fragment].values()]

    def theta(self, fragment: int) -> list[Tensor]:
        """θ_p, tensor by tensor: the masters, or where there are none, the parameters in their own memory.

        Raises:
            UserError: naming a master that is not its parameter's.
        """
        if self._masters is None:
            return self.shards(fragment)
        parameters = self._by_fragment[fragment]
        masters = self._masters.read(tuple(parameters))
        for name, parameter in parameters.items():
            check_master(name, masters[name], parameter)
        return [local(masters[name]) for name in parameters]

    @contextmanager
    def merging(self, fragment: int, step: int) -> Iterator[list[Tensor]]:
        """θ_p, to be changed in place by a merge after an inner step; the model has the new values at the end."""
        reshard(self._model)
        parameters, before_K = self._by_fragment[fragment], sample(self.shards(fragment))
        theta = self.theta(fragment)
        yield theta
        if self._masters is not None:
            named = zip(parameters.items(), theta, strict=True)
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
        """Views of a fragment's flat vector (N), by parameter name, shaped and sharded as the parameters are."""
        parameters, parts = self._by_fragment[fragment].items(), self._parts(fragment, flat_N)
        return {name: sharded_like(part, like) for (name, like), part in zip(parameters, parts, strict=True)}

    def all_named(self, flat: Iterable[Tensor]) -> dict[str, Tensor]:
        """Views of the flat vectors of all fragments, given in order, by parameter name."""
        return {
            name: view
            for fragment, flat_N in enumerate(flat)
            for name, view in self.named(fragment, flat_N).items()
        }

    def flat_of(self, fragment: int, by_name: Mapping[str, Tensor]) -> Tensor:
        """A fragment's flat FP32 vector (N), from tensors by parameter name, sharded as the parameters are."""
        return joined(by_name[name] for name in self._by_fragment[fragment])

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
            start = 0
            for name, part in zip(self._by_fragment[fragment], self._parts(fragment, flat_N), strict=True):
                facts[f"shape, fragment and place of parameter {name}"] = [list(part.shape), fragment, start]
                start += part.numel()
                values[name] = part
        return {**facts, INITIAL: parameters_hash(values)}

    @contextmanager
    def replaced_by(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the parameters other values, by name, and put their own back at the end."""
        shards = [local(parameter) for part in self._by_fragment for parameter in part.values()]
        own = [(shard, shard.clone()) for shard in shards]
        try:
            self.set(others)
            yield
        finally:
            for shard, kept in own:
                shard.copy_(kept)
            reshard(self._model)

    def set(self, others: Mapping[str, Tensor]) -> None:
        """Give the parameters other values, by name."""
        for part in self._by_fragment:
            for name, parameter in part.items():
                local(parameter).copy_(local(others[name]))
        reshard(self._model)

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
            for name, parameter in self._by_fragment[fragment].items():
                if self._in_model(name) is not parameter:
                    raise UserError(
                        f"parameter {name} was replaced after the engine was built, as "
                        "load_state_dict(assign=True), tying, and fully_shard do: build the engine last"
                    )
                if (now := (parameter.dtype, parameter.device)) != (then := self._kinds[name]):
                    raise UserError(
                        f"parameter {name} was {then[0]} on {then[1]} when the engine was built, and is {now[0]} "
                        f"on {now[1]}, as model.double() and model.to(...) do: build the engine after that"
                    )

    def _in_model(self, name: str) -> Tensor | None:
        """The parameter that the model has by a name now; None if it has none."""
        try:
            return self._model.get_parameter(name)
        except AttributeError:
            return None

    def _parts(self, fragment: int, flat_N: Tensor) -> list[Tensor]:
        """Views of a flat vector, one per parameter, in its shape."""
        shapes = [self.shape_in_flat(parameter) for parameter in self._by_fragment[fragment].values()]
        parts = flat_N.split([shape.numel() for shape in shapes])
        return [part_N.view(shape) for part_N, shape in zip(parts, shapes, strict=True)]


def local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, from all shards; every process of the replica must call it."""
    if not is_sharded(tensor):
        return tensor
    on_device = local(tensor).to(tensor.device_mesh.device_type)
    return sharded_like(on_device, tensor).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """A tensor that is sharded as `like` is, from this process's shard in any memory and of any dtype."""
    return dtensor_like(part, like) if is_sharded(like) else part


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of this process's shard on the CPU, sharded as the tensor is."""
    return sharded_like(local(tensor).to("cpu", copy=True), tensor)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True for a DTensor."""
    return hasattr(tensor, "to_local")


def replica_group(parameters: Mapping[str, nn.Parameter]) -> Group:
    """The processes that hold a replica's shards.

    Raises:
        UserError: if the parameters are not all cut into shards over the same processes, along one dimension.
    """
    meshes = {
        name: parameter.device_mesh if is_sharded(parameter) else None for name, parameter in parameters.items()
    }
    first_name, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise UserError(
                f"parameter {name} is on {other or 'one process'}, and {first_name} on {mesh or 'one process'}: "
                "shard the whole model over one mesh, fully_shard(model, mesh=mesh['shard'])"
            )
    if mesh is None:
        return OneProcess()
    if mesh.ndim != 1:
        raise UserError(
            f"parameter {first_name} is on {mesh}, of {mesh.ndim} dimensions: shard a replica along one and leave "
            "the replicas to the engine, fully_shard(model, mesh=mesh['shard'])"
        )
    for name, parameter in parameters.items():
        if is_sharded(parameter) and not all(placement.is_shard() for placement in parameter.placements):
            raise UserError(
                f"parameter {name} is {parameter.placements} on {mesh}, which is not cut into shards: "
                "use fully_shard(model, mesh=mesh['shard'])"
            )
    return TorchGroup(mesh.get_group(), local(next(iter(parameters.values()))).device)


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
