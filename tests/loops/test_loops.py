"""Loops of six public training scripts, rewritten small: what the docs tell their users to add is enough."""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.integrations.jobs import meet_at
from tests.loops.others import imagenet, ppo
from tests.loops.text import Outcome, lora, nanochat, nanogpt, word_language_model
from tests.ports import free_port
from tests.processes import run_replicas

Loop = Callable[[Path, int | None], Outcome]
LOOPS: dict[Loop, int | None] = {
    nanogpt: 14,
    nanochat: 10,
    word_language_model: None,
    lora: 1,
    imagenet: 1,
    ppo: None,
}
"""Each loop, and the step or epoch from whose checkpoint it is resumed, if its script can be."""


def run(loops: Sequence[tuple[Loop, int | None]], ports: Sequence[int], folder: str) -> list[Outcome]:
    """The outcomes of loops that are run in turn, each from its beginning, or resumed."""
    warnings.filterwarnings("ignore", "training changes buffers")  # they are estimated anew where Θ is evaluated
    outcomes = []
    for (loop, resume_from), port in zip(loops, ports, strict=True):
        meet_at(port)
        out_dir = Path(folder, loop.__name__, os.environ["DILOCO_REPLICA"])
        out_dir.mkdir(parents=True, exist_ok=True)
        outcomes.append(loop(out_dir, resume_from))
    return outcomes


@pytest.mark.slow
def test_the_replicas_of_public_scripts_agree_and_resume(tmp_path):
    """Train with two replicas, and resume from the midst of training in processes of their own."""

    def outcomes(runs: list[tuple[Loop, int | None]]) -> dict[Loop, tuple[Outcome, Outcome]]:
        ports = [free_port() for _ in runs]
        both = run_replicas(run, 2, runs, ports, str(tmp_path), joined=False)
        return {loop: pair for (loop, _), *pair in zip(runs, *both, strict=True)}

    undisturbed = outcomes([(loop, None) for loop in LOOPS])
    resumed = outcomes([(loop, resume_from) for loop, resume_from in LOOPS.items() if resume_from is not None])
    for loop, pair in undisturbed.items():
        first, second = pair
        assert first.outer_hash == second.outer_hash and first.common == second.common, (loop.__name__, pair)
        assert first.losses != second.losses, f"the replicas of {loop.__name__} read the same data"
        for losses in (first.losses, second.losses):
            assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), (loop.__name__, losses)
    for loop, pair in resumed.items():
        for after, before in zip(pair, undisturbed[loop], strict=True):
            assert after.outer_hash == before.outer_hash, loop.__name__
            assert after.losses == before.losses[-len(after.losses) :] != before.losses, loop.__name__
            assert after.common == before.common[-len(after.common) :], loop.__name__
