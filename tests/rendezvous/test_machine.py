"""Replicas that come and go, by schedules: no invariant of the log breaks."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendezvous.simulated import simulate


@settings(settings.get_profile("hostile"))
@given(st.binary(min_size=400, max_size=900))
def test_no_schedule_breaks_an_invariant(schedule):
    simulate(schedule)
