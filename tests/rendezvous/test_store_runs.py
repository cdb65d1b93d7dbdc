"""Runs of two replicas in real servers: with rights to a prefix and by TLS, in Azure's, and on a bad network; and
in a server that does what Hugging Face says of its buckets."""

from collections.abc import Callable, Mapping

import pytest
from tests.engine.test_elastic import counted, until
from tests.engine.test_elastic_ends import assert_sound
from tests.fault_proxy import FaultProxy
from tests.rendezvous.replicas import P, Replica
from tests.servers import Server

pytestmark = pytest.mark.slow
UseEnvironment = Callable[[Mapping[str, str]], None]


def train(url: str, *, num_rounds: int = 2) -> None:
    """Train two replicas for some rounds; the log can be replayed, and a third begins with what comes out."""
    settings = {"poll_seconds": 0.03, "timeout_seconds": 60.0, "snapshot_rounds": 2}
    a, b = (Replica(url, name=name, **settings) for name in "ab")
    until(lambda: min(min(counted(a)), min(counted(b))) >= num_rounds * P, a, b, seconds=90)
    assert_sound(url, a, b)


def test_with_rights_to_a_prefix_alone_and_by_tls(seaweedfs: Server, use_environment: UseEnvironment) -> None:
    use_environment({**seaweedfs.user("member"), **seaweedfs.tls})
    train(seaweedfs.new_url().replace("s3://runs/", "s3://runs/inside/"))


@pytest.mark.parametrize("name", ["azurite", "hugging_face"])
def test_in_another_protocol(name: str, request: pytest.FixtureRequest, use_environment: UseEnvironment) -> None:
    server: Server = request.getfixturevalue(name)
    use_environment(server.environment)
    train(server.new_url())


@pytest.mark.usefixtures("short_pauses")
def test_through_refusals_and_answers_that_are_cut(seaweedfs: Server, use_environment: UseEnvironment) -> None:
    faults = {"409": 0.04, "429": 0.04, "503": 0.04}
    with FaultProxy(seaweedfs.port, seed=3) as proxy:
        use_environment(seaweedfs.through(proxy.url))
        proxy.set(statuses=faults, truncate=0.08, lose_requests=0.04, lose_answers=0.04)
        train(seaweedfs.new_url(), num_rounds=3)
        seen = proxy.counts()
    assert min(seen[fault] for fault in (*faults, "truncate", "lose_request", "lose_answer")) > 0, seen
