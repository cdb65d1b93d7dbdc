"""Engines over a store: with fixed members as over gloo, and with members that come and go."""

from collections.abc import Callable

import pytest
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, tokens
from tests.memory import backgrounds
from tests.processes import run_replicas
from tests.rendezvous.replicas import Replica, wait_for_entry
from torch import nn

import diloco

H, P = 4, 3


def engine_of(case: Case, model: nn.Module, **exchange) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model,
        fragments=diloco.sequential(model, layers_per_fragment=1),
        schedule=case.schedule(),
        wire=case.wire,
        combine=case.combine,
        mixing=case.alpha,
        error_feedback=case.beta,
        **exchange,
    )


CASES = [
    Case(P=P, H=H, T=14, tau=0, wire="fp32"),
    Case(P=P, H=H, T=14, tau=2, wire="e3m0", beta=0.5, weights="tokens_squared_per_step"),
]
OF_SHARES = [
    Case(P=P, H=H, T=14, tau=0, wire="e3m0", combine="reduce_scatter:bf16"),
    Case(P=P, H=H, T=14, tau=2, wire="int4:stochastic=true", combine="reduce_scatter", weights="tokens"),
]


def hashes(engine: diloco.StreamingDiLoCo, model: nn.Module, replica: int, case: Case) -> tuple[str, float]:
    for t in range(1, case.T + 1):
        inner_step(model, replica, t)
        engine.step(tokens=8 if case.weights == "equal" else tokens(replica, t))
    engine.finish()
    return engine.outer_hash(), sum(p.double().sum().item() for p in model.parameters())


def over_both(folder: str) -> list:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = []
    for number, case in enumerate(CASES + (OF_SHARES if size > 1 else [])):
        model = case.model()
        group = diloco.ProcessGroupExchange() if size > 1 else diloco.LoopbackExchange()
        by_gloo = hashes(engine_of(case, model, exchange=group, weights=case.weights), model, rank, case)
        model = case.model()
        url = f"{folder}/store{number}"
        wait_for_entry(url, rank)  # the order of joins is that of the ranks
        num_shares = size if case in OF_SHARES else None
        rules = {"quorum": "all", "num_replicas": size, "num_shares": num_shares}
        rules["weights"] = None if case.weights == "equal" else case.weights
        exchange = diloco.StoreRendezvous(url, poll_seconds=0.004, timeout_seconds=60, **rules)
        engine = engine_of(case, model, rendezvous=exchange)
        assert exchange.replica == rank
        by_store = hashes(engine, model, rank, case)
        exchange.leave()
        pairs.append((by_gloo, by_store))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_fixed_members_end_with_the_bits_of_a_process_group(size: int, tmp_path) -> None:
    everyones = run_replicas(over_both, size, str(tmp_path))
    for pairs in everyones:
        for by_gloo, by_store in pairs:
            assert by_gloo == by_store
    assert len({pairs[0][0][0] for pairs in everyones}) == 1


@pytest.mark.parametrize("end", [Replica.finish, Replica.vanish])
def test_no_thread_is_left_when_a_replica_has_left_or_ended(end: Callable[[Replica], None], tmp_path) -> None:
    replica = Replica(str(tmp_path))
    background = replica.exchange._background
    assert background in list(backgrounds())
    for _ in range(20):
        replica.step()
    end(replica)
    assert background not in list(backgrounds())


@pytest.mark.parametrize(
    ("step_tokens", "max_local_steps"),
    [(None, 1 << 50), (1 << 24, 1 << 50), (1 << 40, None), (8, 5)],
)
def test_a_replica_declares_no_more_than_the_run_lets_join(step_tokens, max_local_steps, tmp_path) -> None:
    replica = Replica(str(tmp_path), step_tokens=step_tokens, max_local_steps=max_local_steps)
    (member,) = replica.exchange.state.members
    assert 1 <= member.step_tokens * member.most_steps <= 1 << 40
    assert step_tokens in (None, member.step_tokens)
    assert step_tokens != 8 or member.most_steps == 100 * 6, "100 H"
    replica.vanish()
