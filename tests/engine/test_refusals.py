"""Arguments, models and wrappers that the engine refuses, the facts that replicas compare, and what is right."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step
from tests.processes import run_replicas
from tests.rendezvous.replicas import Replica
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.engine.settings import check_exchange
from diloco.engine.streaming import check_job
from diloco.outer.merge import Mixing

RULE = r"pass a rule such as diloco.Nesterov\(lr=0.4, momentum=0.9\), or a torch optimizer"
FRAGMENTS = r"pass strided, sequential, whole, or a sequence of diloco.Fragment"
EXCHANGE = r"pass diloco.ProcessGroupExchange\(group\), what diloco.connect\(address\) returns, "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer": 0.7}, rf"outer=0.7 is of the wrong type: {RULE}"),
        ({"outer": "nesterof:lr=1"}, "'nesterof:lr=1' is not an outer rule, .*: did you mean nesterov"),
        ({"outer": "nesterov:rate=1"}, r"'rate=1' is not an option of nesterov, .*\(it has: lr=NUMBER, momentum="),
        ({"outer": "nesterov:lr=fast"}, "'nesterov:lr=fast': lr must be NUMBER, not 'fast'"),
        ({"outer": "nesterov:lr=0"}, "^outer=nesterov:lr=0: lr=0.0: the outer learning rate must be above 0"),
        ({"outer": "auto"}, "outer='auto' chooses by the length of the run: pass num_steps=, .* not None"),
        ({"num_steps": 100}, "num_steps=100 is for outer='auto' alone: leave it out"),
        ({"outer": "torch.LBFGS"}, "outer=LBFGS can't take a step on a flat vector"),
        ({"outer": "torch.optim"}, "outer=torch.optim: 'torch.optim': torch.optim has no optim: take torch.AdamW"),
        ({"outer": "torch.AdamW:rate=1"}, "outer=torch.AdamW:rate=1: 'rate' is not a setting of torch.AdamW"),
        ({"mixing": "translate"}, "mixing=translate keeps all .* outer=Nesterov has counted .*=taylor:strength=0"),
        ({"mixing": "half"}, "mixing=half: 'half' is not a merge rule, which are overwrite, mix, translate"),
        ({"mixing": [1]}, r"mixing=\[1\] is of the wrong type: pass a number of at least 0 and below 1"),
        ({"mixing": "mix:alpha=1"}, "mixing=mix:alpha=1: 'mix:alpha=1' keeps all of a replica's own parameters"),
        ({"mixing": 1.0}, "mixing=1 keeps all of a replica's own parameters"),
        ({"wire": None}, r'wire=None is of the wrong type: pass the name of a codec such as "e3m0"'),
        ({"wire": "e9m9"}, "wire=e9m9: 'e9m9' is not a codec: choose one of fp32"),
        (
            {"wire": "pulse"},
            r"wire=pulse:.* without error_feedback loses for ever what one .* set error_feedback=1",
        ),
        (
            {"combine": "reduce_scatter", "wire": "pulse", "error_feedback": 1.0},
            "combine=reduce_scatter with pulse would lose .*: name another .*, such as reduce_scatter:fp32",
        ),
        ({"combine": "reduce_scatter:e9"}, "combine=reduce_scatter:e9: 'e9' is not a codec"),
        ({"weights": "bytes"}, "weights='bytes' is none of equal, tokens, tokens_squared_per_step"),
        ({"combine": None}, 'combine=None is of the wrong type: pass "gather"'),
        ({"error_feedback": "on"}, "error_feedback='on' is of the wrong type: pass a number above 0"),
        ({"schedule": 30}, r"schedule=30 is of the wrong type: pass diloco.Schedule\(sync_every=…"),
        ({"fragments": 3}, rf"fragments=3 is of the wrong type: {FRAGMENTS}"),
        ({"fragments": [("blocks.0.weight",)]}, FRAGMENTS),
        (
            {"fragments": "striped"},
            "fragments='striped' is none of strided, sequential, whole.*did you mean strided",
        ),
        (
            {"sync_every": 3, "schedule": None},
            "sync_every=3 must be above overlap_steps, which is 5 .* from 0 to 2",
        ),
        ({"sync_every": 8}, r"sync_every=8 and schedule=Schedule\(.*: pass one of the two"),
        ({"exchange": None}, "exchange=None and rendezvous=None: pass one of them, exchange=diloco"),
        ({"rendezvous": "s3://bucket/run"}, "exchange=.* and rendezvous=s3://bucket/run: pass one of them"),
        ({"exchange": "host:29500"}, EXCHANGE),
        (
            {"rendezvous": "s3://bucket/run", "exchange": None},
            r"rendezvous='s3://bucket/run' .*StoreRendezvous\(url\)",
        ),
        ({"exchange": diloco.StoreRendezvous("meeting")}, "is a rendezvous: pass rendezvous="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused_with_its_name_and_what_to_pass(changes, message):
    case = Case()
    with pytest.raises(diloco.UserError, match=message) as caught:
        case.engine(case.model(), **changes)
    assert next(iter(changes)) in caught.value.fields


def test_a_rendezvous_of_ones_own_may_set_its_members_when_it_is_made():
    rendezvous = type("Own", (), dict.fromkeys(("join", "leave", "abort"), print))()
    with pytest.raises(diloco.UserError, match="is of the wrong type"):
        check_exchange(None, rendezvous)
    rendezvous.timeout_seconds = 60.0
    check_exchange(None, rendezvous)


def schedule(num_fragments: int, overlap_steps: int | tuple[int, ...] = 0) -> diloco.Schedule:
    return diloco.Schedule(sync_every=4, num_fragments=num_fragments, overlap_steps=overlap_steps)


def masters(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    own = {
        name.replace(".", "_"): parameter.detach().float() for name, parameter in Case().model().named_parameters()
    }
    return {name.replace("_", "."): tensor for name, tensor in (own | changes).items()}


TO_INNER = "outer=AdamW holds the model's parameters, as the inner optimizer"
CONTRADICTIONS: list[tuple[Callable[[nn.Module], dict], str]] = [
    (lambda _: {"schedule": schedule(3)}, "num_fragments=3, but there are 2 fragments"),
    (lambda _: {"schedule": schedule(2, (1, 2))}, r"overlap_steps=\(1, 2\) must hold one number for each of 1"),
    (
        lambda _: {"wire": "dare", "error_feedback": 1.0},
        r"error_feedback=1.0 with wire=dare:density=0.05,.* diverges",
    ),
    (lambda _: {"error_feedback": 1.5}, "error_feedback must be above 0 and at most 1, or None, not 1.5"),
    (lambda _: {"seed": -1}, "seed must be a whole number, at least 0 and below 2.64, not -1"),
    (lambda _: {"combine": "broadcast"}, "combine='broadcast' is neither gather nor"),
    (
        lambda _: {"combine": "reduce_scatter:bf16", "exchange": diloco.LoopbackExchange(ordered=True)},
        "combine=reduce_scatter:bf16 sends its averages when they are ready",
    ),
    (lambda _: {"mixing": 1.5}, "mixing must lie between 0 and 1, not 1.5"),
    (lambda _: {"fragments": [diloco.Fragment(("blocks.0.weight",))]}, "no fragment holds blocks.0.bias"),
    (lambda model: {"outer": torch.optim.AdamW(model.parameters())}, TO_INNER),
    (lambda _: {"masters": [torch.zeros(3)]}, "must map each parameter's name to its FP32 tensor"),
    (
        lambda _: {"masters": {"blocks.0.weight": torch.zeros(1, 3)}},
        "no tensor for parameter blocks.0.bias: give one",
    ),
    (
        lambda _: {"masters": masters(blocks_0_bias=torch.zeros(7))},
        r"the master of parameter blocks.0.bias is \(7,\)",
    ),
    (lambda _: {"masters": masters(blocks_0_bias=torch.zeros(1).double())}, "torch.float64"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_what_contradicts_the_model_or_another_argument_is_refused(changes, message):
    model = Case().model()
    with pytest.raises(diloco.UserError, match=message):
        Case().engine(model, **changes(model))


def bias(tensor: torch.Tensor) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.blocks[1], "bias", nn.Parameter(tensor))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            bias(torch.zeros(1, device="meta")),
            "blocks.0.weight is on cpu and blocks.1.bias on meta: one replica, one",
        ),
        (bias(torch.zeros(1, dtype=torch.complex64)), "blocks.1.bias is torch.complex64: only real floats can be"),
        (lambda model: model.blocks[1].double(), "blocks.1.weight is torch.float64, .* train the model in FP32"),
        (
            lambda model: setattr(model.blocks[1].bias, "data", model.blocks[0].bias.data),
            "blocks.0.bias and blocks.1.bias share memory, .* make them one",
        ),
    ],
)
def test_parameters_that_cant_be_exchanged_are_refused_unless_they_are_frozen(change, message):
    model = Case().model()
    change(model)
    with pytest.raises(diloco.UserError, match=message):
        Case().engine(model)
    model.blocks[1].requires_grad_(False)
    for parameter in model.blocks[0].parameters():
        parameter.data = parameter.data.half()
    Case().engine(model, fragments="whole", schedule=schedule(1))


def test_a_model_without_values_is_refused_until_it_is_filled():
    model = Case().model().to("meta")
    with pytest.raises(
        diloco.UserError, match=r"blocks\.0\.weight is on the meta device, .* call model\.to_empty\(device=…\)"
    ):
        Case().engine(model)
    model.to_empty(device="cpu").load_state_dict(Case().model().state_dict())
    assert Case().engine(model).outer_hash() == Case().engine(Case().model()).outer_hash()


@pytest.mark.parametrize("lazy", [nn.LazyLinear(1), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"])
def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(lazy):
    model = nn.Sequential(nn.Linear(3, 2), lazy)
    with pytest.raises(diloco.UserError, match=r"1\.\w+ has no shape yet, .* call the model once on a batch"):
        diloco.StreamingDiLoCo(model, fragments="whole", exchange=diloco.LoopbackExchange())
    model(torch.ones(4, 3))
    diloco.StreamingDiLoCo(model, fragments="whole", exchange=diloco.LoopbackExchange())


def test_a_model_that_is_no_module_is_refused():
    case = Case()
    with pytest.raises(
        diloco.UserError, match=r"model=<odict_values> .* pass the torch.nn.Module that is trained"
    ):
        diloco.StreamingDiLoCo(
            case.model().state_dict().values(),
            fragments=diloco.whole(case.model()),
            schedule=case.schedule(),
            exchange=diloco.LoopbackExchange(),
        )


def test_the_shortest_call_cuts_the_model_in_strides_and_derives_the_number_of_fragments():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(7)])
    engine = diloco.StreamingDiLoCo(model, exchange=diloco.LoopbackExchange())
    assert engine.settings.fragments == diloco.strided(model)
    assert engine.settings.schedule == diloco.Schedule(sync_every=100, num_fragments=3, overlap_steps=5)
    engine = diloco.StreamingDiLoCo(
        model, fragments="whole", sync_every=7, overlap_steps=0, exchange=diloco.LoopbackExchange()
    )
    assert engine.settings.schedule == diloco.Schedule(sync_every=7, num_fragments=1)


def test_numbers_and_rules_of_any_type_go_on_working():
    case = Case()
    for mixing in (0, False, torch.tensor(0.5), Mixing(0.25)):
        engine = case.engine(case.model(), mixing=mixing)
        assert isinstance(engine.settings.mixing, Mixing)
    for beta in (1, np.float32(0.5), np.float64(0.5)):
        engine = case.engine(case.model(), error_feedback=beta)
        assert engine.settings.error_feedback == beta
        json.dumps(engine.state_dict()["error_feedback"])
    engine = case.engine(
        case.model(),
        wire=diloco.codec("int4"),
        fragments=iter(diloco.strided(case.model(), layers_per_fragment=1)),
    )
    assert engine.settings.wire.name == "int4" and len(engine.settings.fragments) == 2


def train_two_models(combine: str, in_turn: bool) -> str:
    """Two engines over one process group, which step in turn, or one after the other has finished."""
    case = Case(combine=combine)
    models = [case.model() for _ in range(2)]
    engines = [case.engine(model) for model in models]
    turns = [(i, t) for t in range(1, 8) for i in range(2)]
    try:
        for i, t in turns if in_turn else sorted(turns):
            inner_step(models[i], dist.get_rank(), t)
            engines[i].step()
            if t == 7:
                engines[i].finish()
    except diloco.UserError as error:
        return str(error)
    return " ".join(engine.outer_hash() for engine in engines)


@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_two_engines_over_one_process_group_train_one_after_the_other(combine):
    for refusal in run_replicas(train_two_models, 2, combine, True):
        assert re.match(
            r"step 5: another engine .* same process group, .*: give each engine a group or a diloco.connect of",
            refusal,
        )
    assert len(set(run_replicas(train_two_models, 2, combine, False))) == 1


def wrapped(model: nn.Module) -> dict[str, nn.Module]:
    return {"_orig_mod": torch.compile(model, backend="eager"), "inner": nn.ModuleDict({"inner": model})}


@pytest.mark.parametrize("path", ["_orig_mod", "inner"])
def test_a_wrapper_and_its_model_are_not_mixed_up(path):
    case = Case()
    model = case.model()
    wrapper = wrapped(model)[path]
    inside, around = (diloco.sequential(each, layers_per_fragment=1) for each in (model, wrapper))
    case.engine(wrapper, fragments=around)
    with pytest.raises(
        diloco.UserError, match=rf"begin with {path}., and the fragments' have not: pass model.{path}"
    ):
        case.engine(wrapper, fragments=inside)
    with pytest.raises(
        diloco.UserError, match=rf"begin with {path}., and the model's have not: cut the fragments"
    ):
        case.engine(model, fragments=around)


def wrap_in_ddp(folder: str) -> str:
    """A replica in a DDP of its own trains; one in a DDP of all replicas is refused."""
    case = Case()
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = DistributedDataParallel(case.model(), process_group=groups[dist.get_rank()])
    engine = case.engine(model)
    for t in range(1, case.T + 1):
        inner_step(model.module, engine.exchange.replica, t)
        engine.step()
    engine.finish()
    outer_hash = engine.outer_hash()
    model = nn.ModuleDict({"net": DistributedDataParallel(case.model())})
    with pytest.raises(diloco.UserError) as caught:
        case.engine(model, fragments=diloco.sequential(model, layers_per_fragment=1))
    assert str(caught.value).startswith(
        f"net is a DistributedDataParallel over ranks [0, 1], and rank {1 - dist.get_rank()} is another replica"
    )
    fragments = diloco.sequential(model, layers_per_fragment=1)
    with pytest.raises(diloco.UserError, match=r"\[0, 1\], each of which would join the run as a replica: shard"):
        case.engine(model, fragments=fragments, exchange=None, rendezvous=diloco.StoreRendezvous(folder))
    return outer_hash


def wrap_in_fsdp1() -> None:
    case = Case()
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            case.model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        with pytest.raises(diloco.UserError, match=r"the model is a FullyShardedDataParallel.*fully_shard\(model"):
            diloco.StreamingDiLoCo(
                model,
                fragments=diloco.whole(model),
                schedule=diloco.Schedule(sync_every=4, num_fragments=1),
                exchange=diloco.LoopbackExchange(),
            )


def start_with_other_subnormals() -> None:
    torch.set_flush_denormal(dist.get_rank() == 1)
    case = Case()
    with pytest.raises(diloco.DisagreementError) as caught:
        case.engine(case.model())
    assert str(caught.value).startswith(
        "the replicas disagree on whether the CPU flushes subnormal numbers to zero (torch.set_flush_denormal): "
        "replica 0 has false, replica 1 has true"
    )
    torch.set_flush_denormal(True)
    case.engine(case.model())


def start_in_every_wrong_way(folder: str) -> str:
    wrap_in_fsdp1()
    start_with_other_subnormals()
    torch.set_flush_denormal(False)
    return wrap_in_ddp(folder)


def test_wrappers_and_replicas_that_would_train_wrongly_are_refused(tmp_path):
    assert len(set(run_replicas(start_in_every_wrong_way, 2, str(tmp_path)))) == 1


def test_a_frameworks_job_is_no_replica_that_comes_and_goes(tmp_path):
    """The engine has joined the run by then, and leaves it again."""
    case = Case()
    fixed = case.engine(case.model(), exchange=diloco.LoopbackExchange())
    assert check_job(1, fixed) is fixed.exchange
    replica = Replica(str(tmp_path))
    with pytest.raises(diloco.UserError, match=r"train with diloco's own trainer, or in a loop of your own"):
        check_job(1, replica.engine)
    assert replica.exchange.state.members[0].left


def test_weights_of_a_fixed_group_are_refused_where_replicas_come_and_go(tmp_path):
    with pytest.raises(diloco.UserError, match=r"pass StoreRendezvous\(url, weights='tokens'\)"):
        Case().engine(Case().model(), exchange=None, rendezvous=diloco.StoreRendezvous(tmp_path), weights="tokens")


def test_facts_tell_every_setting_apart():
    """A replica with any other setting is noticed by the others."""
    settings = Case(H=10).engine(Case().model()).settings
    other = {
        "schedule": diloco.Schedule(sync_every=11, num_fragments=2),
        "outer": diloco.Nesterov(lr=0.7),
        "mixing": Mixing(0.25),
        "wire": diloco.codec("int4"),
        "combine": "reduce_scatter",
        "error_feedback": 1.0,
        "seed": 1,
        "buffers": "average",
        "weights": "tokens",
    }
    facts = settings.facts(2)
    assert (facts["outer rule"], facts["outer rule's lr"]) == ("Nesterov", 0.4)
    assert (facts["merge rule"], facts["merge rule's alpha"]) == ("Mixing", 0.5)
    for name, value in other.items():
        changed = replace(settings, **{name: value}).facts(2)
        assert changed.keys() == facts.keys() and changed != facts, name
