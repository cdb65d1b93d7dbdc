"""Published versions that were changed, or written by somebody who means harm.

pytest tests/hostile/test_versions.py --hostile-examples 20000
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from hypothesis import settings
from tests.hostile.mutations import generator, mutated_bytes, mutated_json
from tests.rendezvous.test_entries import object_of

import diloco
from diloco.errors import PayloadError, UserError
from diloco.publishing.differences import content_digest
from diloco.publishing.states import open_whole, seal_whole
from diloco.publishing.versions import VERSION, part_name

NUM_EXAMPLES = settings.get_profile("hostile").max_examples


def states() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A state, and the one after it."""
    weights = torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()
    changed = weights.clone()
    changed[::40] *= 2
    return {"weights": weights, "step": torch.tensor(0)}, {"weights": changed, "step": torch.tensor(1)}


def mutated_versions(place: Path) -> Iterator[None]:
    """Leave in a place, time after time, a second version of which one object is changed."""
    rng = generator(7)
    with diloco.Publisher(str(place), dtype=None, whole_every=1) as publisher:
        version = [publisher.publish(state, step=step) for step, state in enumerate(states())][-1]
    assert version.whole is not None and version.difference is not None
    names = [VERSION.name(1), part_name(1, version.difference, 0), part_name(1, version.whole, 0)]
    objects = {place / name: (place / name).read_bytes() for name in names}
    header, *bodies = objects
    for example in range(NUM_EXAMPLES):
        for path, content in objects.items():
            path.write_bytes(content)
        if example % 2:
            changed = rng.choice([header, *bodies])
            changed.write_bytes(mutated_bytes(objects[changed], rng))
        else:
            fields = asdict(version)
            if example % 4:
                fields = mutated_json(fields, rng)
            else:
                field = rng.choice(["start", "num_bytes", "whole", "difference", "digest", "tied", "files"])
                sizes = {"num_bytes": rng.getrandbits(60), "sha256": "ab" * 32}
                fields[field] = rng.choice([rng.getrandbits(62), "ab" * 32, None, sizes, {"a": sizes}, {"a": "b"}])
            header.write_bytes(object_of(json.dumps(fields, separators=(",", ":")).encode(), b""))
        yield


def test_a_follower_holds_a_whole_version_or_none(tmp_path: Path) -> None:
    first, second = states()
    digests = [content_digest(first), content_digest(second)]
    (tmp_path / "place").mkdir()
    with diloco.Follower(str(tmp_path / "place"), timeout_seconds=10) as follower:
        for _ in mutated_versions(tmp_path / "place"):
            assert follower.resume(0, {name: tensor.clone() for name, tensor in first.items()}) is not None
            try:
                follower.update()
            except (PayloadError, UserError) as error:
                assert str(error)
            held = follower.version
            actual = content_digest(dict(follower.state))
            assert held is None or (held.number < 2 and actual == digests[held.number])


def test_a_changed_body_is_refused_or_is_what_is_written() -> None:
    rng, data = generator(8), b"".join(seal_whole(states()[0]))
    for _ in range(4 * NUM_EXAMPLES):
        changed = mutated_bytes(data, rng)
        try:
            state = open_whole(torch.frombuffer(bytearray(changed or b"\\0"), dtype=torch.uint8), source="it")
        except PayloadError:
            continue
        assert b"".join(seal_whole(state)) == changed
