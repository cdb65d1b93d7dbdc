"""Torch optimizers as outer rules, by the same optimizer on whole vectors, without an engine."""

import pytest
import torch
from tests.engine.cases import Case

import diloco
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.outer.torch_optimizer import TorchOptimizer, rule_of_optimizer
from diloco.schedule import Sync

N = 5


OPTIMIZERS = {
    "heavy ball": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    "dampened": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "dampening": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.2, "betas": (0.9, 0.95), "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.2, "initial_accumulator_value": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 0.2}),
    "asgd": (torch.optim.ASGD, {"lr": 0.2}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_on_theta_as_it_does_alone(name: str) -> None:
    """The slots alone hold the state: each step begins with a new optimizer, as after a resume."""
    kind, settings = OPTIMIZERS[name]
    rule = rule_of_optimizer(kind([torch.zeros(1, requires_grad=True)], **settings))
    vectors = {slot: torch.zeros(N) for slot in ("outer", *rule.slots)}
    expected_N = torch.zeros(N, requires_grad=True)
    alone = kind([expected_N], **settings)
    torch.manual_seed(0)
    for number in range(1, 6):
        total_N = torch.randn(N)
        rule.on_average(
            FragmentState(vectors.__getitem__), Average(total_N.clone(), 2.0), Sync(0, number, 0), Cohort.equal(2)
        )
        expected_N.grad = total_N / 2
        alone.step()
        torch.testing.assert_close(vectors["outer"], expected_N.detach(), rtol=0, atol=0)


def test_a_step_with_a_norm_over_the_vector_is_told_from_one_of_each_element() -> None:
    rules = [TorchOptimizer(kind, settings) for kind, settings in OPTIMIZERS.values()]
    assert all(rule.is_elementwise for rule in rules)
    for kind in (torch.optim.Adafactor, Clipped, Scaled):
        assert not TorchOptimizer(kind, {}).is_elementwise


class Clipped(torch.optim.SGD):
    """A step of at most a length."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 100.0)
        return super().step(closure)


class Scaled(torch.optim.SGD):
    """A step as long as the parameters are, as that of LARS."""

    def step(self, closure=None):
        (theta_N,) = self.param_groups[0]["params"]
        theta_N.grad.mul_(theta_N.norm() / theta_N.grad.norm())
        return super().step(closure)


def test_sgd_with_nesterovs_momentum_is_nesterov() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.7, momentum=0.8, nesterov=True)
    assert rule_of_optimizer(sgd) == Nesterov(lr=0.7, momentum=0.8)
    assert rule_of_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.5)) == Nesterov(lr=0.5, momentum=0.0)
    assert isinstance(rule_of_optimizer(torch.optim.Adam), TorchOptimizer)


def test_the_groups_of_an_optimizer_must_be_alike() -> None:
    theta = [torch.zeros(1), torch.zeros(1)]
    groups = [{"params": theta[:1], "lr": 0.1}, {"params": theta[1:], "lr": 0.2}]
    with pytest.raises(diloco.UserError, match="outer=SGD has groups of parameters with other settings"):
        rule_of_optimizer(torch.optim.SGD(groups, momentum=0.9))


class Odd(torch.optim.SGD):
    """SGD that keeps one number more than there are parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for theta in group["params"]:
                self.state[theta]["odd"] = torch.zeros(len(theta) + 1)


class Counts(torch.optim.SGD):
    """SGD that counts its steps where settings are kept."""

    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Halves(torch.optim.SGD):
    """SGD that takes half of its learning rate."""

    def __init__(self, params, lr=1e-3, **kwargs):
        super().__init__(params, lr=lr / 2, **kwargs)


class PassesOn(torch.optim.AdamW):
    """AdamW whose own signature names no setting."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        (Odd, r"outer=Odd keeps odd, \(8,\) in torch.float32, beside a vector"),
        (Counts, "outer=Counts keeps state in its k"),
        (Halves([torch.zeros(1)], lr=0.5), "outer=Halves takes lr otherwise"),
        (torch.optim.LBFGS, "outer=LBFGS can't take a step"),
        (torch.optim.Muon, "outer=Muon can't be built"),
    ],
)
def test_an_optimizer_that_can_be_no_rule_is_refused(outer: object, expected: str) -> None:
    with pytest.raises(diloco.UserError, match=expected):
        rule_of_optimizer(outer)


def test_settings_that_a_class_passes_on_are_kept() -> None:
    facts = rule_of_optimizer(PassesOn([torch.zeros(1)], lr=0.7)).facts()
    assert facts["lr"] == 0.7 and facts["betas"] == [0.9, 0.999]
    assert rule_of_optimizer(torch.optim.Adafactor).facts()["eps"] == [None, 0.001]


def test_the_dtype_of_new_tensors_is_no_matter() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert set(rule_of_optimizer(torch.optim.AdamW).slots) == {"exp_avg", "exp_avg_sq", "step"}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_state_of_another_optimizer_is_refused() -> None:
    case = Case()
    engine = case.engine(case.model(), exchange=diloco.LoopbackExchange(), outer=torch.optim.Adam)
    other = case.engine(case.model(), exchange=diloco.LoopbackExchange(), outer=torch.optim.RAdam)
    with pytest.raises(diloco.UserError, match="outer_rule"):
        other.load_state_dict(engine.state_dict())
