"""Checkpoints on disk: published by `diloco publish`, kept current by `diloco follow`."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import diloco
from diloco.cli.main import main
from diloco.errors import FileWriteError, UserError
from diloco.publishing.directories import FollowedDirectory, read_checkpoint

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 16}


def checkpoint(path: Path, step: int) -> dict[str, torch.Tensor]:
    """Write a directory as transformers does, with weights in two files; its tensors."""
    path.mkdir(parents=True)
    tensors = {"a": torch.full((3,), float(step)), "b": torch.arange(400.0).bfloat16()}
    save_file({"a": tensors["a"]}, path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"b": tensors["b"]}, path / "model-00002-of-00002.safetensors", {"format": "pt"})
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "merges.txt").write_text("a b\n")
    (path / "optimizer.pt").write_bytes(b"no weights")
    (path / "trainer_state.json").write_text("{}")
    return tensors


def test_checkpoints_are_published_and_a_directory_is_kept_current(tmp_path, capsys):
    place, to = tmp_path / "place", tmp_path / "followed"
    for step in (100, 200, 300):
        tensors = checkpoint(tmp_path / f"checkpoint-{step}", step)
    ours = [str(tmp_path / f"checkpoint-{step}") for step in (100, 200, 300)]
    main(["publish", ours[0], str(place)])
    main(["follow", str(place), "--to", str(to), "--once"])
    main(["publish", *ours[1:], str(place)])
    assert "version 2, step 300," in capsys.readouterr().out.splitlines()[-1]
    main(["follow", str(place), "--to", str(to), "--once"])
    printed = capsys.readouterr().out
    assert printed.startswith("version 2, step 300, ") and printed.endswith(f": {to / 'current'}\n")
    assert sorted(path.name for path in to.iterdir()) == ["current", "version-0", "version-2"]
    names = sorted(path.name for path in (to / "current").iterdir())
    assert names == ["config.json", "merges.txt", "model.safetensors", "version.json"]
    written = load_file(to / "current" / "model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[n], tensors[n]) for n in tensors)


@pytest.mark.slow
def test_transformers_reads_what_is_followed(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**{name: value for name, value in CONFIG.items() if name != "model_type"}))
    model.save_pretrained(tmp_path / "own")
    main(["publish", str(tmp_path / "own"), str(tmp_path / "place")])
    with diloco.Publisher(str(tmp_path / "place"), dtype=None) as publisher:
        with torch.no_grad():
            model.transformer.wte.weight += 1
        publisher.publish(model, step=1)  # by its module's names, of which one is tied
    main(["follow", str(tmp_path / "place"), "--to", str(tmp_path / "to"), "--once"])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "to" / "current").state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())


def test_following_goes_on_from_the_directory_and_removes_old_versions(tmp_path):
    place, to = str(tmp_path / "place"), FollowedDirectory(tmp_path / "to")
    state = {"a": torch.zeros(5000)}
    with diloco.Publisher(place, dtype=None) as publisher, diloco.Follower(place) as follower:
        for number in range(4):
            publisher.publish(state | {"b": torch.tensor(number)}, step=number)
            to.write(follower.update(), follower.state, {})
        assert sorted(path.name for path in to.path.iterdir()) == ["current", "version-2", "version-3"]
        publisher.publish(state | {"b": torch.tensor(4)}, step=4)
        with diloco.Follower(place) as again:
            assert to.resume(again).number == 3
            assert again.update().number == 4 and again.store.bytes_down < 10_000
        # A directory that was changed is worth nothing.
        (to.current / "model.safetensors").write_bytes((to.path / "version-2" / "model.safetensors").read_bytes())
        with diloco.Follower(place) as again:
            assert to.resume(again) is None and again.update().number == 4


def test_a_version_that_is_there_is_not_written_again(tmp_path):
    place, to = str(tmp_path / "place"), tmp_path / "to"
    with diloco.Publisher(place) as publisher:
        publisher.publish({"a": torch.zeros(3)}, step=1)
    main(["follow", place, "--to", str(to), "--once"])
    before = (to / "current").resolve().stat().st_ino
    main(["follow", place, "--to", str(to), "--once"])
    assert (to / "current").resolve().stat().st_ino == before, "a server may read it"


def test_the_version_before_stays_where_numbers_begin_anew(tmp_path):
    to, number = FollowedDirectory(tmp_path / "to"), iter((0, 1, 2, 0, 1))
    for place in ("first", "second"):
        with (
            diloco.Publisher(str(tmp_path / place)) as publisher,
            diloco.Follower(str(tmp_path / place)) as follower,
        ):
            for _ in range(3 if place == "first" else 2):
                publisher.publish({"a": torch.zeros(3)}, step=0)
                to.write(follower.update(), follower.state, {})
                assert to.current.resolve().name == f"version-{next(number)}"
    assert sorted(path.name for path in to.path.iterdir()) == ["current", "version-0", "version-1"]


def test_a_directory_that_another_program_wrote_stays(tmp_path):
    place, to = str(tmp_path / "place"), FollowedDirectory(tmp_path / "to")
    (to.path / "version-0").mkdir()
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        publisher.publish({"a": torch.zeros(3)}, step=1)
        with pytest.raises(UserError, match=r"version-0 has no version\.json"):
            to.write(follower.update(), follower.state, {})
    assert [*(to.path / "version-0").iterdir()] == []


def test_the_command_goes_on_until_it_is_interrupted(tmp_path, capsys):
    place, to = str(tmp_path / "place"), tmp_path / "to"
    with diloco.Publisher(place) as publisher:
        publisher.publish({"a": torch.zeros(3)}, step=1)

        def publish_and_stop() -> None:
            while not (to / "current").exists():
                time.sleep(0.01)
            publisher.publish({"a": torch.ones(3)}, step=2)
            while not (to / "version-1").exists():
                time.sleep(0.01)
            (tmp_path / "place" / "versions" / "0000000002").write_text("no header")

        thread = threading.Thread(target=publish_and_stop)
        thread.start()
        with pytest.raises(SystemExit, match="1"):
            main(["follow", place, "--to", str(to)])
        thread.join()
    output = capsys.readouterr()
    assert [line.split(",")[0] for line in output.out.splitlines()] == ["version 0", "version 1"]
    assert "its header is cut short" in output.err and (to / "current").resolve().name == "version-1"


def test_adapters_keep_their_names(tmp_path):
    (tmp_path / "adapter").mkdir()
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    main(["publish", str(tmp_path / "adapter"), str(tmp_path / "place")])
    main(["follow", str(tmp_path / "place"), "--to", str(tmp_path / "to"), "--once"])
    assert read_checkpoint(tmp_path / "to" / "current")[0].keys() == {"lora_A"}


def test_a_file_that_cannot_be_written_leaves_the_version_before(tmp_path):
    place, to = str(tmp_path / "place"), FollowedDirectory(tmp_path / "to")
    with diloco.Publisher(place) as publisher, diloco.Follower(place) as follower:
        publisher.publish({"a": torch.zeros(3)}, step=1)
        to.write(follower.update(), follower.state, {})
        publisher.publish({"a": torch.ones(3)}, step=2)
        with pytest.raises(FileWriteError, match=r"can't write .*version-1"):
            to.write(follower.update(), follower.state, {"no/such/directory": b""})
        publisher.publish({"a": torch.zeros(3)}, step=3)
        with pytest.raises(FileWriteError, match=r"can't write .*version-2"):
            to.write(follower.update(), follower.state, {"no/such/directory": b""})
        assert not (to.path / ".version-1.partial").exists(), "it may have filled the disk"
        assert to.current.resolve().name == "version-0"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["publish", "a"], "name a checkpoint and then the URL: diloco publish CHECKPOINT … URL"),
        (["publish", "a", "checkpoint"], "checkpoint is a checkpoint: name the URL last"),
        (
            ["publish", "checkpoint-1000", "checkpoint-200", "place"],
            "checkpoint-200, of step 200, stands after checkpoint-1000, of step 1000: name the oldest first",
        ),
        (["publish", "missing", "place"], "missing is no checkpoint: give a file of safetensors"),
        (["publish", "damaged.safetensors", "place"], "damaged.safetensors can't be read"),
        (["follow", "place"], "diloco follow needs --to"),
        (["follow", "place", "--to", "to", "--once"], "place has no version yet: start its publisher first"),
        (["follow", "place", "--to", "taken"], "taken/current is no link: give a directory of its own"),
        (
            ["follow", "place", "--to", "own"],
            "own/version-1 has no version.json and would be removed: give the versions a directory of their own",
        ),
        (["follow", "place", "--to", "held"], "another follower writes into held: give this one a directory of"),
        (
            ["follow", "place", "--to", "to", "--public-key", "x"],
            "--public-key='x' is no key of 64 hexadecimal digits",
        ),
    ],
)
def test_command_lines_that_are_refused(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("damaged.safetensors").write_bytes(b"damaged")
    Path("taken", "current").mkdir(parents=True)
    Path("own", "version-1").mkdir(parents=True)
    held = FollowedDirectory(Path("held"))
    Path("checkpoint").mkdir()
    Path("checkpoint", "model.safetensors").touch()
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err and held.path.exists()
