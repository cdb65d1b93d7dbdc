"""The progress of a run, as it is printed where there is no terminal."""

import io
from dataclasses import replace

from rich.console import Console
from tests.rendezvous.replicas import Replica
from tests.training.test_metrics import metrics

from diloco.report.terminal.training import TrainingProgress
from diloco.training.config.recipes import recipe


def test_held_out_losses_are_printed_when_they_are_measured():
    output = io.StringIO()
    config = replace(recipe("tiny"), num_tokens=5 * recipe("tiny").tokens_per_step)
    progress = TrainingProgress(config, Console(file=output))
    for step in range(1, 6):
        tokens = step * config.tokens_per_step
        progress(replace(metrics(step), tokens=tokens, eval_loss=3 - step / 10 if step % 2 == 0 else None))
    progress.close()
    *evaluated, last = output.getvalue().splitlines()
    of_replica = "of replica 0's share of the text"
    assert evaluated == [
        f"step 2  held-out loss 2.8000 {of_replica}",
        f"step 4  held-out loss 2.6000 {of_replica}",
    ]
    assert last.startswith("step 5/5  loss 2.000  held-out 2.600  ") and last.endswith("  ETA 0:00")


def test_a_replica_says_which_run_it_has_joined(tmp_path):
    config, lines, replicas = replace(recipe("tiny"), rendezvous=str(tmp_path)), [], []
    for name in "ab":  # the first is asked before it can have heard of the second
        replicas.append(Replica(str(tmp_path), name=name))
        output = io.StringIO()
        progress = TrainingProgress(config, Console(file=output))
        progress.started(7, replicas[-1].exchange, is_resume=name == "b")
        lines.append(output.getvalue().splitlines())
    assert lines == [
        [f"store {tmp_path}: replica 0, the first of a new run; round 0"],
        [f"store {tmp_path}: replica 1, beside a; round 0", "going on from step 7"],
    ]
    for replica in replicas:
        replica.vanish()
