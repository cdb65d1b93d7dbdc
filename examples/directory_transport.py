"""A transport of one's own: payloads as files in a directory that all replicas see. Try it: run the file."""

import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

import diloco
from diloco.extend import Tag, write_atomically


class DirectoryTransport:
    """Each payload is a file, written whole under the name of its tag, sender and receiver."""

    ordered = False  # messages are matched by their names
    device = torch.device("cpu")

    def __init__(self, directory: Path, *, replica: int, num_replicas: int, timeout_seconds: float = 60.0) -> None:
        self._directory, self.timeout_seconds = directory, timeout_seconds
        self.replica, self.num_replicas = replica, num_replicas

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> "_Arriving":
        for receiver, payload in payloads.items():
            write_atomically(self._path(tag, self.replica, receiver), [payload.cpu().numpy().data])
        paths = {sender: self._path(tag, sender, self.replica) for sender in payloads}
        return _Arriving(self, paths, tag)

    @property
    def failure(self) -> str | None:
        notice = self._directory / "failure"
        return notice.read_text() if notice.exists() else None

    def abort(self, reason: str) -> None:
        if self.failure is None:
            write_atomically(self._directory / "failure", [f"replica {self.replica} failed: {reason}".encode()])

    def finishing(self, step: int) -> nullcontext[None]:
        return nullcontext()  # who takes fewer steps than the others is found out by the timeout

    def _path(self, tag: Tag, sender: int, receiver: int) -> Path:
        name = f"{tag.channel:d}-{tag.fragment}-{tag.round}-{tag.phase}-{tag.shard}"
        return self._directory / f"{name}-from-{sender}-to-{receiver}"


class _Arriving:
    def __init__(self, way: DirectoryTransport, paths: dict[int, Path], tag: Tag) -> None:
        self._way, self._paths, self._tag = way, paths, tag

    def wait(self) -> dict[int, Tensor]:
        deadline = time.monotonic() + self._way.timeout_seconds
        while missing := tuple(sender for sender, path in self._paths.items() if not path.exists()):
            if self._way.failure is not None:
                raise diloco.ExchangeError(f"{self._tag}: {self._way.failure}", missing)
            if time.monotonic() > deadline:
                raise diloco.ExchangeError(f"{self._tag}: no payload from replica {missing}", missing)
            time.sleep(0.001)
        return {
            sender: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for sender, path in self._paths.items()
        }


def train(directory: Path, replica: int, num_replicas: int) -> None:
    torch.manual_seed(0)  # the same initial parameters on all replicas
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments="whole",
        sync_every=5,
        overlap_steps=2,
        exchange=DirectoryTransport(directory, replica=replica, num_replicas=num_replicas),
    )
    target, data = torch.randn(8, 1), torch.Generator().manual_seed(replica)
    for _ in range(20):
        inputs = torch.randn(16, 8, generator=data)
        (model(inputs) - inputs @ target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    engine.finish()
    print(f"replica {replica}: outer hash {engine.outer_hash()[:16]}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        spawn = multiprocessing.get_context("spawn")
        replicas = [spawn.Process(target=train, args=(Path(name), replica, 2)) for replica in range(2)]
        for process in replicas:
            process.start()
        for process in replicas:
            process.join()
            assert process.exitcode == 0, "a replica failed"


if __name__ == "__main__":
    main()
