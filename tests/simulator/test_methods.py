import pytest

from diloco.errors import UserError
from diloco.presets import METHODS
from diloco.simulator.methods import MethodSettings


@pytest.mark.parametrize("fragments", ["strided", "sequential"])
@pytest.mark.parametrize("num_layers", [6, 7, 61])
def test_fragments_partition_the_layers(fragments, num_layers):
    cut = MethodSettings(method="streaming", fragments=fragments).layers(num_layers)
    assert sorted(layer for layers in cut for layer in layers) == list(range(num_layers))
    assert len(cut) == -(-num_layers // 3) and max(map(len, cut)) == 3
    assert {layers.step for layers in cut} == ({len(cut)} if fragments == "strided" else {1})


def test_a_method_without_streaming_has_one_fragment():
    streams = {method: MethodSettings(method=method).layers(7) != (range(7),) for method in METHODS}
    assert list(streams.values()) == [False, False, True, True, True]


def test_a_method_has_the_overlap_of_its_preset_unless_it_is_set():
    overlaps = [MethodSettings(method=method).schedule(2).overlap_steps for method in METHODS]
    assert overlaps == [0, 0, 0, 1, 1]
    for method in METHODS[1:]:
        assert MethodSettings(method=method, overlap_steps=(0, 2)).schedule(2).overlap_steps == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"method": "fsdp"}, "'fsdp' is not a method: choose one of data_parallel, diloco, streaming", "method"),
        (
            {"method": "data_parallel", "overlap_steps": 1},
            "overlap_steps=1, but data_parallel does not overlap",
            "overlap_steps",
        ),
        ({"sync_every": 0}, "sync_every must be at least 1, not 0", "sync_every"),
        ({"fragments": "whole"}, "fragments must be strided or sequential, not 'whole'", "fragments"),
    ],
)
def test_contradictions_are_refused(changes, message, field):
    with pytest.raises(UserError, match=message) as refusal:
        MethodSettings(**{"method": "streaming", **changes})
    assert refusal.value.field == field


def test_a_fragment_larger_than_the_model_is_refused():
    with pytest.raises(UserError, match="layers_per_fragment=3, but the model has num_layers=2"):
        MethodSettings(method="streaming").layers(2)
