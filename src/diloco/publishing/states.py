"""A model's state: named tensors on the CPU, as a version holds them; its bytes as safetensors, and back.

A whole version's bytes are a pure function of the state: tensors by the size of their cells, largest first, then
by name, one after another, without metadata. So every tensor lies where its type can be read in place.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diloco.errors import FileError, PayloadError, UserError, listed
from diloco.files import safetensors_head, safetensors_json
from diloco.schema import Count, decoded

State: TypeAlias = dict[str, Tensor]
"""Contiguous CPU tensors by name."""
MOST_HEAD_BYTES = 1 << 26
"""Length of the longest head of a whole version: it names all tensors."""
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"C64": torch.complex64},
}
"""Types of tensors by the names that safetensors has for them."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def copied(model: "nn.Module | Mapping[str, Tensor]", dtype: torch.dtype | None) -> tuple[State, dict[str, str]]:
    """A copy of a model's state on the CPU, and the names of tied tensors, each with the name that is copied.

    Args:
        model: a module, whose `state_dict()` is taken, or named tensors of any device.
        dtype: of the copy's floating-point tensors; None keeps each tensor's own.

    Raises:
        UserError: for a state that is empty, or holds what is no dense tensor of a type that safetensors has.
    """
    if not (dtype is None or (dtype.is_floating_point and dtype in _NAMES)):
        raise UserError(f"dtype={dtype} must be a floating-point type such as torch.bfloat16, or None", "dtype")
    tensors = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    if not tensors:
        raise UserError("the state to publish is empty: give a module, or tensors by name")
    firsts, tied, state = dict[Any, str](), dict[str, str](), State()
    for name, tensor in tensors.items():
        _check_dense(name, tensor)
        if tensor.dtype not in _NAMES:
            raise UserError(f"{name} has the type {tensor.dtype}, which safetensors lacks: leave it out")
        first = firsts.setdefault(_memory(tensor), name)
        if first != name:
            tied[name] = first
            continue
        state[name] = _copied(name, tensor, dtype)
    return state, tied


def _copied(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    own = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    try:
        cast = tensor.detach().to(own)  # where it lies: fewer bytes leave a GPU
        return torch.empty(cast.shape, dtype=own, device="cpu").copy_(cast)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        if address_of(tensor) is not None:
            raise
        kind = type(tensor).__name__
        raise UserError(
            f"{name} is a {kind}, which can't be copied to a plain tensor: publish the model before it is "
            "quantized, or give what its dequantize() returns"
        ) from error


def _check_dense(name: Any, tensor: Any) -> None:
    if not (isinstance(name, str) and name and name != "__metadata__" and isinstance(tensor, Tensor)):
        raise UserError(f"the state holds {name!r:.100}, a {type(tensor).__name__}: give tensors by name alone")
    if hasattr(tensor, "full_tensor"):
        raise UserError(f"{name} is sharded: make it whole first, by its full_tensor() in every process")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UserError(f"{name} is no dense tensor with values: leave it out, or make it one")


def address_of(tensor: Tensor) -> int | None:
    """The address of a tensor; None where torch knows none: of empty tensors, and those that wrap others."""
    return tensor.data_ptr() or None


def _memory(tensor: Tensor) -> Any:
    """Equal for two tensors that are one in memory; both must live."""
    if (address := address_of(tensor)) is None:
        return id(tensor)
    place = tensor.device, address
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def num_bytes_of(state: Mapping[str, Tensor]) -> int:
    """The bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def unlike(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> str:
    """The way in which a state is another model's, in words; empty where names, shapes and types are the same."""
    if missing := sorted(old.keys() - new.keys()):
        return f"{listed(missing, 3)} {'is' if len(missing) == 1 else 'are'} missing"
    if added := sorted(new.keys() - old.keys()):
        return f"{listed(added, 3)} {'is' if len(added) == 1 else 'are'} new"
    for name, tensor in old.items():
        if (before := _form(tensor)) != (after := _form(new[name])):
            return f"{name} is {after}, and was {before}"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, on its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def seal_whole(state: Mapping[str, Tensor]) -> list[memoryview]:
    """A state's bytes, as buffers on its memory, one after another."""
    names = _ordered(state)
    return [memoryview(_head(state)), *(bytes_of(state[name]) for name in names if state[name].numel())]


def open_whole(body_N: Tensor, *, source: str) -> State:
    """The state in a body, on its memory.

    Args:
        body_N: flat uint8, from bytes that nobody has checked; aligned to 8 bytes.
        source: the version in words, for errors.

    Raises:
        PayloadError: if `seal_whole` does not write these bytes.
    """
    whole = body_N.numpy().data
    if (text := safetensors_json(whole, most_bytes=MOST_HEAD_BYTES)) is None:
        raise PayloadError(f"{source} can't be used: its body does not begin as a file of safetensors")
    start = 8 + len(text)
    try:
        entries = decoded(text, dict[str, _Entry], source=source)
    except FileError as error:
        raise PayloadError(str(error)) from None
    state = State()
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None or not name:
            raise PayloadError(f"{source} can't be used: {name!r:.100} has the unknown type {entry.dtype!r:.20}")
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if start + num_bytes > whole.nbytes or start % dtype.itemsize:
            raise PayloadError(f"{source} can't be used: its body ends before {name:.100}, or is not in order")
        state[name] = body_N[start : start + num_bytes].view(dtype).view(entry.shape)
        start += num_bytes
    if start != whole.nbytes or whole[: 8 + len(text)] != _head(state):
        raise PayloadError(f"{source} can't be used: its body is not in the form in which diloco writes it")
    return state


@dataclass(frozen=True)
class _Entry:
    """One tensor in a head."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def load(state: Mapping[str, Tensor], tied: Mapping[str, str], model: "nn.Module | Mapping[str, Tensor]") -> None:
    """Copy a state into a model in place; nothing is copied where something does not fit.

    Args:
        state: of the version.
        tied: further names of its tensors.
        model: a module, or its tensors by name, on any device; a tensor of another type takes the values as a cast
            rounds them.

    Raises:
        UserError: naming the tensors that do not fit.
    """
    targets = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    sources = {**{name: state[first] for name, first in tied.items() if first in state}, **state}
    groups = dict[Any, list[str]]()
    for name, target in targets.items():
        _check_dense(name, target)
        groups.setdefault(_memory(target), []).append(name)
    copies, missing = list[tuple[Tensor, Tensor]](), list[str]()
    for names in groups.values():
        if known := [name for name in names if name in sources]:
            copies.append((targets[known[0]], sources[known[0]]))
            _check_copy(known, targets, sources)
        else:
            missing.append(names[0])
    if missing:
        raise UserError(f"the version lacks {listed(sorted(missing), 3)}: build the model that is published")
    used = {source.data_ptr() for _, source in copies if source.numel()}
    if unknown := sorted(n for n in state.keys() - targets.keys() if state[n].data_ptr() not in used):
        raise UserError(f"the model lacks {listed(unknown, 3)}: build the model that is published")
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)


def _check_copy(names: list[str], targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Refuse what does not fit a tensor of the model, which has several names where it is tied."""
    target, source = targets[names[0]], sources[names[0]]
    for name in names[1:]:
        if not _same_bits(source, sources[name]):
            raise UserError(f"the model ties {names[0]} and {name}, and the version has two values: untie them")
    if target.shape != source.shape:
        raise UserError(
            f"{names[0]} has the shape {tuple(target.shape)} in the model, and {tuple(source.shape)} in the "
            "version: build the model that is published"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise UserError(
            f"{names[0]} of the model has one value in several places, by expand(): make it contiguous"
        )
    if not torch.can_cast(source.dtype, target.dtype):
        raise UserError(
            f"{names[0]} is {target.dtype} in the model, which can't hold the version's {source.dtype}: load the "
            "version before the model is quantized"
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def _ordered(state: Mapping[str, Tensor]) -> list[str]:
    return sorted(state, key=lambda name: (-state[name].itemsize, name))


def _head(state: Mapping[str, Tensor]) -> bytes:
    tensors = ((name, state[name]) for name in _ordered(state))
    return safetensors_head((name, _NAMES[each.dtype], each.shape, each.nbytes) for name, each in tensors)
