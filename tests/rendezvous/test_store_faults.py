"""The store behind a network with faults, and before servers that refuse."""

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest
from tests.fault_proxy import FaultProxy, once
from tests.servers import Server

from diloco.rendezvous.store import Store, StoreError, StoreUnreachableError

pytestmark = pytest.mark.slow
UseEnvironment = Callable[[Mapping[str, str]], None]


@pytest.mark.usefixtures("short_pauses")
def test_trouble_that_passes_is_borne(seaweedfs: Server, use_environment: UseEnvironment):
    async def use(store: Store, proxy: FaultProxy) -> None:
        for fault in ("lose_request", "lose_answer", "409", "412", "429", "500", "503"):
            proxy.set(**once(fault))
            before = store.requests.copy()
            assert await store.create(fault, b"mine") is None, fault
            assert await store.create(fault, b"theirs") == b"mine"
            # A lost answer needs no second upload; whatever was not carried out does.
            creates = store.requests["create"] - before["create"]
            assert creates == (2 if fault == "lose_answer" else 3), fault
        for fault in ("lose_request", "lose_answer", "truncate", "409", "412", "429", "503"):
            proxy.set(**once(fault, methods=["GET"]))
            assert await store.get("503", most_bytes=4) == b"mine", fault
        for fault in ("lose_request", "lose_answer", "429", "503"):
            proxy.set(**once(fault, methods=["GET", "POST"]))
            assert len(await store.list("")) == 7
            proxy.set(**once(fault, methods=["GET", "POST"]))
            await store.delete(["absent"])

        proxy.set(outage=True)
        started = time.monotonic()
        reading = asyncio.ensure_future(store.get("503", most_bytes=4))
        await asyncio.sleep(1)
        assert store.outage is not None and "can't read 503 in" in store.outage.trouble
        elapsed = time.monotonic() - started
        assert elapsed - 0.5 < store.outage.seconds < elapsed
        proxy.set()
        assert await reading == b"mine" and store.outage is None

        proxy.set(freeze=True)
        started = time.monotonic()
        with pytest.raises(StoreUnreachableError, match=r"no answer in 1 s"):
            await store.get("503", most_bytes=4, patience_seconds=1)
        assert time.monotonic() - started < 3

    with FaultProxy(seaweedfs.port) as proxy:
        use_environment(seaweedfs.through(proxy.url))
        asyncio.run(use(Store.open(seaweedfs.new_url()), proxy))


@pytest.mark.usefixtures("short_pauses")
def test_one_of_many_wins_on_a_bad_network(seaweedfs: Server, use_environment: UseEnvironment):
    # Whoever is told that it has won has won, whatever was lost on the way: all others read its bytes.
    async def race(stores: list[Store], number: int) -> None:
        answers = await asyncio.gather(*(s.create(f"log/{number}", b"%d" % i) for i, s in enumerate(stores)))
        (winner,) = (i for i, answer in enumerate(answers) if answer is None)
        assert {answer for answer in answers if answer is not None} == {b"%d" % winner}

    async def races(stores: list[Store]) -> None:
        for number in range(6):
            await race(stores, number)

    with FaultProxy(seaweedfs.port, seed=5) as proxy:
        use_environment(seaweedfs.through(proxy.url))
        proxy.set(lose_requests=0.1, lose_answers=0.1, truncate=0.05, statuses={"409": 0.1, "503": 0.05})
        url = seaweedfs.new_url()
        asyncio.run(races([Store.open(url) for _ in range(4)]))
        assert min(proxy.counts()[fault] for fault in ("lose_request", "lose_answer", "409", "503")) > 0


@pytest.mark.parametrize(
    ("user", "url", "sentence"),
    [
        ("admin", "s3://none/run", r"s3://none/run: there is no such bucket"),
        ("reader", "s3://runs/run", r"can't create x in s3://runs/run: permission denied"),
        ("member", "s3://runs/outside", r"permission denied"),
        ("nobody", "s3://runs/run", r"refuses the credentials \(InvalidAccessKeyId\): check AWS_ACCESS_KEY_ID"),
        ("", "s3://runs/run", r"there are no credentials: set AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_refusal_is_one_sentence(
    user: str, url: str, sentence: str, seaweedfs: Server, use_environment: UseEnvironment
):
    environment = seaweedfs.user(user)
    if not user:
        del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    use_environment(environment)
    store, started = Store.open(url), time.monotonic()
    with pytest.raises(StoreError, match=sentence) as error:
        asyncio.run(store.create("x", b"mine"))
    assert "\n" not in str(error.value) and not isinstance(error.value, StoreUnreachableError)
    assert time.monotonic() - started < 15  # the time to look for the credentials of a machine


def test_a_clock_that_is_far_off_is_named(seaweedfs: Server, use_environment: UseEnvironment):
    with FaultProxy(seaweedfs.port) as proxy:
        use_environment(seaweedfs.through(proxy.url))
        proxy.set(**once("403"))
        with pytest.raises(StoreError, match=r"this computer's signatures: set its clock \(RequestTimeTooSkewed"):
            asyncio.run(Store.open(seaweedfs.new_url()).create("x", b"mine"))


def test_rights_to_a_prefix_are_enough(seaweedfs: Server, use_environment: UseEnvironment):
    async def use(store: Store) -> None:
        assert await store.create("x", b"mine") is None and await store.list("") == [("x", 4)]
        await store.delete(["x"])

    use_environment(seaweedfs.user("member"))
    asyncio.run(use(Store.open("s3://runs/inside/run")))


def test_tls_with_a_private_authority(seaweedfs: Server, use_environment: UseEnvironment):
    environment = {**seaweedfs.environment, **seaweedfs.tls}
    use_environment(environment)
    assert asyncio.run(Store.open(seaweedfs.new_url()).create("x", b"mine")) is None
    use_environment({name: value for name, value in environment.items() if name != "SSL_CERT_FILE"})
    with pytest.raises(StoreError, match=r"certificate is not trusted: set SSL_CERT_FILE"):
        asyncio.run(Store.open(seaweedfs.new_url()).create("x", b"mine"))
