from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import send_steps

from diloco.errors import UserError
from diloco.presets import METHODS, PRESETS, own_settings
from diloco.schedule import Due, Schedule, Sync
from diloco.wire import CODECS

T = 60


@st.composite
def schedules(draw):
    H = draw(st.integers(1, 13))
    P = draw(st.integers(1, 15))
    steps = st.integers(0, H - 1)
    return Schedule(
        sync_every=H,
        num_fragments=P,
        overlap_steps=draw(steps | st.lists(steps, min_size=1, max_size=4).map(tuple)),
        offsets=draw(st.none() | st.lists(steps, min_size=P, max_size=P).map(tuple)),
        first_sync=draw(st.sampled_from(["full_period", "early"])),
    )


def expected_syncs(schedule: Schedule) -> list[Sync]:
    """Every sync up to step T, by step, then by fragment."""
    syncs = []
    for p in range(schedule.num_fragments):
        steps = send_steps(
            schedule.sync_every, schedule.num_fragments, schedule.offsets, schedule.first_sync, p, T
        )
        syncs += [Sync(p, r, step) for r, step in enumerate(steps, start=1)]
    return sorted(syncs, key=lambda sync: (sync.step, sync.fragment))


@given(schedules())
def test_sends_what_the_reference_sends(schedule):
    syncs = expected_syncs(schedule)
    assert [sync for t in range(1, T + 1) for sync in schedule.due(t).send] == syncs
    assert all(schedule.send_step(sync.fragment, sync.round) == sync.step for sync in syncs)


@given(schedules())
def test_each_replica_merges_its_overlap_later(schedule):
    num_replicas = len(schedule.overlap_steps) if isinstance(schedule.overlap_steps, tuple) else 3
    syncs = expected_syncs(schedule)
    for replica in range(num_replicas):
        tau = schedule.overlap(replica)
        for t in range(1, T + 1):
            due = schedule.due(t, replica)
            assert due.send == schedule.due(t).send
            assert list(due.merge) == [sync for sync in syncs if sync.step + tau == t]


def test_the_papers_example():
    schedule = Schedule(sync_every=100, num_fragments=2, overlap_steps=(0, 20))
    sent = {t: [sync.fragment for sync in schedule.due(t).send] for t in range(1, 301) if schedule.due(t).send}
    assert sent == {100: [0], 150: [1], 200: [0], 250: [1], 300: [0]}
    assert schedule.due(170, replica=1) == Due(send=(), merge=(Sync(1, 1, 150),))
    assert schedule.due(150, replica=0) == Due(send=(Sync(1, 1, 150),), merge=(Sync(1, 1, 150),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync_every": 0}, "sync_every=0 must be at least 1"),
        ({"num_fragments": 0}, "num_fragments=0 must be at least 1"),
        ({"overlap_steps": 10}, "overlap_steps=10 must be at least 0 and below sync_every=10"),
        ({"overlap_steps": -1}, "overlap_steps=-1 must be at least 0"),
        ({"overlap_steps": (3, 12)}, r"overlap_steps=\(3, 12\) must be .* below sync_every=10"),
        ({"overlap_steps": ()}, r"overlap_steps=\(\) must be"),
        ({"offsets": (0, 3, 5)}, r"offsets=\(0, 3, 5\) must hold one step for each of num_fragments=2"),
        ({"offsets": (0, 10)}, r"offsets=\(0, 10\) must each be .* below sync_every=10"),
        ({"offsets": (-1, 0)}, r"offsets=\(-1, 0\) must each be at least 0"),
        ({"sync_every": 4.5}, r"sync_every=4\.5 must be a whole number"),
        ({"overlap_steps": [1, 2]}, r"overlap_steps=\[1, 2\] must be a whole number, or a tuple of them"),
        ({"offsets": 3}, "offsets=3 must be a whole number, or a tuple of them"),
        ({"first_sync": "late"}, "first_sync=late must be full_period or early"),
    ],
)
def test_contradictions_are_refused_with_both_values(fields, message):
    with pytest.raises(UserError, match=message) as refusal:
        Schedule(**{"sync_every": 10, "num_fragments": 2} | fields)
    assert refusal.value.field == next(iter(fields))


@pytest.mark.parametrize("first_sync", ["early", "full_period"])
@pytest.mark.parametrize(("period", "num_fragments", "offsets"), [(10, 3, None), (7, 2, (0, 0)), (5, 5, None)])
def test_next_sent_is_what_the_next_sync_sends(first_sync, period, num_fragments, offsets):
    schedule = Schedule(sync_every=period, num_fragments=num_fragments, offsets=offsets, first_sync=first_sync)
    for step in range(1, 4 * period):
        following = next(t for t in range(step, 10 * period) if schedule.sent(t))
        assert schedule.next_sent(step) == tuple(sync.fragment for sync in schedule.sent(following))


def test_every_method_with_an_outer_step_has_a_preset():
    assert tuple(PRESETS) == METHODS[1:]
    assert all(preset.wire in CODECS for preset in PRESETS.values())


def test_the_first_is_diloco_and_each_of_the_others_changes_one_thing():
    presets = [own_settings(method) for method in PRESETS]
    assert presets[0] == {"fragments": "whole", "overlap_steps": 0, "mixing": 0.0, "wire": "fp32"}
    changes = [{name: b[name] for name in a if a[name] != b[name]} for a, b in pairwise(presets)]
    assert changes == [{"fragments": "strided"}, {"overlap_steps": 1, "mixing": 0.5}, {"wire": "e3m0"}]
