"""A codec of one's own: one bit a value, the sign, under the mean magnitude (signSGD, arXiv 1802.04434).

python examples/sign_codec.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import diloco
from diloco.extend import Codec, Key


@dataclass(frozen=True)
class Sign(Codec):
    """±s, s the mean magnitude: 4 bytes of scale, then the signs, eight a byte, the first in the lowest bit."""

    name = "sign"

    def body_bytes(self, num_elements: int) -> int:
        return 4 + -(-num_elements // 8)

    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> Tensor:
        scale = delta_N.abs().mean()
        body[:4] = scale.reshape(1).view(torch.uint8)
        bits = torch.zeros(8 * (body.numel() - 4), dtype=torch.uint8)
        bits[: delta_N.numel()] = delta_N < 0
        body[4:] = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        return scale.isfinite()

    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> Tensor:
        scale = body[:4].clone().view(torch.float32)[0]
        bits = (body[4:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        values_N = (1 - 2 * bits.flatten()[: to_N.numel()].float()) * scale
        to_N.copy_(to_N + values_N if add else values_N)
        return scale.isfinite()


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments="whole",
        sync_every=5,
        overlap_steps=0,
        wire=Sign(),
        error_feedback=1.0,
        exchange=diloco.LoopbackExchange(),
    )
    inputs, target = torch.randn(256, 64), torch.randn(64, 1)
    for step in range(101):
        loss = (model(inputs) - inputs @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    engine.finish()
    print(f"{engine.settings.wire.payload_bytes(1_000_000):,} bytes for 1,000,000 values")


if __name__ == "__main__":
    main()
