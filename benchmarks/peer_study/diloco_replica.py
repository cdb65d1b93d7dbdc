"""A replica of this library, which meets the others in a store, until it is killed."""

import diloco
from peer_study.common import ALPHA, Diary, Training, settings_of_arguments


def main() -> None:
    settings = settings_of_arguments()
    diary = Diary(settings.diary)
    exchange = diloco.StoreRendezvous(
        settings.url, name=settings.name, num_replicas=settings.num_replicas, **settings.options
    )
    store = exchange.store
    training = Training(settings, diary, lambda: (store.bytes_up, store.bytes_down))
    engine = diloco.StreamingDiLoCo(
        training.model,
        fragments=diloco.sequential(training.model, layers_per_fragment=1),
        schedule=diloco.Schedule(
            sync_every=settings.sync_every,
            num_fragments=settings.num_fragments,
            overlap_steps=settings.overlap_steps,
        ),
        rendezvous=exchange,
        mixing=ALPHA,
        wire="fp32",
    )
    diary.note("joined")
    while True:
        training.inner_step()
        sent = engine.bytes_sent
        outer_steps = engine.step(tokens=8)
        if engine.bytes_sent > sent:
            diary.sending()  # the upload has begun in the background
        for outer_step in outer_steps:
            sync, cohort = outer_step.sync, outer_step.cohort
            counted = cohort is not None and exchange.replica in cohort.members
            # A replica in the outer step merges; one that is not translates, and keeps all of its steps.
            lost_steps = (1 - ALPHA) * (training.num_steps - sync.step) if counted else 0.0
            training.outer_step(sync.fragment, lost_steps=lost_steps, counted=counted)
            diary.note("commit")


if __name__ == "__main__":
    main()
