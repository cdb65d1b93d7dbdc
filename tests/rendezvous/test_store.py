import asyncio
import errno
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from tests.servers import Server

from diloco.errors import FileWriteError, UserError
from diloco.files import create
from diloco.rendezvous.store import (
    LARGE_BYTES,
    MOST_BYTES_AT_ONCE,
    Store,
    StoreError,
    StoreUnreachableError,
    Turns,
    _Retry,
    lasting,
)

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "SSL_CERT")):
            monkeypatch.delenv(name)


def test_what_is_created_is_read_and_stays(tmp_path: Path):
    async def use(store: Store) -> None:
        assert await store.get("log/0000000000", most_bytes=10) is None
        assert await store.create("log/0000000000", [b"on", memoryview(b"e")]) is None
        assert await store.create("log/0000000000", b"other") == b"one"
        assert bytes(await store.get("log/0000000000", most_bytes=3)) == b"one"
        assert await store.create("empty", []) is None and await store.get("empty", most_bytes=0) == b""
        assert await store.list("") == [("empty", 0), ("log/0000000000", 3)]
        assert await store.list("log") == [("log/0000000000", 3)] and await store.list("none") == []
        several = [f"payloads/0/{i}" for i in range(30)]
        for name in several:
            await store.create(name, b"payload")
        await store.delete(["absent", "log/0000000000", "empty", *several])
        assert await store.list("") == []
        assert await store.list("", after="none") == [] and store.outage is None

    for url in (str(tmp_path / "store"), f"file://{tmp_path}/store"):
        asyncio.run(use(Store.open(url)))


_LATE_THREAD = """
import asyncio, builtins, sys, time
from diloco.rendezvous.store import Store

wake = asyncio.SelectorEventLoop._write_to_self


def late(loop):
    wake(loop)
    time.sleep(0.04)  # in the client library's thread


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)  # while Python takes itself down


builtins.slow = Slow()
asyncio.SelectorEventLoop._write_to_self = late
store = Store.open(sys.argv[1])
asyncio.run(store.create("name", b"value"))
asyncio.run(store.get("name", most_bytes=5))
"""


def test_a_program_ends_well_whose_last_answer_has_just_come(tmp_path: Path):
    command = [sys.executable, "-c", _LATE_THREAD, str(tmp_path / "store")]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_objects_take_turns_on_a_slow_link(tmp_path, monkeypatch):
    monkeypatch.setenv("DILOCO_STORE_LINK", "8Mbit,20ms")  # 1 kB per ms
    store = Store.open(str(tmp_path / "store"))

    async def use() -> list[float]:
        begun = time.monotonic()
        await asyncio.gather(*(store.create(f"payload/{i}", bytes(40_000)) for i in range(3)))
        sent = time.monotonic()
        assert len(await store.get("payload/1", most_bytes=40_000)) == 40_000
        return [sent - begun, time.monotonic() - sent]

    up, down = asyncio.run(use())
    assert up >= 0.02 + 3 * 0.04 and down >= 0.02 + 0.04
    for wrong in ("fast", "8Mbit", "8Mbit,20", "0Mbit,20ms"):
        monkeypatch.setenv("DILOCO_STORE_LINK", wrong)
        with pytest.raises(UserError, match=f"DILOCO_STORE_LINK={wrong} is no slow link"):
            Store.open(str(tmp_path / "store"))


def test_no_more_is_read_than_an_object_may_have(tmp_path: Path):
    async def use(store: Store) -> None:
        await store.create("payload", bytes(1000))
        with pytest.raises(StoreError, match=r"payload in /.* has 1,000 bytes, and may have 999"):
            await store.get("payload", most_bytes=999)
        assert store.bytes_down == 0 and store.bytes_up == 1000

    asyncio.run(use(Store.open(str(tmp_path))))


def test_an_upload_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The request is carried out, and the connection closes before its answer.
    put = Store._put

    async def lose_answer(*arguments) -> None:
        await put(*arguments)
        monkeypatch.setattr(Store, "_put", put)
        raise GenericError("Generic S3 error: HTTP error: error sending request")

    monkeypatch.setattr(Store, "_put", lose_answer)
    store = Store.open(str(tmp_path))
    assert asyncio.run(store.create("log/0", b"mine")) is None
    assert store.requests == {"create": 1, "get": 1} and store.outage is None


def test_exists_of_what_has_not_landed_means_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # S3 answers 409 while somebody else's conditional write is in progress, which may fail after all.
    put = Store._put

    async def answer_conflict(*arguments: object) -> None:
        monkeypatch.setattr(Store, "_put", put)
        raise AlreadyExistsError("Object at location log/0 already exists")

    monkeypatch.setattr(Store, "_put", answer_conflict)
    store = Store.open(str(tmp_path))
    assert asyncio.run(store.create("log/0", b"mine")) is None
    assert store.requests == {"create": 2, "get": 1}


def test_patience_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    store, sentence = Store.open("s3://bucket/run"), r"can't create log/0 in s3://bucket/run within 0.3 s: check"
    with pytest.raises(StoreUnreachableError, match=sentence) as refusal:
        asyncio.run(store.create("log/0", b"mine", patience_seconds=0.3))
    assert "\n" not in str(refusal.value) and store.outage is None, "nobody waits any more"


BUCKET_FULL = GenericError("Server returned non-2xx status code: 507 Insufficient Storage")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BUCKET_FULL, "507 Insufficient Storage"),
        (OSError(errno.ENOSPC, "full"), "no space left on device"),
        (OSError(errno.EDQUOT, "full"), "disk quota exceeded"),
        (AlreadyExistsError("log/1"), "the store says that it exists, and then that it does not"),
    ],
)
def test_an_entry_that_can_not_be_written_is_an_outage_whatever_else_can(error, reason, tmp_path, monkeypatch):
    """Until it is written: other entries are read and payloads written meanwhile."""
    store, put = Store.open(str(tmp_path)), Store._put
    if error is BUCKET_FULL:
        store.url = "s3://bucket/run"

    async def refuse(self, name: str, parts: list[memoryview]) -> None:
        if name == "log/1":
            raise error
        await obstore.put_async(self._client, name, parts, mode="create")

    async def use() -> None:
        monkeypatch.setattr(Store, "_put", refuse)
        creating = asyncio.ensure_future(store.create("log/1", b"mine"))
        while store.outage is None:
            await asyncio.sleep(0.001)
        since = store.outage.since
        assert await store.create("payload", b"mine") is None and await store.get("payload", most_bytes=9)
        assert store.outage is not None and (store.outage.since, reason in store.outage.trouble) == (since, True)
        store.url = str(tmp_path)
        monkeypatch.setattr(Store, "_put", put)
        assert await creating is None and store.outage is None

    asyncio.run(use())


def test_an_object_in_a_directory_is_on_disk_before_its_name_shows(tmp_path: Path, monkeypatch):
    """The file, then its name, then the folder; a folder that is new, in the one above."""
    fsync, link, done = os.fsync, os.link, []

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(tmp_path))
        done.append(re.sub("#[0-9]+", "#", name))

    def noted_link(source: Path, target: Path) -> None:
        link(source, target)
        done.append("link")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    asyncio.run(Store.open(str(tmp_path)).create("payloads/0/7", b"mine"))
    assert done == ["", "/payloads", "/payloads/0/7#", "link", "/payloads/0"]
    assert [path.name for path in (tmp_path / "payloads" / "0").iterdir()] == ["7"]


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Path.mkdir, "a directory"), (os.mkfifo, "a pipe"), (lambda path: path.symlink_to("x"), "a link that leads")],
)
def test_what_is_no_file_is_refused_at_once(make, kind: str, tmp_path: Path):
    make(tmp_path / "0")
    store, started = Store.open(str(tmp_path)), time.monotonic()
    for request in (lambda: store.check_kind("0"), lambda: store.create("0", b"mine")):
        with pytest.raises(StoreError, match=f"0 in {tmp_path} is {kind}"):
            asyncio.run(request())
    assert time.monotonic() - started < 5


def test_the_outage_is_asked_for_while_requests_fail_and_succeed(tmp_path: Path):
    store, is_over = Store.open(str(tmp_path)), threading.Event()

    def fail_and_succeed() -> None:
        while not is_over.is_set():
            with _Retry(store, "read log/0", 1.0) as first, _Retry(store, "read log/1", 1.0) as second:
                for retry in (first, second):
                    retry.fails("lost")

    thread, interval = threading.Thread(target=fail_and_succeed), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(20_000):
            assert (outage := store.outage) is None or outage.seconds < 10
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_turns_are_taken_in_order_and_never_for_more_than_the_most():
    async def use() -> list[int]:
        turns, begun, sizes = (
            Turns(),
            [],
            [MOST_BYTES_AT_ONCE // 2, MOST_BYTES_AT_ONCE // 2, 2 * MOST_BYTES_AT_ONCE, LARGE_BYTES + 1],
        )

        async def travel(number: int, size: int) -> None:
            async with turns.turn(size):
                begun.append(number)
                assert turns.num_bytes <= max(MOST_BYTES_AT_ONCE, size)
                await asyncio.sleep(0.005)

        await asyncio.gather(*(travel(number, size) for number, size in enumerate(sizes)))
        assert turns.num_bytes == 0
        return begun

    assert asyncio.run(use()) == [0, 1, 2, 3], "a small one does not pass a large one that waits"


def test_a_turn_that_was_cancelled_or_has_failed_is_the_next_ones():
    async def use() -> None:
        turns = Turns()

        async def travel() -> None:
            async with turns.turn(MOST_BYTES_AT_ONCE):
                await asyncio.sleep(1e6)

        first = asyncio.create_task(travel())
        waiting = asyncio.create_task(travel())
        await asyncio.sleep(0.01)
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        with pytest.raises(OSError, match="lost"):
            async with turns.turn(MOST_BYTES_AT_ONCE):
                raise OSError("lost")
        async with asyncio.timeout(5), turns.turn(MOST_BYTES_AT_ONCE):
            assert turns.num_bytes == MOST_BYTES_AT_ONCE

    asyncio.run(use())


def test_large_objects_take_turns_and_small_ones_pass_them(tmp_path: Path, monkeypatch):
    """Twelve objects of 10 MiB: three travel at once; their time limits grow with what travels."""
    put, timeout, now, most, begun, limits = Store._put, asyncio.timeout, 0, 0, [], []

    async def slow_put(store: Store, name: str, parts: list[memoryview]) -> None:
        nonlocal now, most
        begun.append(name)
        now += name != "small"
        most = max(most, now)
        if name != "small":
            await asyncio.sleep(0.02)
        await put(store, name, [])
        now -= name != "small"

    async def use(store: Store) -> None:
        content = bytes(10 << 20)
        large = [asyncio.create_task(store.create(f"large{i:02}", content)) for i in range(12)]
        await asyncio.sleep(0)
        await store.create("small", b"entry")
        await asyncio.gather(*large)

    monkeypatch.setattr(Store, "_put", slow_put)
    monkeypatch.setattr(asyncio, "timeout", lambda limit: limits.append(limit) or timeout(limit))
    asyncio.run(use(Store.open(str(tmp_path))))
    assert most == 3 and begun.index("small") <= 3
    assert [name for name in begun if name != "small"] == [f"large{i:02}" for i in range(12)]
    assert max(limits) == pytest.approx(30 + 3 * 80) and min(limits) == pytest.approx(30, abs=0.1)


def test_large_objects_are_read_in_turns_and_a_connection_does_not_wait(tmp_path: Path, monkeypatch):
    get, timeout, go = Store._open, asyncio.timeout, asyncio.Event()
    now, most, answered, received, limits = 0, 0, 0, [], []

    class SlowAnswer:
        def __init__(self, name: str, answer) -> None:
            self.name, self.answer, self.meta = name, answer, answer.meta

        async def bytes_async(self):
            nonlocal now, most
            now += self.name != "small"
            most = max(most, now)
            if self.name != "small":
                await go.wait()
            received.append(self.name)
            now -= self.name != "small"
            return await self.answer.bytes_async()

    async def slow_get(store: Store, name: str):
        nonlocal answered
        answer = await get(store, name)
        answered += 1
        return SlowAnswer(name, answer)

    async def use(store: Store) -> None:
        content = bytes(10 << 20)
        for i in range(7):
            await store.create(f"large{i}", content)
        await store.create("small", b"entry")
        monkeypatch.setattr(Store, "_open", slow_get)
        monkeypatch.setattr(asyncio, "timeout", lambda limit: limits.append(limit) or timeout(limit))
        large = [asyncio.create_task(store.get(f"large{i}", most_bytes=11 << 20)) for i in range(7)]
        while answered < 7:
            await asyncio.sleep(0.01)
        assert await store.get("small", most_bytes=5) == b"entry" and received == ["small"]
        go.set()
        assert all(len(data) == len(content) for data in await asyncio.gather(*large))
        assert store.requests["get"] == 7 + 4 + 1, "four of them had to wait, and asked again"

    asyncio.run(use(Store.open(str(tmp_path))))
    assert most == 3 and max(limits) == pytest.approx(30 + 3 * 80)


def test_a_directory_whose_objects_were_deleted_is_deleted(tmp_path: Path):
    async def use(store: Store) -> None:
        for share in range(3):
            await store.create(f"averages/0000000001/{share}", b"average")
        await store.create("averages/0000000002/0", b"average")
        await store.delete([f"averages/0000000001/{share}" for share in range(3)])

    asyncio.run(use(Store.open(str(tmp_path))))
    assert [path.name for path in (tmp_path / "averages").iterdir()] == ["0000000002"]


def test_what_killed_processes_left_in_a_directory_is_deleted_after_an_hour(tmp_path: Path, monkeypatch):
    """And no file of others: a store may be a directory in which they lie, too."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # killed before
        for name in ("a/00000001", "a/b/00000002"):
            create(tmp_path / name, [b"part"])
    old, young = (next(tmp_path.rglob(f"{name}#*")) for name in ("00000001", "00000002"))
    for path in (old, tmp_path / "a" / "00000003", tmp_path / "a" / "track#2", tmp_path / "backup#20261129"):
        path.write_bytes(b"part")
        os.utime(path, (0, time.time() - 3700))
    asyncio.run(Store.open(str(tmp_path)).delete([]))
    names = ["00000001", "00000002", young.name, "00000003", "backup#20261129", "track#2"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == names


def test_a_request_without_an_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    get = Store._open

    async def hang(*arguments: object) -> None:
        monkeypatch.setattr(Store, "_open", get)
        await asyncio.sleep(1000)

    asyncio.run(Store.open(str(tmp_path)).create("log/0", b"mine"))
    store = Store.open(str(tmp_path), timeout_seconds=0.05)
    monkeypatch.setattr(Store, "_open", hang)
    with pytest.raises(StoreUnreachableError, match=r"no answer in 0\.05 s"):
        asyncio.run(store.get("log/0", most_bytes=4, patience_seconds=0))
    monkeypatch.setattr(Store, "_open", hang)
    assert asyncio.run(store.get("log/0", most_bytes=4)) == b"mine" and store.requests["get"] > 2


def test_an_endpoint_names_the_bucket_where_it_has_to(monkeypatch: pytest.MonkeyPatch):
    environment = {"AWS_ENDPOINT_URL": "https://host/bucket", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}
    for name, value in (KEYS | environment).items():
        monkeypatch.setenv(name, value)
    assert Store.open("s3://bucket/run").url == "s3://bucket/run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://host/other")  # a prefix that the server takes off
    monkeypatch.delenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    assert Store.open("s3://bucket/run").url == "s3://bucket/run"


def test_credentials_that_are_missing_are_a_users_mistake_until_the_store_has_answered():
    error = OSError("error sending request for url (http://169.254.169.254/latest/api/token)")
    of_store = {"url": "s3://bucket/run", "action": "read x"}
    refusal = lasting(error, **of_store, answered=False)
    assert refusal is not None and refusal.exit_code == 2 and "set AWS_ACCESS_KEY_ID" in str(refusal)
    assert lasting(error, **of_store, answered=True) is None


def test_a_directory_that_can_not_be_made_or_written():
    with pytest.raises(FileWriteError, match="can't write /proc/none: "):
        Store.open("/proc/none")
    with pytest.raises(StoreError, match=r"can't create null/0 in /dev: not a directory$"):
        asyncio.run(Store.open("/dev").create("null/0", b"mine"))


@pytest.mark.slow
def test_every_store_keeps_what_is_created(server: Server):
    async def use(store: Store) -> None:
        large = random.Random(0).randbytes(20_000_000)
        assert await store.get("log/0000000000", most_bytes=10) is None
        assert await store.create("log/0000000000", [b"on", memoryview(b"e")]) is None
        assert await store.create("log/0000000000", b"one") is None
        assert await store.create("log/0000000000", b"other") == b"one"
        assert await store.create("payloads/0/0", [large[:1], memoryview(large)[1:]]) is None
        assert await store.get("payloads/0/0", most_bytes=20_000_000) == large
        with pytest.raises(StoreError, match="has 20,000,000 bytes, and may have 19,999,999"):
            await store.get("payloads/0/0", most_bytes=19_999_999)
        assert await store.list("") == [("log/0000000000", 3), ("payloads/0/0", 20_000_000)]
        assert await store.list("payloads") == [("payloads/0/0", 20_000_000)]
        await store.delete(["absent", "log/0000000000", "payloads/0/0"])
        assert await store.list("") == [] and await store.list("none") == []
        await store.delete(["absent"])

    asyncio.run(use(Store.open(server.new_url())))
