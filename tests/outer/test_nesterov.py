from unittest.mock import patch

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_device import FakeDevice
from tests.processes import run_replicas

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.merge import Mixing, Past, Translation
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.outer.step import merge_in_place, take_outer_step
from diloco.schedule import Sync

f32 = np.float32
SEEDS = st.integers(0, 2**32 - 1)
ETAS = st.floats(0.01, 2.0)
MUS = st.floats(0.0, 0.999)


def vectors(seed: int, num: int) -> list[np.ndarray]:
    """FP32 vectors whose elements spread over many magnitudes, zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num, 40)) * 10.0 ** rng.integers(-12, 6, (num, 40))
    return list(np.where(rng.random((num, 40)) < 0.1, 0, values).astype(f32))


def same_bits(actual: torch.Tensor, expected: np.ndarray) -> bool:
    assert expected.dtype == f32
    return actual.dtype == torch.float32 and actual.numpy().tobytes() == expected.tobytes()


@given(SEEDS, ETAS, MUS)
def test_the_outer_step_is_the_equation_in_float32(seed, eta, mu):
    Theta, v, *deltas = vectors(seed, 6)
    outer, velocity = torch.tensor(Theta), torch.tensor(v)
    for delta in deltas:
        v = f32(mu) * v + delta
        Theta = Theta - f32(eta) * (delta + f32(mu) * v)
        outer, velocity = Nesterov(lr=eta, momentum=mu).step(outer, velocity, torch.tensor(delta))
        assert same_bits(outer, Theta) and same_bits(velocity, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(SEEDS, st.integers(1, 7), ETAS, MUS, st.floats(0.0, 1.0))
def test_an_outer_step_in_place_is_average_nesterov_and_merge(dtype, seed, num_replicas, eta, mu, alpha):
    Theta, v, total, theta = (torch.tensor(vector) for vector in vectors(seed, 4))
    outer, delta = Nesterov(lr=eta, momentum=mu), total / f32(num_replicas)
    parameters = [part.to(dtype) for part in (theta[:1].view(()), theta[1:31].view(5, 6).T, theta[31:])]
    expected = [*outer.step(Theta, v, delta)]
    merged = [
        Mixing(alpha).merge(parameter.float().reshape(-1), part, Past()).to(dtype)
        for parameter, part in zip(parameters, expected[0].split([1, 30, 9]), strict=True)
    ]
    fragment = FragmentState({"outer": Theta, "velocity": v}.__getitem__)
    average = Average(total, num_replicas)
    how = (fragment, parameters, average, Sync(0, 1, 1), Cohort.equal(num_replicas))
    take_outer_step(outer, Mixing(alpha), *how)
    assert all(map(torch.equal, (Theta, v), expected)) and torch.equal(average.divided(), delta)
    assert all(torch.equal(now.reshape(-1), then) for now, then in zip(parameters, merged, strict=True))


def step_on_the_fake_device(dtype: torch.dtype, num_tensors: int) -> int:
    """Launches of an outer step and its merge; the bits are the CPU's."""
    generator = torch.Generator().manual_seed(0)
    Theta, v, total = torch.randn(3, 7 * num_tensors, generator=generator)
    parameters = [theta.to(dtype) for theta in torch.randn(num_tensors, 7, generator=generator)]
    with FakeDevice() as device:
        copies = [device.wrapped(vector.clone()) for vector in (Theta, v, total, *parameters)]
        how = Sync(0, 1, 1), Cohort.equal(2)
        device.clear()
        fragment = FragmentState({"outer": copies[0], "velocity": copies[1]}.__getitem__)
        take_outer_step(Nesterov(), Mixing(0.5), fragment, copies[3:], Average(copies[2], 2), *how)
        launches = sum(device.launches.values())
    fragment = FragmentState({"outer": Theta, "velocity": v}.__getitem__)
    take_outer_step(Nesterov(), Mixing(0.5), fragment, parameters, Average(total, 2), *how)
    assert all(torch.equal(copies[i].inner, x) for i, x in enumerate((Theta, v)))
    assert all(torch.equal(copy.inner, x) for copy, x in zip(copies[3:], parameters, strict=True))
    assert not device.host_reads and not device.races
    return launches


def launches_on_the_fake_device() -> list[int]:
    dtypes = torch.float32, torch.bfloat16
    return [step_on_the_fake_device(dtype, num) for dtype in dtypes for num in (4, 300)]


def test_a_gpu_launches_as_much_for_300_tensors_as_for_4_and_gives_the_bits_of_a_cpu():
    assert run_replicas(launches_on_the_fake_device, 1) == [[15, 15, 16, 16]]


@pytest.mark.parametrize("most", [1, 7, 30, 40])
@given(SEEDS)
def test_the_pieces_of_a_merge_change_no_bit(most, seed):
    Theta, before, theta = (torch.tensor(vector) for vector in vectors(seed, 3))
    parts = [theta.clone()[a:b] for a, b in ((0, 1), (1, 3), (3, 3), (3, 33), (33, 40))]
    parts[3] = parts[3].view(6, 5).t().contiguous().t()  # it lies otherwise in memory
    with patch("diloco.outer.step.elements_at_once", return_value=most):
        merge_in_place(parts, Theta, Translation(), Past(before))
    merged = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(merged, Translation().merge(theta, Theta, Past(before)))


@given(SEEDS)
def test_nothing_is_changed_in_place(seed):
    before = vectors(seed, 3)
    after = [torch.tensor(vector) for vector in before]
    Nesterov().step(*after)
    Mixing(0.5).merge(after[0], after[1], Past())
    assert all(same_bits(tensor, vector) for tensor, vector in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "lr=0.0: the outer learning rate must be above 0 and finite"),
        ({"lr": float("nan")}, "lr=nan: the outer learning rate"),
        ({"lr": float("inf")}, "lr=inf: the outer learning rate"),
        ({"momentum": 1.0}, "momentum=1.0: the outer momentum must be from 0 to below 1"),
        ({"momentum": -0.1}, "momentum=-0.1: the outer momentum"),
    ],
)
def test_what_cannot_train_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Nesterov(**fields)


@pytest.mark.parametrize("fields", [{"lr": "0.4"}, {"momentum": None}])
def test_fields_must_be_numbers(fields, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # no user's process checks types
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r} must be a number$"):
        Nesterov(**fields)
    assert Nesterov(lr=np.float32(0.5), momentum=0).facts() == {
        **Nesterov().facts(),
        "lr": 0.5,
        "momentum": 0.0,
    }


def test_a_vector_of_a_wrong_shape_is_refused_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        Translation().merge(torch.zeros(4), torch.zeros(2, 2), Past(torch.zeros(4)))
