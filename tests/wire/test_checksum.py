import torch

from diloco.wire.payload import checksum


def test_the_checksum_is_xxh3_of_the_bytes_in_memory():
    assert (
        checksum() == checksum(b"") == checksum(torch.empty(0)) == 0x2D06800538D394C2
    )  # xxHash's own test vector
    ones = torch.ones(5)
    assert checksum(ones) == checksum(ones.numpy().tobytes()) == checksum(ones[:2], ones.numpy().tobytes()[8:])
    assert checksum(torch.stack([ones, -ones], dim=1)[:, 0].requires_grad_()) == checksum(ones)
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
