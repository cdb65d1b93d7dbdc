"""Sweeps over a made-up loss, on a machine that trains nothing, and tables of rows."""

import math
from dataclasses import replace

import pytest
from tests.experiments.runner.machines import Valley, tiny_config

from diloco.errors import FileError, UserError
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.experiments.runner.sweep import Sweep, run_sweep
from diloco.scaling.table import read_table
from diloco.training.records.metrics import read_metrics


@pytest.fixture(scope="module")
def base(small_corpus, tmp_path_factory):
    return tiny_config(small_corpus, tmp_path_factory.mktemp("data"), num_replicas=2)


def swept(base, tmp_path, machine=None, **fields) -> tuple[list[dict], Valley]:
    machine = machine or Valley()
    sweep = Sweep(base=base, vocab_size=257, **fields)
    return list(run_sweep(sweep, tmp_path / "runs", machine))[-1], machine


def test_the_grid_is_extended_until_the_best_is_inside(base, tmp_path):
    axes = {"num_replicas": (0, 2), "learning_rate": (0.0025, 0.0035), "batch_tokens": (1024, 2048)}
    rows, machine = swept(base, tmp_path, axes=axes)
    for replicas in (0, 2):
        mine = [row for row in rows if row["replicas"] == replicas]
        best = min(mine, key=lambda row: row["eval_loss"])
        assert best["learning_rate"] == pytest.approx(0.01, rel=0.15)
        around = [row for row in mine if 0.5 <= row["batch_tokens"] / best["batch_tokens"] <= 2]
        around = [row for row in around if 0.7 <= row["learning_rate"] / best["learning_rate"] <= 1.5]
        assert len(around) == 9
        assert best["batch_tokens"] == 4096 * max(1, replicas)
        for name in ("learning_rate", "batch_tokens"):
            values = [row[name] for row in mine]
            assert min(values) < best[name] < max(values)
        ratios = sorted({row["learning_rate"] for row in mine if row["learning_rate"] > 0.0035})
        assert ratios[0] == pytest.approx(0.0035 * math.sqrt(2))
    assert len(machine.jobs) == len(rows) == len({row["run"] for row in rows})


def test_another_axis_follows_at_the_best_of_each_group(base, tmp_path):
    axes = {"width": (32, 48), "num_replicas": (0, 1), "learning_rate": (0.0035, 0.005, 0.007)}
    rows, _ = swept(base, tmp_path, axes=axes, then={"outer_learning_rate": (0.4, 0.6, 0.8)})
    for params in {row["params"] for row in rows}:
        later = [r for r in rows if r["params"] == params and r["replicas"] == 1 and r["learning_rate"] == 0.005]
        assert sorted(row["outer_learning_rate"] for row in later) == [0.4, 0.6, 0.8]
    assert all("outer_learning_rate" not in row for row in rows if row["replicas"] == 0)
    assert len(rows) == 2 * 2 * 3 + 2 * 2  # 0.4 is the recipe's own


def test_a_sweep_around_auto_has_the_learning_rates_that_it_chooses(base):
    auto = replace(base, diloco=replace(base.diloco, outer="auto"))
    sweep = Sweep(base=auto, vocab_size=257, axes={"num_replicas": (1, 2)})
    rates = [sweep.run(setting).labels["outer_learning_rate"] for setting in sweep.settings()]
    assert rates[0] < rates[1]
    with pytest.raises(UserError, match=r"auto chooses lr and momentum, and auto:momentum=0\.5 gives"):
        Sweep(base=auto, vocab_size=257, axes={"num_replicas": (1,)}, then={"outer_momentum": (0.5,)})


def test_seeds_are_extended_and_varied_together(base, tmp_path):
    """Each seed alone would end at a learning rate of its own."""
    axes, then = {"seed": (0, 1, 2), "learning_rate": (0.0025, 0.0035, 0.005)}, {"outer_learning_rate": (0.6,)}
    rows, _ = swept(replace(base, num_replicas=1), tmp_path, Valley(noise=0.1), axes=axes, then=then)
    tried: dict[float, set[int]] = {}
    for row in rows:
        tried.setdefault(row["learning_rate"], set()).add(row["seed"])
    later = [row for row in rows if row["outer_learning_rate"] == 0.6]
    assert len({row["learning_rate"] for row in later}) == 1 and sorted(row["seed"] for row in later) == [0, 1, 2]
    assert len(tried) > 3 and all(seeds == {0, 1, 2} for seeds in tried.values())


def test_a_group_that_failed_everywhere_is_not_varied_further(base, tmp_path):
    axes = {"num_replicas": (1, 2), "learning_rate": (0.0035, 0.005, 0.007)}
    then = {"outer_learning_rate": (0.6, 0.8)}
    rows, machine = swept(base, tmp_path, Valley(failing=2), axes=axes, then=then)
    assert len([row for row in rows if row["replicas"] == 1]) == 3 + 2
    assert [row["failed"] for row in rows if row["replicas"] == 2] == 3 * ["diverged"]
    assert len([job for job in machine.jobs if job.config.num_replicas == 2]) == 3


def test_the_budget_follows_from_the_size_and_the_table_is_what_scaling_reads(base, tmp_path):
    rows, machine = swept(base, tmp_path, axes={"width": (32, 64), "num_replicas": (4,)}, tokens_per_param=5)
    for row, job in zip(rows, machine.jobs, strict=True):
        assert row["tokens"] == job.config.num_tokens == pytest.approx(5 * row["params"], rel=0.01)
        assert job.config.global_batch % 4 == 0
    write_rows(rows, tmp_path / "sweep.csv")
    points = read_table(tmp_path / "sweep.csv")
    assert [point.replicas for point in points] == [4, 4]
    assert points[0].settings["outer_learning_rate"] == 0.4


def test_the_outer_momentum_is_a_column_where_it_is_varied(base, tmp_path):
    """The laws read a table of one outer momentum."""
    axes = {"width": (32, 64), "num_replicas": (0, 2), "outer_momentum": (0.0, 0.5)}
    rows, machine = swept(base, tmp_path, axes=axes)
    momenta = {job.config.name: job.config.diloco.outer_momentum for job in machine.jobs}
    assert all(row.get("outer_momentum") == momenta[row["run"]] for row in rows)
    assert [row.get("outer_momentum") for row in rows] == [None, 0.0, 0.5] * 2
    write_rows(rows, tmp_path / "sweep.csv")
    with pytest.raises(UserError, match=r"several outer momenta \(0, 0.5\): keep the rows of one"):
        read_table(tmp_path / "sweep.csv")
    write_rows([row for row in rows if row.get("outer_momentum") != 0.5], tmp_path / "sweep.csv")
    assert {point.settings.get("outer_momentum") for point in read_table(tmp_path / "sweep.csv")} == {None, 0.0}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"axes": {"momentum": (0.9,)}}, "axis 'momentum' is unknown: choose from width, num_replicas"),
        ({"axes": {"num_replicas": (3,)}}, "batch_tokens=512 must be a multiple of num_replicas=3"),
        ({"axes": {"width": (32.5,)}}, "axis width takes whole numbers, not 32.5"),
        ({"axes": {"batch_tokens": (0,)}}, "axis batch_tokens takes finite numbers above 0, not 0"),
        ({"axes": {"learning_rate": (math.inf,)}}, "axis learning_rate takes finite numbers above 0, not inf"),
        ({"axes": {"num_replicas": (-1,)}}, "axis num_replicas takes finite numbers of 0 or more, not -1"),
        ({"axes": {"seed": ()}}, "axis seed takes finite numbers of 0 or more, not none"),
        ({"then": {"num_replicas": (3,)}}, "batch_tokens=512 must be a multiple of num_replicas=3"),
        ({"then": {"width": (33,)}}, "width=33"),
        ({"tokens_per_param": -5.0}, "tokens_per_param=-5 must be above 0 and finite"),
        ({"method": "data_parallel"}, "method=data_parallel is no base of a sweep"),
    ],
)
def test_a_sweep_that_can_not_be_run_is_refused_at_once(fields, sentence, base):
    config = replace(base, method=fields.get("method", base.method))
    axes = {"axes": {}} | {name: value for name, value in fields.items() if name != "method"}
    with pytest.raises(UserError, match=sentence):
        Sweep(base=config, vocab_size=257, **axes)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [{"M": 2, "loss": 1.25, "method": "diloco"}, {"M": 4, "failed": "no, it\ndid not"}]
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        ("diloco.experiments.runner.rows.MOST_TABLE_BYTES", read_rows),
        ("diloco.scaling.table.MOST_TABLE_BYTES", read_table),
        ("diloco.training.records.metrics._MOST_BYTES", lambda path: read_metrics(path.parent, 0)),
    ],
)
def test_a_file_that_is_too_large_is_refused_before_it_is_read_whole(limit, read, tmp_path, monkeypatch):
    monkeypatch.setattr(limit, 1000)
    path = tmp_path / "metrics-0.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it has holes for contents: to read it all would take all memory
    with pytest.raises(FileError, match=r"metrics-0.jsonl can't be read: it has more than 1,000 bytes"):
        read(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "can't be read"),
        (b"", "has no rows"),
        (b"\xff\n1\n", "is no table"),
        (b"a\n1,2\n", "more cells"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content, sentence, tmp_path):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_rows(path)
