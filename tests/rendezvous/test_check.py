import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from tests.fault_proxy import FaultProxy
from tests.servers import Server

from diloco.rendezvous import check
from diloco.rendezvous.check import assert_sound, check_store, refusal
from diloco.rendezvous.store import Store, StoreError

UseEnvironment = Callable[[Mapping[str, str]], None]


def test_a_race_has_one_winner_whose_bytes_all_read():
    won, lost = (True, b"racer 0"), (False, b"racer 0")
    assert refusal([[won, lost, lost]]) is None
    for laps, reason in (
        ([[won, lost], [won, (True, b"racer 1")]], "in 1 of 2 races the store told more than one racer"),
        ([[lost, lost], [won, lost]], "in 1 of 2 races nobody created the absent object"),
        ([[won, (False, None)], [won, (False, b"racer 1")]], "2 reads after 2 races did not give"),
    ):
        assert str(refusal(laps)).startswith(reason)


def test_a_directory_is_sound(tmp_path: Path):
    store = Store.open(str(tmp_path))
    asyncio.run(assert_sound(store))
    assert asyncio.run(store.list("")) == []


def test_a_store_in_which_every_racer_wins_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):

    async def overwrite(self: Store, name: str, parts: list[memoryview]) -> None:
        await obstore.put_async(self._client, name, parts, mode="overwrite")

    monkeypatch.setattr(Store, "_put", overwrite)
    with pytest.raises(StoreError, match=r"in 4 of 4 races the store told more than one racer .*: take another"):
        asyncio.run(assert_sound(Store.open(str(tmp_path))))


@pytest.mark.slow
def test_a_store_that_can_not_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def nothing(*arguments: object, **options: object) -> AsyncIterator[list[dict]]:
        yield []

    async def denied(*arguments: object, **options: object) -> AsyncIterator[list[dict]]:
        raise PermissionDeniedError("listing")
        yield []

    monkeypatch.setattr(obstore, "list", nothing)
    with pytest.raises(StoreError, match="a list lacked 2 of 2 objects"):
        check_store(str(tmp_path), racers=2, rounds=2)
    monkeypatch.setattr(obstore, "list", denied)
    with pytest.raises(StoreError, match=r"can't list check/.*: permission denied"):
        check_store(str(tmp_path), racers=2, rounds=2)


@pytest.mark.parametrize(
    ("small_seconds", "seconds", "large_bytes"),
    [(0.03, 0.2, 1 << 24), (0.03, 0.5, 1 << 20), (0.1, 0.6, 1 << 24), (0.1, 1.0, 1 << 20)],
    ids=["near", "near, slow link", "far", "far, slow link"],
)
def test_a_far_store_is_no_slow_link(
    small_seconds: float, seconds: float, large_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """1 MiB takes a fast link six round trips, in which TCP begins; by these seconds alone it would look slow."""

    async def measured(store: Store, name: str, num_bytes: int) -> tuple[float, float]:
        each = small_seconds if num_bytes == 1000 else seconds
        return each, each

    monkeypatch.setattr(check, "_seconds", measured)
    checked = check_store(str(tmp_path), racers=2, rounds=1)
    assert checked.large_bytes == large_bytes and checked.up_bytes_s == large_bytes / seconds


@pytest.mark.slow
def test_every_store_is_sound(server: Server):
    if server.name == "moto":
        pytest.skip("moto's server looks for an object and writes it without a lock: two racers can win")
    url = server.new_url()
    checked = check_store(url, racers=3, rounds=10)
    assert checked.trouble == ""
    assert 0 < checked.create_seconds[0] <= checked.create_seconds[1] < 5
    assert min(checked.up_bytes_s, checked.down_bytes_s) > 1e6
    assert asyncio.run(Store.open(url).list("")) == []


@pytest.mark.slow
def test_real_racers_find_a_server_whose_create_is_broken(moto: Server, use_environment: UseEnvironment):
    with FaultProxy(moto.port) as proxy:
        use_environment(moto.through(proxy.url))
        proxy.set(strip_condition=True)
        with pytest.raises(StoreError, match="in 5 of 5 races the store told more than one racer"):
            check_store(moto.new_url(), racers=3, rounds=5)
        with pytest.raises(StoreError, match="more than one racer"):
            asyncio.run(assert_sound(Store.open(moto.new_url())))


@pytest.mark.slow
def test_a_bucket_that_keeps_versions_is_named(
    moto: Server, use_environment: UseEnvironment, monkeypatch: pytest.MonkeyPatch
):
    """Payloads that a run deletes would stay there, and be paid for."""
    use_environment(moto.environment)

    async def win(store: Store, folder: str, *_: int) -> None:
        await store.create(f"{folder}/0", b"in moto two racers can win")

    monkeypatch.setattr(check, "_race", win)
    url = f"{moto.environment['AWS_ENDPOINT_URL']}/runs?versioning"
    key = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
    for status, expected in (("Enabled", "s3://runs/x keeps every version of its objects"), ("Suspended", "")):
        content = f"<VersioningConfiguration><Status>{status}</Status></VersioningConfiguration>"
        request = urllib.request.Request(url, content.encode(), key, method="PUT")
        request.add_header("Content-Type", "application/xml")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()
        assert check_store("s3://runs/x", rounds=1, racers=2).trouble.partition(": ")[0] == expected


@pytest.mark.slow
def test_a_racer_that_fails_fails_the_check(seaweedfs: Server, use_environment: UseEnvironment):
    use_environment(seaweedfs.user("reader"))
    with pytest.raises(StoreError, match="permission denied"):
        check_store(seaweedfs.new_url(), racers=2, rounds=2)
