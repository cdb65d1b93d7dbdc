"""The progress of a run, asked once a step: each answer may be a wait of all processes of a replica."""

from types import SimpleNamespace

from tests.training.cases import begin
from tests.training.test_step import batch_of, config_of

from diloco.schedule import Schedule
from diloco.training.state import ElasticProgress, FixedProgress, Standing, initial_state
from diloco.training.world import alone


class Counting(FixedProgress):
    """Progress that remembers when it was asked."""

    asked: list[int] = []  # noqa: RUF012

    def after(self, step: int) -> Standing:
        self.asked.append(step)
        return super().after(step)


def test_a_step_asks_once():
    config = config_of()
    world = alone(config.precision)
    state = initial_state(config, world)
    state.progress = progress = Counting(config.num_steps, config.tokens_per_step)
    for step in (1, 2, 3):
        begun = begin(state, batch_of(config, step), config, world)
        assert begun.tokens == step * config.tokens_per_step
    assert progress.asked == [1, 2, 3]


def elastic_progress(num_others: int, budget: int) -> tuple[ElasticProgress, SimpleNamespace, list[int]]:
    """Progress of one of several replicas with 3 fragments; the engine that it looks at; its questions."""
    own_tokens = config_of().tokens_per_step
    settings = SimpleNamespace(
        fragments=(None,) * 3, schedule=Schedule(num_fragments=3, sync_every=6, overlap_steps=1)
    )
    engine = SimpleNamespace(settings=settings, num_steps=0, _membership=SimpleNamespace(uncounted_tokens=0.0))
    run = SimpleNamespace(active=range(1 + num_others), finished=False)
    rendezvous = SimpleNamespace(state=run, counted_tokens=0)
    questions = []

    def of_first(num_numbers, read):
        numbers = [int(number) for number in read()]
        questions.append(num_numbers)
        assert len(numbers) == num_numbers
        return numbers

    world = SimpleNamespace(rendezvous=rendezvous, of_first=of_first)
    return ElasticProgress(engine, world, num_tokens=budget * own_tokens, own_tokens=own_tokens), engine, questions


def test_replicas_that_come_and_go_know_tokens_rate_and_end_of_one_question():
    progress, engine, questions = elastic_progress(num_others=2, budget=6)
    per_step = config_of().tokens_per_step
    seen = []
    for step in (1, 2):
        engine.num_steps, engine._membership.uncounted_tokens = step, float(step * per_step)
        seen.append(progress.after(step))
    assert questions == [3, 3]
    assert seen == [Standing(3 * per_step, 6 * per_step, False), Standing(6 * per_step, 9 * per_step, True)]
    progress._rendezvous.state.active = range(1)
    assert progress.after(2) == seen[1], "it never goes back when replicas leave"
