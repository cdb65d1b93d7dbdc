"""Parameters by fragment against the model that holds them; of shards see test_sharded.py."""

import pytest
import torch
from torch import nn

import diloco
from diloco.engine.parameters import FragmentParameters
from diloco.errors import UserError


def model_of_two_blocks() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
    model.head = nn.Linear(2, 3, bias=False).to(torch.bfloat16)
    return model


def cut(model: nn.Module) -> FragmentParameters:
    return FragmentParameters(model, diloco.strided(model, layers_per_fragment=1))


def test_flat_vectors_and_names_are_each_others_inverse():
    model = model_of_two_blocks()
    parameters = cut(model)
    flat = [parameters.flat(fragment) for fragment in range(3)]
    assert [(flat_N.dtype, flat_N.numel()) for flat_N in flat] == [(torch.float32, n) for n in (8, 8, 6)]
    named = parameters.all_named(flat)
    assert set(named) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(named[name], parameter.float())
    for fragment, flat_N in enumerate(flat):
        assert torch.equal(parameters.flat_of(fragment, named), flat_N)
    named["blocks.1.bias"].fill_(7)  # a view
    assert flat[1][6:].tolist() == [7, 7]


def test_outer_gradient_is_the_difference():
    model = model_of_two_blocks()
    parameters = cut(model)
    before = [parameters.flat(fragment) for fragment in range(3)]
    moves = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(moves[name])
    for fragment, outer_N in enumerate(before):
        delta_N = parameters.outer_gradient(fragment, outer_N, torch.empty_like(outer_N))
        assert torch.equal(delta_N, outer_N - parameters.flat(fragment))
        assert delta_N.abs().min() > 0


def test_places_say_where_a_parameter_is_found():
    model = model_of_two_blocks()
    parameters = cut(model)
    facts = parameters.facts(map(parameters.flat, range(3)))
    for name, parameter in model.named_parameters():
        shape, fragment, start = facts[f"shape, fragment and place of parameter {name}"]
        part_N = parameters.flat(fragment)[start : start + parameter.numel()]
        assert torch.equal(part_N.view(shape), parameter.float())


def test_names_the_first_that_is_not_finite():
    parameters = cut(model_of_two_blocks())
    flat_N = torch.zeros(8)
    assert parameters.first_not_finite(1, flat_N) is None
    flat_N[7] = torch.inf
    assert parameters.first_not_finite(1, flat_N) == "blocks.1.bias"
    flat_N[0] = torch.nan
    assert parameters.first_not_finite(1, flat_N) == "blocks.1.weight"


@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])
def test_a_module_that_takes_another_ones_place_is_refused_by_its_parameter(module: nn.Module):
    model = model_of_two_blocks()
    parameters = cut(model)
    module.requires_grad_(False)
    model.blocks[1] = module
    parameters.check_still_the_models([0, 2])
    with pytest.raises(
        UserError, match=r"parameter blocks\.1\.(weight|bias) was replaced .*: build the engine last"
    ):
        parameters.check_still_the_models([0, 1])


def test_a_model_that_is_converted_later_is_refused():
    model = model_of_two_blocks()
    parameters = cut(model)
    model.blocks[1].double()
    parameters.check_still_the_models([0, 2])
    sentence = r"blocks\.1\.weight was torch\.float32 on cpu when the engine was built, and is torch\.float64"
    with pytest.raises(UserError, match=sentence):
        parameters.check_still_the_models([1])
