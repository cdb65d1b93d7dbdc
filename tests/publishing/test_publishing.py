"""Publish and follow: the bits of every version, the way to it, and whatever is refused on the way."""

import asyncio
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fault_proxy import FaultProxy
from tests.rendezvous.test_entries import object_of
from tests.servers import Server
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import diloco
from diloco.errors import PayloadError, UserError
from diloco.publishing.differences import content_digest
from diloco.publishing.publisher import OvertakenError
from diloco.publishing.states import copied, open_whole, seal_whole
from diloco.publishing.versions import PART_BYTES, VERSION, Body, Version, part_name
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.store import StoreUnreachableError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


def some_state(seed: int = 0) -> dict[str, Tensor]:
    """A tensor of each kind, of every bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.uint8}
    state = {
        str(dtype): torch.randint(256, (40 * dtype.itemsize,), **draw).view(dtype).view(5, 8) for dtype in DTYPES
    }
    state["torch.bool"] = torch.randint(2, (40,), **draw).bool()
    return state | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "large": torch.randn(4000, generator=generator),
    }


def changed(state: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The state after a step that changes a few cells."""
    after = {name: tensor.clone() for name, tensor in state.items()}
    after["torch.float32"][step % 5] *= 1.5
    after["torch.uint8"][:, step % 8] = step % 256
    return after


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return content_digest(one) == content_digest(dict(other))


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "place")


def published(place: str, num_versions: int, **options: object) -> list[dict[str, Tensor]]:
    """The states of versions that are published now."""
    states = [some_state()]
    with diloco.Publisher(place, dtype=None, **options) as publisher:
        for number in range(num_versions):
            states[number:] = [changed(states[-1], number)]
            assert publisher.publish(states[number], step=10 * number).number == number
    return states


def test_a_follower_has_the_bits_of_each_version_and_old_ones_go(place: str) -> None:
    state = some_state()
    with (
        diloco.Publisher(place, dtype=None, whole_every=4, keep=2) as publisher,
        diloco.Follower(place) as follower,
    ):
        assert follower.load_into(state) is None and follower.version is None
        for number, version in zip(range(20), _versions(publisher, follower, state), strict=False):
            assert (
                version.number == number and version.step == 7 * number and version.facts == {"loss": number / 2}
            )
            assert version.start == number // 4 * 4 and (version.difference is None) == (number == 0)
            assert content_digest(dict(follower.state)) == version.digest
        names = sorted(path.name for path in Path(place, "versions").iterdir())
        assert names == [f"{number:010d}" for number in range(12, 20)]
        assert {path.name[:10] for path in Path(place, "bodies").iterdir()} == set(names)
        assert len(list(Path(place, "files").iterdir())) <= 3


def _versions(publisher: diloco.Publisher, follower: diloco.Follower, state: dict[str, Tensor]):
    """The versions as an iteration gives them, each published when the one before was used."""
    versions = iter(follower)
    for number in range(20):
        state = changed(state, number)
        files = None if number % 3 else {"config.json": str(number).encode()}
        version = publisher.publish(state, step=7 * number, facts={"loss": number / 2}, files=files)
        assert next(versions) == version and same_bits(state, follower.state)
        assert follower.file("config.json") == str(number // 3 * 3).encode()
        yield version


def test_a_look_for_a_new_version_is_one_request(place: str) -> None:
    with diloco.Publisher(place) as publisher, diloco.Follower(place, poll_seconds=0.02) as follower:
        publisher.publish({"a": torch.zeros(2)}, step=1)
        versions = iter(follower)
        next(versions)
        before = follower.store.requests.copy()

        def publish_after_ten_looks() -> None:
            deadline = time.monotonic() + 60
            while (follower.store.requests - before).total() < 10 and time.monotonic() < deadline:
                time.sleep(0.01)
            publisher.publish({"a": torch.ones(2)}, step=5)

        thread = threading.Thread(target=publish_after_ten_looks)
        thread.start()
        assert next(versions).step == 5
        thread.join()
        made = follower.store.requests - before
        assert set(made) == {"get", "list"} and made["get"] > 8 * made["list"]


def test_who_was_away_takes_the_way_with_the_fewest_bytes(place: str) -> None:
    states = published(place, 3, whole_every=100)
    with diloco.Follower(place) as near, diloco.Follower(place) as far:
        near.update()
        far.update()
        with diloco.Publisher(place, dtype=None, whole_every=4) as publisher:
            for number in range(3, 5):
                publisher.publish(changed(states[-1], number), step=number)
            small = near.store.bytes_down
            near.update()
            assert near.store.bytes_down - small < 4000  # two differences
            for seed in range(5, 9):  # all bits change
                last = publisher.publish(some_state(seed), step=seed)
            before = far.store.bytes_down
            assert far.update() == last and same_bits(some_state(8), far.state)
            whole = 8 * 4000
            assert (
                last.start == 8 and whole / 2 < far.store.bytes_down - before < 2 * whole
            )  # and not six differences


def test_a_body_of_several_parts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.publishing.versions.PART_BYTES", 1000)
    states = published(place, 2)
    assert PART_BYTES > 1000 and len(list(Path(place, "bodies").rglob("00010"))) == 1
    with diloco.Follower(place) as follower:
        follower.update()
        assert same_bits(states[1], follower.state)


def test_a_publisher_goes_on_where_a_killed_one_stopped(place: str, caplog: pytest.LogCaptureFixture) -> None:
    states = published(place, 3)
    # It was killed between the body of version 3 and its header.
    orphan = Path(place, part_name(3, Body.of([b"other"]), 0))
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"other")
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        assert follower.update().number == 2
        version = publisher.publish(state := changed(states[2], 3), step=40)
        assert (version.number, version.start, version.whole) == (3, 0, None) and not orphan.exists()
        assert follower.update() == version and same_bits(state, follower.state)
    # The bytes of its last version were damaged meanwhile: a whole one makes the chain sound again.
    Path(place, part_name(3, version.difference, 0)).write_bytes(b"damaged")
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as new:
        with pytest.raises(PayloadError, match="it has 7 bytes, not"):
            new.update()
        with caplog.at_level(logging.WARNING, "diloco"):
            create, publisher.store.create = publisher.store.create, no_answer
            with pytest.raises(StoreUnreachableError):
                publisher.publish(state, step=50)
            publisher.store.create = create
            version = publisher.publish(state := changed(state, 4), step=50)
        assert version.number == version.start == 4 and "a whole version follows" in caplog.text
        assert new.update() == version and same_bits(state, new.state)


async def no_answer(*_: object, **__: object) -> None:
    raise StoreUnreachableError("no answer")


def test_a_publication_that_failed_is_made_again(moto: Server, use_environment: Callable[..., None]) -> None:
    state, url = some_state(), moto.new_url()
    with FaultProxy(moto.port) as proxy:
        use_environment(moto.through(proxy.url))
        with diloco.Publisher(url, dtype=None, timeout_seconds=0.5) as publisher, diloco.Follower(url) as follower:
            publisher.publish(state, step=0)
            for faults, number in (
                ({"outage": True}, 1),
                ({"lose_answers": 1.0, "only": "versions/0000000002"}, 2),
            ):
                proxy.set(**faults)
                state = changed(state, number)
                with pytest.raises(StoreUnreachableError):
                    publisher.publish(state, step=number)
                proxy.set()
                # The second time the header was there, and its publisher did not know.
                version = publisher.publish(state, step=number)
                assert version.number == (1 if number == 1 else 3)
                assert follower.update() == version and same_bits(state, follower.state)


def test_a_place_that_is_moved_away(place: str) -> None:
    state, away = some_state(), f"{place}-away"
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place, timeout_seconds=0.1) as follower:
        publisher.publish(state, step=0)
        follower.update()
        Path(place).rename(away)
        with pytest.raises(StoreUnreachableError, match=r"version 0 is gone from .*: bring it back"):
            publisher.publish(changed(state, 1), step=1)
        assert follower.update() is None
        time.sleep(0.2)
        with pytest.raises(StoreUnreachableError, match=r"has had no versions for 0.1 s: bring the place back"):
            follower.update()
        Path(away).rename(place)
        assert publisher.publish(changed(state, 1), step=1) == follower.update()


def test_two_publishers_in_one_place(place: str) -> None:
    state = published(place, 2)[-1]
    with diloco.Publisher(place, dtype=None) as ours, diloco.Publisher(place, dtype=None) as other:
        ours.publish(changed(state, 2), step=2)
        assert other.publish(changed(state, 3), step=3).number == 3
        for _ in range(2):
            with pytest.raises(UserError, match=r"another publisher has written version 3 .*: a place takes one"):
                ours.publish(changed(state, 4), step=4)
        assert other.publish(changed(state, 5), step=5).number == 4


def test_an_own_version_that_the_store_takes_late_is_followed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = published(place, 1)[-1]
    with diloco.Publisher(place, dtype=None) as publisher:
        create, held_back = publisher.store.create, list[tuple]()

        async def create_late(name: str, *arguments: object, **options: object) -> object:
            if name == "versions/0000000001":
                held_back.append((name, *arguments))
                if len(held_back) < 3:
                    raise StoreUnreachableError("no answer")
                await create(*held_back[0])
            return await create(name, *arguments, **options)

        monkeypatch.setattr(publisher.store, "create", create_late)
        for step in (1, 2):
            with pytest.raises(StoreUnreachableError, match="no answer"):
                publisher.publish(changed(state, step), step=step)
        newest = changed(state, 3)
        assert publisher.publish(newest, step=3).number == 2
    with diloco.Follower(place) as follower:
        assert follower.update() is not None and same_bits(newest, follower.state)


def test_threads_with_one_publisher_wait_for_one_another(place: str) -> None:
    with diloco.Publisher(place) as publisher, ThreadPoolExecutor(3) as threads:
        state = {"w": torch.zeros(1 << 18)}
        versions = threads.map(lambda step: publisher.publish(state, step=step), range(6))
        assert sorted(version.number for version in versions) == [*range(6)]


def test_a_list_that_lacks_the_newest_version_is_no_harm(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = published(place, 3)[-1]
    with diloco.Follower(place) as follower, diloco.Publisher(place, dtype=None) as publisher:
        follower.update()
        for store in (follower.store, publisher.store):
            real = store.list

            async def late(prefix: str, *, real: Callable = real, **options: object) -> list:
                return (await real(prefix, **options))[:-1]

            monkeypatch.setattr(store, "list", late)
        assert follower.update() is None
        assert publisher.publish(changed(state, 3), step=30).number == 3


def test_keys(place: str, tmp_path: Path) -> None:
    own, other = write_key(tmp_path / "own.key"), write_key(tmp_path / "other.key")
    state = published(place, 2, key=str(tmp_path / "own.key"))[-1]
    with diloco.Follower(place, public_key=[other, own]) as follower:
        assert follower.update() is not None
    for key, words in (("other.key", "is forged"), (None, "is signed, in a run without keys")):
        path = None if key is None else str(tmp_path / key)
        with diloco.Publisher(place, key=path) as publisher, pytest.raises(UserError, match=words):
            publisher.publish(state, step=3)
    with pytest.raises(UserError, match="no key of 64 hexadecimal digits"):
        diloco.Follower(place, public_key="abc")


def test_publishers_of_the_same_states_take_turns(place: str, tmp_path: Path) -> None:
    keys = [write_key(tmp_path / name) for name in ("a.key", "b.key")]
    state = some_state()
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(diloco.Publisher(place, dtype=None, key=str(tmp_path / name)))
            for name in ("a.key", "b.key")
        ]
        follower = stack.enter_context(diloco.Follower(place, public_key=keys))
        for publisher in publishers:
            publisher.share_with(keys)
        for step, publisher in enumerate([*publishers, *publishers]):
            state = changed(state, step)
            version = publisher.publish(state, step=step)
            assert version.number == step and (version.whole is None) == (step > 0)
            assert follower.update() == version and same_bits(state, follower.state)
        for late in publishers:
            with pytest.raises(OvertakenError, match="version 3 of step 3 is published already"):
                late.publish(state, step=3)


def test_an_older_version_that_lands_first_is_followed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = published(place, 1)[-1]
    with diloco.Publisher(place, dtype=None) as ours, diloco.Publisher(place, dtype=None) as other:
        for publisher in (ours, other):
            publisher.share_with([""])
        create, older = ours.store.create, [1, 2]

        async def create_late(name: str, *arguments: object, **options: object) -> object:
            if name.startswith("versions/") and older:
                await asyncio.to_thread(other.publish, changed(state, 1), step=older.pop(0))
            return await create(name, *arguments, **options)

        monkeypatch.setattr(ours.store, "create", create_late)
        newest = changed(state, 3)
        assert ours.publish(newest, step=3).number == 3 and not older
        older.append(4)
        with pytest.raises(OvertakenError, match="version 4 of step 4 is published already"):
            ours.publish(newest, step=4)
    with diloco.Follower(place) as follower:
        assert follower.update() is not None and same_bits(changed(state, 1), follower.state)


def test_a_version_of_a_former_key_is_not_believed(place: str, tmp_path: Path) -> None:
    own, former = (write_key(tmp_path / name) for name in ("own.key", "former.key"))
    published(place, 2, key=str(tmp_path / "former.key"))
    state = changed(some_state(), 7)
    with (
        diloco.Publisher(place, dtype=None, key=str(tmp_path / "own.key")) as publisher,
        diloco.Follower(place, public_key=own) as follower,
    ):
        publisher.share_with([own])
        with pytest.raises(UserError, match=r"is forged.*: publish with the key of the versions there"):
            publisher.publish(state, step=3)
        publisher.share_with([own], former_keys=[former])
        first = publisher.publish(state, step=3)  # less than the step of the version before
        assert first.number == 2 and first.difference is None
        assert follower.update() == first and same_bits(state, follower.state)
        assert publisher.publish(changed(state, 8), step=4).whole is None


@pytest.mark.parametrize("is_begun_anew", [True, False])
def test_signed_versions_of_elsewhere_are_refused(place: str, tmp_path: Path, is_begun_anew: bool) -> None:
    """Versions of another place, or of this one before it was begun anew; those between are not there."""
    key, elsewhere = write_key(tmp_path / "a.key"), str(tmp_path / "elsewhere")
    options = {"key": str(tmp_path / "a.key"), "whole_every": 2}
    published(elsewhere, 8, **options)
    state = published(place, 2, **options)[-1]
    with diloco.Follower(place, public_key=key) as follower:
        follower.update()
        if is_begun_anew:
            shutil.rmtree(place)
        shutil.copytree(elsewhere, place, dirs_exist_ok=True)
        with pytest.raises(UserError, match=r"version 7 .* is of another series than version 1, which is held"):
            follower.update()
        assert follower.version is not None and same_bits(state, follower.state)


def test_versions_of_format_1_go_on_without_a_series(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr("diloco.publishing.publisher.FORMAT", 1)
        before.setattr("diloco.publishing.publisher.secrets.token_hex", lambda _: "")
        state = published(place, 1)[-1]
    assert b"series" not in Path(place, VERSION.name(0)).read_bytes()
    with diloco.Follower(place) as follower, diloco.Publisher(place, dtype=None) as publisher:
        follower.update()
        version = publisher.publish(changed(state, 1), step=1)
        assert version.format == 1 and follower.update() == version


class Opaque(Tensor):
    """A tensor that wraps others, as quantized ones do, and can't be copied."""

    def __new__(cls) -> "Opaque":
        return Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, function: object, types: object, *arguments: object) -> None:
        raise NotImplementedError(function)

    def __repr__(self) -> str:
        return "Opaque"


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool = True, width: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 2, bias=False), nn.Linear(width, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        if is_tied:
            self.last.weight = self.first.weight


def test_modules_are_loaded_in_place(place: str) -> None:
    ours = Tied()
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        version = publisher.publish(ours, step=1)
        assert version.tied == {"last.weight": "first.weight"} and version.num_bytes == 2 * (6 + 4 * 2) + 8
        for theirs in (Tied(), Tied(is_tied=False), Tied().double()):
            weight = theirs.first.weight
            assert follower.load_into(theirs) == version and follower.load_into(theirs) is None
            assert theirs.first.weight is weight
            for last in (theirs.last.weight, weight):
                assert torch.equal(last.detach(), ours.first.weight.bfloat16().to(last.dtype))
        tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
        follower.load_into(tensors)
        assert torch.equal(tensors["norm.weight"], ours.norm.weight)
        for model, words in (
            (
                {**Tied().state_dict(), "norm.bias": torch.zeros(2, dtype=torch.int8)},
                r"norm.bias is torch.int8 in the model, which can't hold the version's",
            ),
            (Tied(width=4), r"first.weight has the shape \(2, 4\) in the model, and \(2, 3\) in the version"),
            (nn.Linear(3, 2), "the version lacks bias, weight"),
            ({"first.weight": torch.zeros(2, 3)}, "the model lacks norm.bias, norm.num_batches_tracked"),
            (
                {**Tied().state_dict(), "first.weight": torch.zeros(2, 3, device="meta")},
                "no dense tensor with values",
            ),
        ):
            before = dict(model.state_dict() if isinstance(model, nn.Module) else model)
            before = {name: tensor.clone() for name, tensor in before.items()}
            with pytest.raises(UserError, match=words):
                follower.load_into(model)
            after = model.state_dict() if isinstance(model, nn.Module) else model
            assert all(after[name].is_meta or torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.zeros_(model.first.weight),
        lambda model: setattr(model.last, "weight", nn.Parameter(torch.zeros(2, 3))),
        lambda model: model.norm(torch.ones(4, 2)),
    ],
    ids=["changed", "replaced", "buffer"],
)
def test_a_module_that_was_changed_since_is_loaded_again(place: str, change: Callable[[Tied], object]) -> None:
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        version = publisher.publish(ours := Tied(), step=1)
        follower.load_into(theirs := Tied())
        change(theirs)
        assert follower.load_into(theirs) == version and follower.load_into(theirs) is None
        assert same_bits(theirs.state_dict(), ours.state_dict())


def test_a_wait_for_the_first_version_is_told(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diloco.publishing.follower.SECONDS_OF_SILENCE", 0.1)
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        timer = threading.Timer(0.4, lambda: publisher.publish({"a": torch.zeros(2)}, step=3))
        timer.start()
        assert next(iter(follower)).step == 3
        timer.join()
    assert [line for line in caplog.messages if "has no version yet" in line] == [
        f"{Path(place)} has no version yet: waiting for its publisher …"
    ]


def test_tensors_that_wrap_others_are_not_tied(place: str) -> None:
    """Torch knows no address of them, so that one of them can't be told from another by it."""
    wrapped = {name: AsyncCollectiveTensor(torch.full((3,), float(i))) for i, name in enumerate("ab")}
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        assert publisher.publish(wrapped | {"c": wrapped["b"]}, step=1).tied == {"c": "b"}
        into = {name: torch.zeros(3) for name in "abc"}
        follower.load_into(into)
        assert {name: tensor.tolist() for name, tensor in into.items()} == {
            "a": [0.0] * 3,
            "b": [1.0] * 3,
            "c": [1.0] * 3,
        }
        follower.load_into({name: AsyncCollectiveTensor(torch.zeros(3)) for name in "abc"})


def test_a_tensor_with_one_value_in_several_places_is_refused(place: str) -> None:
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        publisher.publish({"a": torch.ones(2), "b": torch.ones(2)}, step=1)
        into = {"a": torch.zeros(2), "b": torch.zeros(1).expand(2)}
        with pytest.raises(UserError, match=r"b of the model has one value in several places, by expand\(\)"):
            follower.load_into(into)
        assert not into["a"].any()


def test_a_view_with_other_values_is_not_tied(place: str) -> None:
    values = torch.tensor([1 + 2j])
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        assert not publisher.publish({"a": values, "b": values.conj()}, step=np.int64(1)).tied
        follower.update()
        assert torch.equal(follower.state["b"], values.conj())


def test_a_header_that_ties_what_is_not_there(place: str) -> None:
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        version = publisher.publish(Tied(is_tied=False), step=1)
        ours = Tied(is_tied=False)
        _sealed(Path(place), replace(version, tied={"other": "lost", "first.weight": "last.weight"}))
        assert follower.load_into(theirs := Tied(is_tied=False)) is not None
        assert not torch.equal(theirs.first.weight, theirs.last.weight)
        ours.other = nn.Parameter(torch.zeros(2, 3))
        with pytest.raises(UserError, match="the version lacks other"):
            follower.load_into(ours)


def test_a_model_that_ties_what_a_version_has_twice_is_refused(place: str) -> None:
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        publisher.publish(Tied(is_tied=False), step=1)
        with pytest.raises(UserError, match=r"the model ties first.weight and last.weight"):
            follower.load_into(Tied())


def test_in_a_loop_the_loops_version_is_loaded(place: str) -> None:
    state = some_state()
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        publisher.publish(state, step=1)
        for version in follower:
            publisher.publish(changed(state, 1), step=2)
            model = some_state(3)
            assert follower.load_into(model) == version and same_bits(model, state)
            break
        assert follower.load_into(model) != version and same_bits(model, changed(state, 1))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_thread(place: str, tmp_path: Path) -> None:
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        publisher.publish(Tied(), step=1)
        if not (child := os.fork()):
            signal.alarm(20)
            try:
                follower.update()
            except UserError as error:
                (tmp_path / "error").write_text(str(error))
            os._exit(0)
        os.waitpid(child, 0)
        error = (tmp_path / "error").read_text()
        assert f"forked from process {os.getpid()}, which alone has the thread 'diloco follower'" in error
        assert follower.update() is not None, "the child has taken nothing from this process"


def test_two_threads_may_use_one_follower(place: str) -> None:
    state = {name: torch.zeros(1 << 18) for name in "abcd"}
    failures = list[BaseException]()

    def iterate() -> None:
        try:
            for version in follower:
                if version.step == 20:
                    return
        except BaseException as error:
            failures.append(error)

    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place, poll_seconds=0.001) as follower:
        publisher.publish(state, step=0)
        thread = threading.Thread(target=iterate, daemon=True)
        thread.start()
        model = {name: tensor.clone() for name, tensor in state.items()}
        for step in range(1, 21):
            # The last one is the thread's.
            publisher.publish({name: torch.full_like(tensor, step) for name, tensor in state.items()}, step=step)
            version = follower.load_into(model) if step < 20 else None
            for tensor in model.values() if version is not None else ():
                assert torch.equal(tensor, torch.full_like(tensor, version.step))
        thread.join(10)
    assert not failures and not thread.is_alive()


def test_a_state_that_was_kept_is_taken_up(place: str) -> None:
    states = published(place, 3)
    with diloco.Follower(place) as follower:
        assert follower.resume(1, states[2]) is None and follower.resume(7, states[1]) is None
        assert follower.resume(1, {name: tensor.clone() for name, tensor in states[1].items()}) is not None
        follower.update()
        assert follower.store.bytes_down < 16_000 and same_bits(states[2], follower.state)


def test_the_files_of_a_version_outlast_the_next_one(place: str) -> None:
    with diloco.Publisher(place, whole_every=1, keep=1) as publisher, diloco.Follower(place) as follower:
        for step in range(3):
            publisher.publish({"a": torch.zeros(2)}, step=step, files={"config.json": str(step).encode()})
            if step:
                assert follower.file("config.json") == str(step - 1).encode()
            follower.update()
        assert len(list(Path(place, "files").iterdir())) == 2


def _cut(place: Path, version: Version) -> None:
    part = place / part_name(version.number, version.difference, 0)
    part.write_bytes(part.read_bytes()[:-1])


def _lengthened(place: Path, version: Version) -> None:
    part = place / part_name(version.number, version.difference, 0)
    part.write_bytes(part.read_bytes() + b"more")


def _flipped(place: Path, version: Version) -> None:
    part = place / part_name(version.number, version.difference, 0)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def _head_cut(place: Path, version: Version) -> None:
    header = place / VERSION.name(version.number)
    header.write_bytes(header.read_bytes()[:100])


def _in_anothers_place(place: Path, version: Version) -> None:
    (place / VERSION.name(version.number)).write_bytes((place / VERSION.name(version.number - 1)).read_bytes())


def _sealed(place: Path, version: Version) -> None:
    (place / VERSION.name(version.number)).write_bytes(VERSION.seal(version, Signer()))


def _of_a_later_format(place: Path, version: Version) -> None:
    fields = {**asdict(version), "format": 3, "further": [1]}
    (place / VERSION.name(version.number)).write_bytes(object_of(json.dumps(fields).encode(), b""))


def _replaced(place: Path, version: Version) -> None:
    _sealed(place, replace(version, previous="ab" * 32))


def _wrong_digest(place: Path, version: Version) -> None:
    _sealed(place, replace(version, digest="ab" * 32))


def _of_another_model(place: Path, version: Version) -> None:
    with diloco.Publisher(str(place / "other")) as publisher:
        other = publisher.publish({"another": torch.ones(3)}, step=1)
    body = place / "other" / part_name(0, other.whole, 0)
    own = place / part_name(version.number, other.whole, 0)
    own.parent.mkdir()
    own.write_bytes(body.read_bytes())
    _sealed(place, replace(version, whole=other.whole, difference=None, digest=other.digest, start=version.number))


def _difference_of_another_model(place: Path, version: Version) -> None:
    with diloco.Publisher(str(place / "other")) as publisher:
        publisher.publish({"another": torch.ones(900)}, step=1)
        other = publisher.publish({"another": torch.ones(900)}, step=1)
    own = place / part_name(version.number, other.difference, 0)
    own.parent.mkdir()
    own.write_bytes((place / "other" / part_name(1, other.difference, 0)).read_bytes())
    _sealed(place, replace(version, difference=other.difference))


def _signed_by_a_stranger(place: Path, version: Version) -> None:
    write_key(place / "stranger.key")
    header = place / VERSION.name(version.number)
    header.write_bytes(VERSION.seal(version, Signer.of_file(place / "stranger.key")))


def _begun_anew(place: Path, version: Version) -> None:
    for number in range(1, version.number + 1):
        (place / VERSION.name(number)).unlink()


@pytest.mark.parametrize(
    "damage, words",
    [
        (_cut, r"bodies/0000000002-\w{16}/00000 in .* was cut short: it has 149 bytes, not 150"),
        (_lengthened, "bytes, and may have"),
        (_flipped, "the difference of version 2 in .* does not match the SHA-256 in its header: it was damaged"),
        (_head_cut, "version 2 in .* can't be used: its header is cut short"),
        (_in_anothers_place, "version 2 in .* can't be used: it is version 1, put in another's place"),
        (_of_a_later_format, "version 2 in .* is of format 3, and this diloco reads format 2: install"),
        (_replaced, "version 2 in .* does not follow version 1 as it was read: one of them was replaced"),
        (_wrong_digest, r"version 2 in .* leads to the digest \w{16}…, and its header says abababab"),
        (_of_another_model, r"version 2 in .* is of another model: .* are missing: follow it with a new follower"),
        (_difference_of_another_model, "version 2 in .* is the difference of a model with other names"),
        (_begun_anew, "ends with version 0, and this follower holds version 1: the versions begin anew"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_bad_version_is_refused_and_leaves_the_one_before(
    place: str, damage: Callable[[Path, Version], None], words: str
) -> None:
    states = published(place, 2)
    with diloco.Follower(place) as follower:
        model = some_state(5)
        follower.load_into(model)
        with diloco.Publisher(place, dtype=None) as publisher:
            version = publisher.publish(changed(states[1], 2), step=20)
        damage(Path(place), version)
        with pytest.raises((PayloadError, UserError), match=words):
            follower.load_into(model)
        assert same_bits(model, states[1])
        assert follower.version is not None and follower.version.number == 1
        assert same_bits(follower.state, states[1])


def test_nothing_is_held_where_the_version_before_a_wrong_digest_is_gone(place: str) -> None:
    states = published(place, 2)
    with diloco.Follower(place) as follower, diloco.Publisher(place, dtype=None, whole_every=3) as publisher:
        follower.update()
        _wrong_digest(Path(place), publisher.publish(state := changed(states[1], 2), step=20))
        (Path(place) / VERSION.name(0)).unlink()
        with pytest.raises(PayloadError, match="leads to the digest"):
            follower.update()
        assert follower.version is None and not follower.state
        publisher._is_known = True  # it does not look at what was damaged
        with diloco.Publisher(place, dtype=None) as another:
            another.publish(state, step=30)
        assert follower.update().number == 3 and same_bits(follower.state, state)


def test_what_is_closed_says_so(place: str) -> None:
    (state,) = published(place, 1)
    follower, publisher = diloco.Follower(place, poll_seconds=0.01), diloco.Publisher(place)
    assert follower.update() is not None
    timer = threading.Timer(0.2, follower.close)
    timer.start()
    with pytest.raises(UserError, match=r"this follower of .* is closed: make a new one"):
        list(follower)  # waits for versions
    timer.join()
    for use in (follower.update, lambda: follower.load_into(state), lambda: follower.resume(0, state)):
        with pytest.raises(UserError, match=r"this follower of .* is closed: make a new one"):
            use()
    assert follower.version.number == 0 and same_bits(follower.state, state)
    publisher.close()
    with pytest.raises(UserError, match=r"this publisher to .* is closed: make a new one"):
        publisher.publish(state, step=1)


def test_a_damaged_difference_is_no_harm_once_a_whole_version_follows(place: str) -> None:
    states = published(place, 2)
    with diloco.Follower(place) as follower, diloco.Publisher(place, dtype=None, whole_every=3) as publisher:
        follower.update()
        _flipped(Path(place), publisher.publish(state := changed(states[1], 2), step=20))
        with pytest.raises(PayloadError, match="SHA-256"):
            follower.update()
        assert publisher.publish(state := changed(state, 3), step=30).whole is not None
        assert follower.update().number == 3 and same_bits(state, follower.state)


def test_a_follower_that_expects_a_key_refuses_versions_without_it(place: str, tmp_path: Path) -> None:
    own = write_key(tmp_path / "own.key")
    state = published(place, 1)[0]
    with diloco.Follower(place, public_key=own) as follower:
        with pytest.raises(PayloadError, match=r"version 0 in .* is not signed: it should be by the key"):
            follower.load_into(state)
        (Path(place) / VERSION.name(0)).unlink()
        with diloco.Publisher(place, key=str(tmp_path / "own.key"), dtype=None) as publisher:
            version = publisher.publish(state, step=1)
        assert follower.update() == version
        _signed_by_a_stranger(Path(place), replace(version, number=1, start=1, previous=version.link))
        with pytest.raises(PayloadError, match=r"version 1 in .* is forged"):
            follower.update()


def test_a_follower_that_is_slower_than_retention(place: str) -> None:
    states = published(place, 2)
    with diloco.Follower(place) as follower:
        follower.update()
        with diloco.Publisher(place, dtype=None, whole_every=2, keep=1) as publisher:
            for number in range(2, 12):
                version = publisher.publish(state := changed(states[1], number), step=number)
            before = follower.store.requests["get"]
            assert follower.update() == version and same_bits(state, follower.state)
            # Of the deleted ones the first alone; two headers, and the body of each.
            assert follower.store.requests["get"] - before == 1 + 2 * 2
            version = publisher.publish(changed(states[1], 12), step=12)
        # What it is about to read is deleted, each time.
        for part in Path(place, "bodies").rglob("0*/00000"):
            part.unlink()
        with pytest.raises(PayloadError, match=r"was deleted meanwhile, 4 times in a row: .*: keep more of them"):
            follower.update()
        assert same_bits(state, follower.state)


@pytest.mark.parametrize(
    "state, words",
    [
        ({}, "the state to publish is empty"),
        ({"a": 3}, "the state holds 'a', a int"),
        ({"a": torch.zeros(2, device="meta")}, "a is no dense tensor with values"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "a is no dense tensor with values"),
        (
            {"a": torch.zeros(2, dtype=torch.complex128)},
            "a has the type torch.complex128, which safetensors lacks",
        ),
        ({"a": Opaque()}, r"a is a Opaque, which can't be copied to a plain tensor: publish the model before"),
        ({"b": torch.zeros(2)}, r"has version 0 of another model: a is missing: publish this one at a URL"),
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, "of another model: b is new"),
        ({"a": torch.zeros(3)}, r"a is bfloat16 of shape \(3,\), and was bfloat16 of shape \(2,\)"),
    ],
    ids=str,
)
def test_what_cannot_be_published_is_refused(place: str, state: dict[str, Tensor], words: str) -> None:
    with diloco.Publisher(place) as publisher:
        publisher.publish({"a": torch.zeros(2)}, step=1)
        with pytest.raises(UserError, match=words):
            publisher.publish(state, step=2)
        assert publisher.publish({"a": torch.ones(2)}, step=2).number == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"step": -1}, "step=-1"),
        ({"step": 2.0}, "step=2.0 must be a whole number"),
        ({"step": 1, "facts": {"a": float("nan")}}, "facts="),
        (
            {"step": 1, "facts": {"a": "x" * (1 << 20)}},
            "its header is cut short, damaged or too long.*shorter facts",
        ),
        ({"step": 1, "files": {"../a": b""}}, "files with plain names"),
    ],
)
def test_what_cannot_go_with_a_version_is_refused(place: str, options: dict, words: str) -> None:
    with diloco.Publisher(place) as publisher, pytest.raises(UserError, match=words):
        publisher.publish({"a": torch.zeros(2)}, **options)


def test_a_body_is_a_file_of_safetensors_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load

    state, _ = copied(some_state(), None)
    body = b"".join(seal_whole(state))
    assert same_bits(load(body), state)
    assert same_bits(open_whole(torch.frombuffer(bytearray(body), dtype=torch.uint8), source="it"), state)
    length = int.from_bytes(body[:8], "little")
    head = json.loads(body[8 : 8 + length])
    for name, bad in (
        ("short", body[:5]),
        ("no JSON", body[:8] + b"x" + body[9:]),
        ("cut", body[:-1]),
        ("more", body + b"x"),
        ("other order", _with_head(dict(reversed(head.items())), body[8 + length :])),
        ("unknown type", _with_head({**head, "large": {**head["large"], "dtype": "F4"}}, body[8 + length :])),
        ("huge", _with_head({**head, "large": {**head["large"], "shape": [1 << 62, 8]}}, body[8 + length :])),
    ):
        with pytest.raises(PayloadError, match="source can't be"):
            open_whole(torch.frombuffer(bytearray(bad), dtype=torch.uint8), source="source")
            pytest.fail(name)


def _with_head(head: dict, rest: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest
