"""A run written file by file into a directory, without the engine: its Θ is made by NumPy, its mistakes by tests.

Shapes: N elements of one fragment.
"""

import shutil
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests.rendezvous.cases import AMOUNTS, header_of
from torch import Tensor

from diloco.files import sha256
from diloco.outer.digest import outer_digest, parameters_hash
from diloco.rendezvous.log.entries import (
    FORMAT,
    Body,
    Close,
    Contribution,
    Create,
    Join,
    Leave,
    Outer,
    Rules,
    Snapshot,
)
from diloco.rendezvous.log.index import INDEX, Index
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import ENTRY, sealed_entry
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.rendezvous.objects import PAYLOAD, seal_snapshot, snapshot_name
from diloco.wire import codec
from diloco.wire.payload import Key

f32 = np.float32
LR, MOMENTUM, SEED = 0.4, 0.9, 5


class Handwritten:
    """A run in a directory.

    Args:
        directory: to be made.
        sizes: N of each fragment, which is one parameter.
        wire: codec.
        facts: more of them, or others.
        initial: parameters that form one fragment, in the place of `sizes`.
        signers: one for each replica that joins, the creator's first; without keys by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sizes: Sequence[int] = (7, 300),
        wire: str = "fp32",
        signers: Sequence[Signer] = (),
        facts: Mapping[str, object] | None = None,
        initial: Mapping[str, Tensor] | None = None,
        **rules,
    ) -> None:
        self.directory, self.codec, self.signers = directory, codec(wire), list(signers)
        random = np.random.default_rng(SEED)
        self.initial = {
            f"blocks.{p}.weight": torch.from_numpy(random.normal(size=(1, n)).astype(f32))
            for p, n in enumerate(sizes)
        }
        self.outer = [value.numpy().reshape(-1).copy() for value in self.initial.values()]
        self.places = {name: (p, 0) for p, name in enumerate(self.initial)}
        if initial is not None:
            self.initial = {name: value.detach().clone() for name, value in initial.items()}
            flat = [value.numpy().reshape(-1) for value in self.initial.values()]
            starts = np.cumsum([0, *map(len, flat)])[:-1]
            self.outer = [np.concatenate(flat)]
            self.places = {name: (0, int(start)) for name, start in zip(self.initial, starts, strict=True)}
        self.velocity = [np.zeros_like(outer_N) for outer_N in self.outer]
        self.past = [[outer_N.copy()] for outer_N in self.outer]
        self.random = random
        self.count: dict[tuple[int, int], int] = {}
        self.run = ""
        self.states: list[RunState] = []
        creator = self.signers[0] if self.signers else Signer()
        body = Create(
            format=FORMAT,
            rules=Rules(num_fragments=len(self.outer), **rules),
            facts={**self._facts(wire), **(facts or {})},
            creator=creator.public,
            allowed=tuple(signer.public for signer in self.signers),
        )
        self.append(body, author=-1, signer=creator)

    def _facts(self, wire: str) -> dict[str, object]:
        places = {
            f"shape, fragment and place of parameter {name}": [list(value.shape), *self.places[name]]
            for name, value in self.initial.items()
        }
        return {
            "outer rule": "Nesterov",
            "outer rule's lr": LR,
            "outer rule's momentum": MOMENTUM,
            "wire": codec(wire).spec,
            "combine": "gather",
            "seed": SEED,
            **places,
            "initial parameters (SHA-256)": parameters_hash(self.initial),
        }

    @property
    def state(self) -> RunState:
        return self.states[-1]

    def copy_to(self, directory: Path) -> "Handwritten":
        """The same run in another directory, to be changed there."""
        copied = copy(self)
        copied.directory, copied.states = shutil.copytree(self.directory, directory), [*self.states]
        for name in ("outer", "velocity", "past", "random", "count"):
            setattr(copied, name, deepcopy(getattr(self, name)))
        return copied

    def path(self, name: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def signer(self, replica: int) -> Signer:
        return self.signers[replica] if self.signers else Signer()

    def append(self, body: Body, *, author: int, signer: Signer | None = None) -> int:
        """Write the next entry, and return its number."""
        number = len(self.states)
        previous = self.states[-1].previous if self.states else ""
        keys = self.states[-1].keys if self.states else 0
        data = sealed_entry(body, signer or self.signer(author), author=author, previous=previous, keys=keys)
        entry = ENTRY.open(data, "").header
        self.path(ENTRY.name(number)).write_bytes(data)
        digest = sha256(data)
        self.states.append(self.state.after(entry, digest) if number else RunState.begin(entry, digest))
        return number

    def join(self, name: str) -> int:
        replica = len(self.state.members)
        self.append(Join(name=name, key=self.signer(replica).public, **AMOUNTS), author=replica)
        return replica

    def send(self, p: int, replica: int, *, stale: int = 0, tokens: int = 100) -> tuple[Contribution, Tensor]:
        """Upload an outer gradient against an older Θ_p."""
        base_round = self.state.fragments[p].round - stale
        nth = self.count[p, replica] = self.count.get((p, replica), -1) + 1
        delta_N = torch.from_numpy(self.random.normal(size=len(self.outer[p])).astype(f32))
        key = Key(SEED, p, base_round + 1, replica)
        base = outer_digest(torch.from_numpy(self.past[p][base_round]))
        payload = self.codec.encode(delta_N, key, base=base)
        decoded_N = self.codec.decode(payload, len(delta_N), key)
        body = payload.numpy().data
        claim = {"replica": replica, "seq": p + nth * len(self.outer), "base_round": base_round}
        claim |= {"tokens": tokens, "steps": 4, "position": 1000}
        claim |= {"loss": 5.0 - base_round - replica / 2 if replica < 2 else None}
        norm = float(np.linalg.norm(decoded_N.numpy().astype(np.float64)))
        offer = {"run": self.state.run, "fragment": p, "base": f"{base:016x}"}
        header = header_of(self.codec, len(delta_N), [body], [norm], **claim, **offer)
        self.path(header.name).write_bytes(PAYLOAD.seal(header, self.signer(replica)) + bytes(body))
        return header.contribution(), decoded_N

    def step(self, p: int, sent: Sequence[tuple[Contribution, Tensor]]) -> int:
        """Append an outer entry, and take the outer step in NumPy."""
        sent = sorted(sent, key=lambda pair: pair[0].replica)
        most = max(contribution.tokens for contribution, _ in sent)
        weights = [f32(contribution.tokens / most) for contribution, _ in sent]
        total_N = np.zeros_like(self.outer[p])
        for weight, (_, decoded_N) in zip(weights, sent, strict=True):
            total_N = total_N + weight * decoded_N.numpy()
        delta_N = total_N / f32(sum(float(c.tokens / most) for c, _ in sent))
        before = outer_digest(torch.from_numpy(self.outer[p]))
        self.velocity[p] = f32(MOMENTUM) * self.velocity[p] + delta_N
        self.outer[p] = self.outer[p] - f32(LR) * (delta_N + f32(MOMENTUM) * self.velocity[p])
        self.past[p].append(self.outer[p].copy())
        body = Outer(
            fragment=p,
            round=self.state.fragments[p].round + 1,
            before=f"{before:016x}",
            contributions=tuple(contribution for contribution, _ in sent),
        )
        return self.append(body, author=sent[-1][0].replica)

    def snapshot(self, p: int, *, author: int = 0, wrong: bool = False) -> int:
        vectors = {"outer": self.outer[p] + f32(wrong), "velocity": self.velocity[p]}
        buffers, sha256 = seal_snapshot({name: torch.from_numpy(v.copy()) for name, v in vectors.items()})
        last_round = self.state.fragments[p].round
        self.path(snapshot_name(p, last_round, sha256)).write_bytes(b"".join(buffers))
        return self.append(Snapshot(fragment=p, round=last_round, sha256=sha256), author=author)

    def close(self, *, author: int = 0, wrong: bool = False) -> int:
        """A replica says that the token budget is spent, and closes the run."""
        self.append(Leave(finished=True), author=author)
        digests = (outer_digest(torch.from_numpy(outer_N + f32(wrong))) for outer_N in self.outer)
        return self.append(Close(outer=tuple(f"{digest:016x}" for digest in digests)), author=author)

    def index(self, *, author: int = 0, **changes) -> int:
        made = Index(author=author, state=replace(self.state, **changes))
        self.path(INDEX.name(self.state.number)).write_bytes(INDEX.seal(made, self.signer(author)))
        return self.state.number

    def train(self, rounds: int, *, snapshots_after: Sequence[int] = (), index_after: int | None = None) -> None:
        """Two replicas; a third joins in the middle, and its payloads come a round late."""
        self.join("a")
        self.join("b")
        self.train_on(rounds, snapshots_after=snapshots_after, index_after=index_after)

    def train_on(
        self, rounds: int, *, snapshots_after: Sequence[int] = (), index_after: int | None = None
    ) -> None:
        """The rounds up to a number, after those that were taken."""
        late: dict[int, tuple[Contribution, Tensor]] = {}
        for number in range(self.state.fragments[0].round + 1, rounds + 1):
            for p in range(len(self.outer)):
                sent = [self.send(p, 0), self.send(p, 1, tokens=150)]
                if p in late:
                    sent.append(late.pop(p))
                if number >= 2:
                    late[p] = self.send(p, self.third, tokens=70)
                self.step(p, sent)
            if number in snapshots_after:
                for p in range(len(self.outer)):
                    self.snapshot(p)
            if number == index_after:
                self.index()

    @property
    def third(self) -> int:
        return 2 if len(self.state.members) > 2 else self.join("c")

    def retire(self) -> int:
        """Delete the payloads that nobody needs any more; returns how many."""
        needed = {
            PAYLOAD.name(c.replica, c.seq)
            for log in self.state.fragments
            for ref in log.since
            for c in ref.body.contributions
        }
        counted = {PAYLOAD.name(c.replica, c.seq) for ref in self.outer_refs() for c in ref.body.contributions}
        for name in counted - needed:
            self.path(name).unlink()
        return len(counted - needed)

    def outer_refs(self) -> list[OuterRef]:
        refs = []
        for number in range(len(self.states)):
            entry = ENTRY.open(self.path(ENTRY.name(number)).read_bytes(), "").header
            if isinstance(entry.body, Outer):
                refs.append(OuterRef(number=number, body=entry.body))
        return refs

    def theta(self) -> dict[str, Tensor]:
        """Θ by parameter name."""
        theta = {}
        for name, value in self.initial.items():
            p, start = self.places[name]
            theta[name] = torch.from_numpy(self.outer[p][start : start + value.numel()]).view(value.shape)
        return theta
