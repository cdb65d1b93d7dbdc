"""The memory of vectors."""

import pytest
import torch

from diloco.wire import codec
from diloco.wire.kernels import memory

CPU = torch.device("cpu")


@pytest.fixture
def nothing_spare(monkeypatch):
    monkeypatch.setattr(memory, "_RETURNED_BYTES", 64)
    monkeypatch.setattr(memory, "_spare", [])


def test_memory_is_used_again_when_nobody_holds_it(nothing_spare):
    first = memory.recycled_bytes(100, CPU)
    address, view = first.data_ptr(), first.fill_(7)[10:20]
    del first
    second = memory.recycled_bytes(100, CPU)
    assert second.data_ptr() != address, "a view still holds the first"
    second.fill_(8)
    assert view.tolist() == [7] * 10
    del view
    third = memory.recycled_bytes(100, CPU)
    assert third.data_ptr() == address


def test_memory_of_another_length_is_given_up(nothing_spare):
    memory.recycled_bytes(100, CPU)
    assert [block.size for block in memory._spare] == [100]
    assert memory.recycled_bytes(200, CPU).shape == (200,)
    assert memory.recycled_bytes(30, CPU).shape == (30,), "short vectors have memory of their own"
    assert [block.size for block in memory._spare] == [200], "the last one"


def test_a_payload_in_used_memory_is_the_same(nothing_spare):
    delta_N = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    payload = codec("e3m0").encode(delta_N)
    expected = payload.clone()
    payload.fill_(255)
    del payload
    again = codec("e3m0").encode(delta_N)
    assert torch.equal(again, expected)
