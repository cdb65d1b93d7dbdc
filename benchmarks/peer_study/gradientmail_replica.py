"""A node of GradientMail, which trains and takes part in closing rounds, until it is killed."""

import importlib
from itertools import repeat
from typing import Any

from peer_study.common import Diary, ReplicaSettings, Training, settings_of_arguments


def main() -> None:
    gradientmail = importlib.import_module("gradientmail")
    settings = settings_of_arguments()
    diary = Diary(settings.diary)
    bucket, _, prefix = settings.url.removeprefix("s3://").partition("/")
    traffic = [0, 0]
    mailbox = _counting(gradientmail.S3Mailbox, traffic, diary)(bucket, prefix)
    training = Training(settings, diary, lambda: (traffic[0], traffic[1]))
    options = dict(settings.options)
    carries = options.pop("carry", False)
    session = gradientmail.Session(
        training.model,
        algorithm=gradientmail.DiLoCo(
            sync_every=settings.sync_every,
            fragments=settings.num_fragments,
            alignment=gradientmail.Carry() if carries else gradientmail.Overwrite(),
        ),
        mailbox=mailbox,
        node_id=f"replica-{settings.name}",
        callbacks=[_noting(settings, training, diary, carries=carries), gradientmail.log_events],
        **options,
    )
    session.join()
    diary.note("joined")

    def step(_: None) -> int:
        training.inner_step()
        return 8

    session.run(step, repeat(None))


def _counting(mailbox: type, traffic: list[int], diary: Diary) -> type:
    """A mailbox's class that counts the bytes of objects that are put and got."""

    class Counting(mailbox):
        async def put_if_absent(self, key: str, data: bytes) -> bool:
            if key.startswith("blobs/snapshots/"):
                diary.sending()
            traffic[0] += len(data)
            return await super().put_if_absent(key, data)

        async def get(self, key: str) -> bytes | None:
            data = await super().get(key)
            traffic[1] += len(data or b"")
            return data

    return Counting


def _noting(settings: ReplicaSettings, training: Training, diary: Diary, *, carries: bool) -> Any:
    """A callback that notes rounds, and the steps that aligning with them drops."""
    aligned_steps = [0] * settings.num_fragments

    def note(event: Any) -> None:
        match type(event).__name__:
            case "FragmentAligned":
                p, counted = event.fragment, event.lag_steps is not None
                lost_steps = event.lag_steps if counted else training.num_steps - aligned_steps[p]
                training.outer_step(p, lost_steps=0.0 if carries else float(lost_steps), counted=counted)
                aligned_steps[p] = training.num_steps
            case "RoundRecorded":
                diary.note("commit")
            case "RoundCommitted" | "TookOverRound" | "RoundFailed" | "PollFailed" | "PublishFailed" as name:
                diary.note(name)

    return note


if __name__ == "__main__":
    main()
