"""A GPU that does not exist: its tensors compute on the CPU, and it notices what makes the host wait, or races.

Only in a process of its own (`run_replicas`), since torch never forgets a device. It models what CUDA promises, no
more: streams are ordered by events alone; a copy to the host that does not block is rubbish until an event that is
recorded after it is waited for; memory goes back to the stream that it was made on as soon as nobody holds it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fake"
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
"""Operations for which the host waits: their result is a Python value, or has a shape that depends on values."""
_WITHOUT_KERNEL = {
    *("view", "slice", "select", "detach", "alias", "t", "transpose", "permute", "expand", "as_strided", "unbind"),
    *("squeeze", "unsqueeze", "split", "split_with_sizes", "_reshape_alias", "_unsafe_view", "diagonal", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "record_stream"),
}
_RUBBISH = 0xEE


class FakeTensor(torch.Tensor):
    """A tensor on the device; its values lie on the CPU."""

    inner: Tensor
    memory: "Memory"

    @staticmethod
    def __new__(cls, inner: Tensor, memory: "Memory") -> "FakeTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner, made.memory = inner, memory
        return made

    def __init__(self, *parts: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _DEVICE[0].run(operation, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: "Stream") -> None:
        self.memory.shared.add(stream.index)


class Memory:
    """The users of some memory: times are (stream, number of its operations)."""

    def __init__(self, home: "Stream") -> None:
        self.home = home
        self.written: tuple[int, int] | None = None
        self.read: list[tuple[int, int]] = []
        self.shared: set[int] = set()

    def use(self, stream: "Stream", *, write: bool) -> None:
        before = [self.written] if self.written else []
        for other, time in before + (self.read if write else []):
            if not _DEVICE[0].is_over(other, time, stream):
                _DEVICE[0].races.append(f"stream {stream.index} uses what stream {other} has not finished with")
        now = (stream.index, stream.known[stream.index])
        if write:
            self.written, self.read = now, []
        else:
            self.read.append(now)

    def __del__(self) -> None:
        for other, time in [*self.read, *([self.written] if self.written else [])]:
            if other not in self.shared and not _DEVICE[0].is_over(other, time, self.home):
                _DEVICE[0].races.append(f"stream {self.home.index} frees what stream {other} still uses")


class Stream:
    """A stream: for each stream the number of operations that are over when its next one begins."""

    def __init__(self, device: object = None) -> None:
        device_now = _DEVICE[0]
        self.index = len(device_now.streams)
        self.known: Counter[int] = Counter()
        device_now.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        self.known |= event.known

    def wait_stream(self, stream: "Stream") -> None:
        self.known |= stream.known

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """The work of a stream up to a moment."""

    def __init__(self, **options: object) -> None:
        self.known: Counter[int] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.known = (stream or _DEVICE[0].stream).known.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _DEVICE[0].stream).wait_event(self)

    def synchronize(self) -> None:
        _DEVICE[0].host_waits_for(self)


class FakeDevice(TorchDispatchMode):
    """The device, from `with FakeDevice() as device` on; only the thread that enters it makes tensors there.

    Args:
        like_apples: it has no streams and no FP64, as Apple's GPUs.
    """

    def __init__(self, *, like_apples: bool = False) -> None:
        super().__init__()
        self.has_streams = self._has_fp64 = not like_apples
        if not _DEVICE:
            module = _Module() if like_apples else _ModuleWithStreams()
            _setup_privateuseone_for_python_backend(NAME, backend_module=module)
        _DEVICE[:] = [self]
        self.device = torch.device(NAME, 0)
        self.streams: list[Stream] = []
        self.stream = Stream()
        self.races: list[str] = []
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._copies: list[tuple[tuple[int, int], int, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._waited_for: Counter[int] = Counter()
        self.clear()

    def __enter__(self) -> "FakeDevice":
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device=…) is a copy that is seen here
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def clear(self) -> None:
        """Begin to count."""
        self.launches: Counter[str] = Counter()
        self.host_reads: list[str] = []
        """Operations and waits for which the training thread stood still, by name."""
        self.waited_for: Counter[int] = Counter()
        """For each stream the number of operations that the training thread has waited for."""
        self.to_host: list[int] = []
        """Bytes of the copies to the host."""
        self.to_device: list[int] = []

    def on_device(self, model: nn.Module) -> nn.Module:
        """Take a model's parameters to the device."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(self.wrapped(parameter.detach().clone()))
        return model

    def wrapped(self, inner: Tensor) -> FakeTensor:
        address = inner.untyped_storage().data_ptr()
        memory = self._memories.get(address)
        if memory is None or not address:
            memory = self._memories[address] = Memory(self.stream)
        return FakeTensor(inner, memory)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return self.run(operation, args, kwargs or {})

    def run(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = operation.overloadpacket.__name__
        ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and (torch.device(to).type == NAME) != bool(ours):
            host = torch.empty_like(args[0].inner if ours else args[0], dtype=kwargs.get("dtype"))
            target = host if ours else self.wrapped(host)
            return self._copy(target, args[0], non_blocking=kwargs.get("non_blocking", False))
        if name == "copy_" and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            return self._copy(args[0], args[1], non_blocking=args[2] if len(args) > 2 else False)
        if not ours and (to is None or torch.device(to).type != NAME):
            return operation(*args, **kwargs)
        return self._launch(operation, name, args, kwargs)

    def _launch(self, operation: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        foreign = [x for x in leaves if not isinstance(x, FakeTensor)]
        assert all(x.dim() == 0 for x in foreign), f"{name} of tensors on two devices"
        if name in _READS:
            self._host_waits(name, self.stream.known)
        elif name not in _WITHOUT_KERNEL:
            self.launches[name] += 1
            self.stream.known[self.stream.index] += 1
            given = dict(zip([a.name for a in operation._schema.arguments], args, strict=False)) | kwargs
            for argument in operation._schema.arguments:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(given.get(argument.name)):
                    if isinstance(x, FakeTensor):
                        x.memory.use(self.stream, write=is_written)
        by_inner = {id(x.inner): x for x in leaves if isinstance(x, FakeTensor)}
        inner_args, inner_kwargs = tree_map_only(FakeTensor, lambda x: x.inner, (args, kwargs))
        result = operation(*inner_args, **inner_kwargs)

        def wrapped(inner: Tensor) -> Tensor:
            if inner.dtype == torch.float64 and not self._has_fp64:
                raise TypeError(f"{name}: the device has no FP64")
            made = by_inner[id(inner)] if id(inner) in by_inner else self.wrapped(inner)
            if name not in _WITHOUT_KERNEL and made.memory.written is None and not made.memory.read:
                made.memory.use(self.stream, write=True)
            return made

        return tree_map_only(Tensor, wrapped, result)

    def _copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        """Copy between the host and the device."""
        self.stream.known[self.stream.index] += 1
        if isinstance(to, FakeTensor):
            self._arrive(self.stream.known, at=source.untyped_storage().data_ptr())  # in the order of the stream
            self.to_device.append(source.numel() * source.itemsize)
            to.memory.use(self.stream, write=True)
            to.inner.copy_(source)
        else:
            assert isinstance(source, FakeTensor)
            self.to_host.append(to.numel() * to.itemsize)
            source.memory.use(self.stream, write=False)
            values = source.inner.clone()
            to.contiguous().view(-1).view(torch.uint8).fill_(_RUBBISH)
            at = self.stream.index, self.stream.known[self.stream.index]
            with self._lock:
                self._copies.append((at, to.untyped_storage().data_ptr(), lambda: to.copy_(values)))
        if not non_blocking:
            self._host_waits("copy", self.stream.known)
            self._arrive(self.stream.known)
        return to

    def is_over(self, stream: int, time: int, before: Stream) -> bool:
        """True if an operation of one stream is over before the next one of another, by events or a wait."""
        return max(before.known[stream], self._waited_for[stream]) >= time

    def host_waits_for(self, event: Event) -> None:
        self._host_waits("event", event.known)
        self._waited_for |= event.known
        self._arrive(event.known)

    def _arrive(self, known: Counter[int], at: int | None = None) -> None:
        """Do the copies to the host, or to one address of it, that are over."""
        with self._lock:
            waiting, self._copies = self._copies, []
            for (stream, time), address, copy in waiting:
                if known[stream] >= time and at in (None, address):
                    copy()
                else:
                    self._copies.append(((stream, time), address, copy))

    def _host_waits(self, name: str, known: Counter[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            self.host_reads.append(name)
            self.waited_for |= known


_DEVICE: list[FakeDevice] = []


class _Module(_DummyBackendModule):
    """torch.fake."""

    Event = Event

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def synchronize(device: object = None) -> None:
        _DEVICE[0].stream.synchronize()


class _ModuleWithStreams(_Module):
    """torch.fake, of a device with streams."""

    Stream = Stream

    @staticmethod
    def current_stream(device: object = None) -> Stream:
        return _DEVICE[0].stream

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, _DEVICE[0].stream = _DEVICE[0].stream, stream
        try:
            yield
        finally:
            _DEVICE[0].stream = before
