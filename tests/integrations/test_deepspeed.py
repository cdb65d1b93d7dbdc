"""DeepSpeed inside each of two replicas: two sites of two processes, each site a job of its own."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.integrations.jobs import meet_at
from tests.ports import free_port
from tests.processes import init_group, run_replicas
from torch import nn

import diloco

if find_spec("deepspeed") is None:  # importing takes seconds
    pytest.skip("deepspeed is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # DeepSpeed has no fp16 on a CPU


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))


def deepspeed_model(stage: int, dtype: str):
    """A network under DeepSpeed, with torch's own collectives: to build DeepSpeed's takes a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    model, *_ = deepspeed.initialize(model=network(), config=config, dist_init_required=False)
    return model


def train(
    number: int, port: int, stage: int, dtype: str, leader: bool, *, adapted: bool = True
) -> tuple[str, float]:
    """The hash of Θ and the last loss; with α = 0 the masters end as Θ, and the parameters as it is rounded."""
    from diloco.integrations.deepspeed import DeepSpeedMasters

    meet_at(port)
    model = deepspeed_model(stage, dtype)
    trained = model if leader else model.module
    engine = diloco.StreamingDiLoCo(
        trained,
        fragments=diloco.whole(trained),
        schedule=diloco.Schedule(sync_every=6, num_fragments=1),
        mixing=0.0,
        wire="fp32",
        masters=DeepSpeedMasters(model) if adapted else None,
        exchange=diloco.connect(replica=number // 2, num_replicas=2, leader=leader, timeout_seconds=20),
    )
    if adapted:
        with pytest.raises(diloco.UserError, match="attach the DeepSpeedZeroOptimizer around it"):
            engine.attach(model.optimizer.optimizer)
        engine.attach(model.optimizer)
    data = torch.Generator().manual_seed(number)
    for micro_step in range(72):
        inputs = torch.randn(8, 8, generator=data).to(DTYPES[dtype])
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).float().square().mean()
        overflows = (number, micro_step, dtype) == (0, 20, "bf16")  # its site skips that step
        model.backward(loss * torch.inf if overflows else loss)
        model.step()
        if not adapted and micro_step % 2:
            engine.step()
    engine.finish()
    assert engine.num_steps == 36, "micro-steps do not count, and a step that is skipped does"
    outer = engine.outer_parameters()
    parameters = dict(trained.named_parameters())
    for name, master in DeepSpeedMasters(model).read(tuple(parameters)).items():
        assert torch.equal(master, outer[name]), "the masters are Θ to the last bit"
        assert torch.equal(parameters[name], outer[name].to(DTYPES[dtype]))
    return engine.outer_hash(), loss.item()


def train_without_masters(number: int, port: int) -> str:
    """The error that ends training."""
    # Its own error, the other replica's, or that of a collective that the other process of the site has left.
    with pytest.raises((diloco.DilocoError, RuntimeError)) as undone:
        train(number, port, 1, "bf16", True, adapted=False)
    dist.destroy_process_group()  # or the other process waits in it
    return str(undone.value)


def refusal_of_zero_3() -> str:
    from diloco.integrations.deepspeed import DeepSpeedMasters

    with pytest.raises(diloco.UserError) as refused:
        DeepSpeedMasters(SimpleNamespace(zero_optimization_stage=lambda: 3))
    return str(refused.value)


CASES = [(1, "bf16", True), (2, "bf16", False), (2, "fp32", True)]
"""ZeRO's stage, the type of the parameters, and whether one process speaks for its site."""


def train_all(folder: str, ports: list[int]) -> tuple[list[tuple[str, float]], str, str]:
    """The results of each case, and the errors without masters and of ZeRO 3, in a process of two sites."""
    warnings.simplefilter("ignore")  # DeepSpeed's own
    number = int(os.environ["DILOCO_REPLICA"])
    site, rank = divmod(number, 2)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    Path(folder, str(site)).mkdir(exist_ok=True)
    init_group(f"{folder}/{site}", rank, 2)
    *others, last = ports
    results = [train(number, port, *case) for port, case in zip(others, CASES, strict=True)]
    return results, train_without_masters(number, last), refusal_of_zero_3()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[tuple[list[tuple[str, float]], str, str]]:
    """The results of `train_all` in each process: to import DeepSpeed takes longer than to train."""
    ports = [free_port() for _ in range(len(CASES) + 1)]
    imports = ["deepspeed.runtime.zero.muon.original_muon"]
    folder = str(tmp_path_factory.mktemp("sites"))
    return run_replicas(train_all, 4, folder, ports, joined=False, timeout_seconds=200, imports=imports)


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_two_sites_with_deepspeed_inside_train_one_model(trained, case):
    results = [results[case] for results, *_ in trained]
    assert len({outer_hash for outer_hash, _ in results}) == 1
    assert all(loss < 2.0 for _, loss in results), "the variance of the target is 8"


def test_deepspeed_without_the_adapter_is_refused(trained):
    messages = [message for _, message, _ in trained]
    for site in (messages[:2], messages[2:]):
        assert any("was undone by the next inner step" in each and "masters=" in each for each in site)


def test_zero_3_is_refused(trained):
    assert all("set zero_optimization" in refusal for _, _, refusal in trained)
