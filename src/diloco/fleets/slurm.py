"""Slurm: an array of jobs that join a store and are requeued, or one job per site of a fixed group."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from diloco.fleets.engine import Launch, State, Submission, asked, ended, refuse_image
from diloco.fleets.fleet_file import Fleet, Kind, index_of, kind_of
from diloco.fleets.script import Place, check_address, script

_NOTICE_SECONDS = 60
"""Time before its limit at which a job hears of it."""
_FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_STATES: Mapping[str, State] = {
    "COMPLETED": "finished",
    "COMPLETING": "running",
    "RUNNING": "running",
    "CANCELLED": "stopped",
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"), "failed"),
}
"""Slurm's states; in all others a job waits for a node."""


class Slurm:
    """Slurm's own commands; a job is `ARRAY_INDEX`, or the job of a site."""

    def check(self, fleet: Fleet) -> None:
        """Refuse containers, and sites that do not know where they meet."""
        refuse_image(fleet, "Slurm itself starts no container: leave it out, and start it in command")
        check_address(fleet, sites="sites")

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """A batch script per kind, and an array of it, or one job."""
        files, commands = dict[str, str](), list[tuple[str, ...]]()
        for kind in launch.fleet.machines:
            files |= self._files(launch, kind)
            if indices := [index_of(name) for name in names if kind_of(name) == kind.name]:
                is_group = launch.fleet.launch.rendezvous is None
                array = () if is_group else (f"--array={_ranges(indices)}",)
                # Not in the script, where Slurm would take a path's spaces and quotes apart.
                log = launch.file(kind.name).replace("%", "%%") + (".log" if is_group else "-%a.log")
                script = launch.file(f"{kind.name}.sbatch")
                commands.append(("sbatch", "--parsable", *array, f"--output={log}", script))
        return Submission(files=files, commands=tuple(commands))

    def _files(self, launch: Launch, kind: Kind) -> dict[str, str]:
        """The batch script of a kind; of a site, the script of each of its machines, too."""
        fleet, request = launch.fleet, kind.launch.slurm
        wanted = {name: getattr(request, name) for name in ("partition", "gres", "time", "qos", "account")}
        options = [f"--job-name={launch.name}-{kind.name}", "--open-mode=append"]
        options += [f"--{name}={value}" for name, value in wanted.items() if value is not None]
        options += request.options
        if fleet.launch.rendezvous is not None:
            options += ["--requeue", f"--signal=B:USR1@{_NOTICE_SECONDS}"]
            requeue = 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
            place = Place(index="$SLURM_ARRAY_TASK_ID")
            body = script(fleet, kind, place, exits=launch.directory, after_notice=requeue)
            return {f"{kind.name}.sbatch": _batch(options, body)}
        options += [
            f"--nodes={kind.count}",
            "--ntasks-per-node=1",
            "--no-requeue",
            f"--signal=TERM@{_NOTICE_SECONDS}",
        ]
        place = Place(index="$SLURM_NODEID", first=_FIRST_HOST, site=_FIRST_HOST)
        machine = launch.file(f"{kind.name}.sh")
        return {
            f"{kind.name}.sbatch": _batch(
                options, f"exec srun --kill-on-bad-exit=1 bash {shlex.quote(machine)}\n"
            ),
            f"{kind.name}.sh": script(fleet, kind, place, exits=launch.directory),
        }

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Submit the jobs."""
        for command in self.submission(launch, names).commands:
            number = asked(command, engine="Slurm").strip().partition(";")[0]  # a cluster's name may follow
            kind = next(k.name for k in launch.fleet.machines if command[-1] == launch.file(f"{k.name}.sbatch"))
            is_array = launch.fleet.launch.rendezvous is not None
            for name in names:
                if kind_of(name) == kind:
                    yield name, f"{number}_{index_of(name)}" if is_array else number

    def job(self, launch: Launch, name: str) -> None:
        """None: the jobs have numbers."""

    def states(self, launch: Launch) -> Mapping[str, State]:
        """The states in Slurm's queue; of jobs that it has forgotten, the exit codes that they wrote."""
        jobs = ",".join(f"{launch.name}-{kind.name}" for kind in launch.fleet.machines)
        command = ("squeue", "--noheader", "--array", "--me", "--states=all", f"--name={jobs}", "--format=%i|%T")
        rows = (line.strip().partition("|") for line in asked(command, engine="Slurm").splitlines())
        queue = {number: state for number, _, state in rows}
        return {
            name: _STATES.get(queue[job], "waiting") if job in queue else ended(launch, name)
            for name, job in launch.jobs.items()
        }

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """Cancel the jobs; Slurm sends SIGTERM, and after KillWait SIGKILL."""
        jobs = dict.fromkeys(launch.jobs[name] for name in names)
        if jobs:
            asked(("scancel", *jobs), engine="Slurm")


def _ranges(indices: Sequence[int]) -> str:
    """Indices in ascending order as Slurm takes them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    known = {*indices}
    starts = [index for index in indices if index - 1 not in known]
    ends = [index for index in indices if index + 1 not in known]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _batch(options: Sequence[str], body: str) -> str:
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", body])
