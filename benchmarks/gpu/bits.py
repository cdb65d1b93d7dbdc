"""Bits: every codec, outer step and engine gives on the GPU those of the CPU, Triton those of plain torch."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.merge import Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.outer.step import take_outer_step
from diloco.schedule import Sync
from diloco.wire import CODECS, Key, codec
from diloco.wire.blocks import BlockCodec
from gpu.place import Measurements, Place, Row, engine_of

KEY = Key(seed=1, fragment=2, round=3, replica=4)


def measurements(place: Place) -> Measurements:
    blocks = [name for name, kind in CODECS.items() if issubclass(kind, BlockCodec)]
    specs = [
        *CODECS,
        *(f"{name}:stochastic=true" for name in blocks),
        "e3m0:block=640",
        "topk:values=int4",
        *("topk:density=0.5", "feddropout:density=0.5,values=fp16", "dare:density=0.3,values=int4"),
    ]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    engines: dict[str, Row] = {
        "engine, e3m0": {},
        "engine, error feedback": {"wire": "topk:density=0.1", "error_feedback": 0.9},
        "engine, offload": {"offload": True},
        "engine, bf16": {"dtype": torch.bfloat16},
    }
    return {
        **{f"outer step, {name}": partial(_outer_step, place, dtype) for name, dtype in dtypes.items()},
        **{name: partial(_engine, place, **settings) for name, settings in engines.items()},
        **{spec: partial(_codec, place, spec) for spec in specs},
    }


def _values(num: int) -> Tensor:
    """Any finite FP32 numbers at all, and normal ones."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (num,), generator=generator, dtype=torch.int32)
    signs = torch.randint(0, 2, (num,), generator=generator, dtype=torch.int32) << 31
    any_N = (bits | signs).view(torch.float32)
    return torch.where(torch.rand(num, generator=generator) < 0.5, any_N, torch.randn(num, generator=generator))


def _codec(place: Place, spec: str) -> Row:
    wire, num = codec(spec), place.size((1 << 22) + 3, 4099)
    delta_N, total_N = _values(num), torch.linspace(-1, 1, num)
    expected = wire.encode(delta_N, KEY)
    expected_N = wire.decode_into(total_N.clone(), expected, KEY, add=True)

    def there(how: AbstractContextManager[object]) -> Row:
        """Encode and decode on the device."""
        with how:
            payload = wire.encode(delta_N.to(place.device), KEY)
            decoded_N = wire.decode_into(total_N.to(place.device, copy=True), payload, KEY, add=True)
        same = torch.equal(decoded_N.cpu().view(torch.int32), expected_N.view(torch.int32))
        return {"payload": torch.equal(payload.cpu(), expected), "decoded": same}

    row: Row = {"as it runs there": there(nullcontext())}
    if isinstance(wire, BlockCodec):
        plain = patch.object(BlockCodec, "_gpu", lambda self, vector_N: None)
        row["as plain torch there"] = there(plain)
    row["ok"] = all(same for part in row.values() for same in part.values())
    return row


def _outer_step(place: Place, dtype: torch.dtype) -> Row:
    """A fragment of many tensors, on the CPU and there."""
    generator, sizes = torch.Generator().manual_seed(0), [3, 1, 4096, 777] * place.size(75, 2)
    vectors = torch.randn(3, sum(sizes), generator=generator)
    theta = torch.randn(sum(sizes), generator=generator).to(dtype)
    results = []
    for device in (torch.device("cpu"), place.device):
        outer_N, velocity_N, total_N = (vector.to(device, copy=True) for vector in vectors)
        parameters = [part.clone() for part in theta.to(device).split(sizes)]
        fragment = FragmentState({"outer": outer_N, "velocity": velocity_N}.__getitem__)
        how = Average(total_N, 3), Sync(0, 1, 1), Cohort.equal(3)
        take_outer_step(Nesterov(), Mixing(0.5), fragment, parameters, *how)
        results.append([x.cpu().view(torch.uint8) for x in (outer_N, velocity_N, torch.cat(parameters))])
    return {"ok": all(map(torch.equal, *results))}


def _engine(place: Place, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Row:
    """Twenty steps of an engine, with inner steps of the same bits on both devices."""
    hashes: list[str] = []
    settings = {"wire": "e3m0", **settings}
    for device in (torch.device("cpu"), place.device):
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        model.to(device, dtype)
        engine = engine_of(model, sync_every=4, layers_per_fragment=2, **settings)
        for step in range(1, 21):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    move = torch.randn(parameter.shape, generator=generator) * 2.0**-6
                    parameter.add_(move.to(parameter))
            engine.step()
        engine.finish()
        hashes.append(engine.outer_hash())
    return {"ok": hashes[0] == hashes[1], "outer_hash": hashes[0]}
