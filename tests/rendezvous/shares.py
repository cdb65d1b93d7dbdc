"""One outer step whose fragment is cut into shares: its payloads, its entry and its averages, in memory.

Shapes: N elements of the fragment, S of a share.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.rendezvous.cases import Log, header_of
from torch import Tensor

from diloco.outer.averages import encode_shares
from diloco.rendezvous.contract import Form, Payload
from diloco.rendezvous.log.entries import Outer
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.run import OuterRef
from diloco.rendezvous.objects import (
    AVERAGE,
    AverageHeader,
    Header,
    average_of,
    norm_of,
    open_average,
)
from diloco.rendezvous.objects import header_of as average_header_of
from diloco.wire import codec

N, R, SEED = 300, 4, 5


class CutStep:
    """An outer step of two replicas, fragment 1 of two.

    Args:
        wire: the codec.
        second: that of the averages.
        signers: one a replica; without keys by default.
    """

    def __init__(self, wire: str = "e3m0", second: str = "bf16", *, signers: Sequence[Signer] = ()) -> None:
        self.form = Form(codec=codec(wire), sizes=(7, N), seed=SEED, second=codec(second), num_shares=R)
        self.signers = list(signers) or [Signer(), Signer()]
        log = Log(num_fragments=2, num_shares=R)
        for replica, name in enumerate("ab"):
            log.join(name)
            members = [*log.state.members]
            members[replica] = replace(members[replica], key=self.signers[replica].public)
            log.state = replace(log.state, members=tuple(members))
        self.state = log.state
        generator = torch.Generator().manual_seed(0)
        self.sent: list[tuple[Tensor, ...]] = []
        """The shares' payloads of each replica."""
        self.headers = [self._send(replica, torch.randn(N, generator=generator)) for replica in range(2)]
        parts = tuple(header.contribution() for header in self.headers)
        self.body = Outer(fragment=1, round=1, before="0" * 16, contributions=parts)
        self.ref = OuterRef(number=3, body=self.body)

    def _send(self, replica: int, delta_N: Tensor) -> Header:
        key = self.form.key(1, 0, replica)
        shares = encode_shares(self.form.codec, delta_N, R, key)
        for share in shares:
            self.form.codec.seal(share, self.form.share_size(1), base=17)
        self.sent.append(shares)
        decoded = (
            self.form.codec.decode(payload, self.form.share_size(1), key._replace(part=r))
            for r, payload in enumerate(shares)
        )
        claim = {"replica": replica, "seq": 1, "base_round": 0, "tokens": 100 + 50 * replica}
        offer = {"run": self.state.run, "fragment": 1, "base": f"{17:016x}"}
        bodies, norms = [payload.numpy().data for payload in shares], [*map(norm_of, decoded)]
        return header_of(self.form.codec, N, bodies, norms, **claim, **offer)

    def made(self, share: int, *, by: int = 0, members: Sequence[int] = (0, 1)) -> tuple[AverageHeader, Tensor]:
        """The average of a share over some of the members."""
        shares = {replica: (self.headers[replica], self.sent[replica][share]) for replica in members}
        made = average_of(self.state, self.form, self.body, share, shares)
        left_out = {0, 1} - set(members)
        header = average_header_of(self.state, self.form, self.ref, share, made, replica=by, left_out=left_out)
        return header, made.payload

    def sealed(self, header: AverageHeader, payload: Tensor) -> bytes:
        """The object of an average, signed by its author."""
        return AVERAGE.seal(header, self.signers[header.replica]) + payload.numpy().tobytes()

    def opened(self, data: bytes, share: int) -> tuple[AverageHeader, Payload]:
        """An average as a receiver takes it."""
        return open_average(data, state=self.state, form=self.form, ref=self.ref, share=share)
