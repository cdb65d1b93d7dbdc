"""SkyPilot: a managed job per replica, which it starts again elsewhere when a spot machine is taken away."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diloco.errors import DilocoError, UserError
from diloco.fleets.engine import Launch, State, Submission, as_yaml, asked, refuse_directory_store, refuse_group
from diloco.fleets.fleet_file import Fleet, Kind, kind_of
from diloco.fleets.script import Place, entering, program_of

_SECONDS_TO_LAUNCH = 1800.0
"""The first launch starts the machine that manages the others."""
_NO_JOBS = "No in-progress managed jobs"
"""SkyPilot's error where that machine is not there yet, or has stopped after the last job."""
_STATES: Mapping[str, State] = {
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "CANCELLING": "stopped",
    "CANCELLED": "stopped",
    **dict.fromkeys(
        ("FAILED", "FAILED_SETUP", "FAILED_PRECHECKS", "FAILED_NO_RESOURCE", "FAILED_CONTROLLER"), "failed"
    ),
}
"""SkyPilot's states; in all others a job waits for a machine."""


class SkyPilot:
    """The program `sky`; a job is a managed job's name, `LAUNCH-KIND-i`."""

    def check(self, fleet: Fleet) -> None:
        """Refuse fixed groups, and stores that the machines can't see."""
        refuse_group(fleet, "machines of several regions meet in a store; give it one, such as s3://bucket/run")
        refuse_directory_store(fleet, "SkyPilot's")
        for kind in fleet.machines:
            if kind.launch.skypilot.region is not None and kind.launch.skypilot.cloud is None:
                raise UserError(
                    f"region={kind.launch.skypilot.region!r:.80} of {kind.name} is a region of which cloud? Give "
                    "cloud, such as aws",
                    *("region", "cloud"),
                )

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """A task per kind, and a launch of it per machine."""
        files = {f"{kind.name}.yaml": as_yaml(_task(launch, kind)) for kind in launch.fleet.machines}
        return Submission(files=files, commands=tuple(self._command(launch, name) for name in names))

    def _command(self, launch: Launch, name: str) -> tuple[str, ...]:
        job, task = self.job(launch, name), launch.file(f"{kind_of(name)}.yaml")
        named = ("--name", job, "--env", f"DILOCO_NAME={name}")
        return ("sky", "jobs", "launch", "--yes", "--detach-run", *named, task)

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Launch the jobs one after another."""
        for name in names:
            asked(self._command(launch, name), engine="SkyPilot", seconds=_SECONDS_TO_LAUNCH)
            yield name, self.job(launch, name)

    def job(self, launch: Launch, name: str) -> str:
        """The name of the managed job."""
        return f"{launch.name}-{name}"

    def states(self, launch: Launch) -> Mapping[str, State]:
        """The states in the queue of managed jobs."""
        newest: dict[str, tuple[int, str]] = {}
        for row in _queue():
            job = (row["job_id"], str(row["status"]).rpartition(".")[2])
            newest[row["job_name"]] = max(newest.get(row["job_name"], job), job)
        return {
            name: _STATES.get(newest[job][1], "waiting") if job in newest else "lost"
            for name, job in launch.jobs.items()
        }

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """Cancel the jobs, and by that end their machines."""
        for name in names:
            asked(("sky", "jobs", "cancel", "--yes", "--name", launch.jobs[name]), engine="SkyPilot")


def _queue() -> list[dict[str, Any]]:
    try:
        return json.loads(asked(("sky", "jobs", "queue", "--all", "--output", "json"), engine="SkyPilot"))
    except DilocoError as error:
        if _NO_JOBS in str(error):
            return []
        raise


def _task(launch: Launch, kind: Kind) -> dict[str, object]:
    """The task of a kind's machines; the command that launches one gives DILOCO_NAME its value."""
    program, request = launch.fleet.launch, kind.launch.skypilot
    resources: dict[str, object] = {"use_spot": kind.launch.spot}
    resources |= {name: value for name in ("accelerators", "cpus", "memory") if (value := getattr(request, name))}
    if request.cloud is not None:
        resources["infra"] = "/".join(filter(None, (request.cloud, request.region)))
    if program.image is not None:
        resources["image_id"] = f"docker:{program.image}"
    task: dict[str, object] = {
        "name": f"{launch.name}-{kind.name}",
        "resources": resources,
        "envs": {**program.environment, "DILOCO_NAME": f"{kind.name}-0"},
    }
    *exports, run = program_of(launch.fleet, kind, Place(index="0"))
    if program.setup:
        task["setup"] = "\n".join(["set -e", *program.setup, ""])
    if program.directory != ".":
        exports = [entering(program.directory), *exports]
    return {**task, "run": "\n".join(["set -e", *exports, f"exec {run}", ""])}
