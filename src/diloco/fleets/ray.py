"""Ray: an actor per replica, in a placement group of its own; Ray starts it again when its machine fails."""

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from diloco.errors import UserError
from diloco.files import require
from diloco.fleets.engine import Launch, State, Submission, refuse_group, refuse_image
from diloco.fleets.fleet_file import Fleet, Kind, kind_of
from diloco.fleets.script import Place, named, preparation, program_of

_NAMESPACE = "diloco"
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_STOP = 30.0
"""A replica answers within 25 s."""


class Ray:
    """Ray's own interface; a job is the name of an actor and its placement group, `LAUNCH/KIND-i`."""

    def check(self, fleet: Fleet) -> None:
        """Refuse fixed groups and containers."""
        refuse_group(
            fleet,
            "under Ray, replicas meet in a store; a fixed group is made of TorchTrainers of your own, which "
            "diloco.integrations.ray serves",
        )
        refuse_image(fleet, "the machines of a Ray cluster have their image already: leave it out")

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """A script per kind, and as a comment the actor that runs it."""
        fleet = launch.fleet
        files = {f"{kind.name}.sh": _script(fleet, kind) for kind in fleet.machines}
        bundles = {kind.name: dict(kind.launch.ray.resources) for kind in fleet.machines}
        commands = (("#", f"actor {self.job(launch, name)}", f"bundle {bundles[kind_of(name)]}") for name in names)
        return Submission(files=files, commands=tuple(commands))

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Create the actors; they wait for their resources in the cluster, and outlive this process."""
        ray = _connected(launch)
        board = ray.remote(num_cpus=0)(_Board).options(**_named(_board(launch)), get_if_exists=True).remote()
        ray.get(board.codes.remote(), timeout=_SECONDS_TO_ANSWER)
        for name in names:
            job, kind = self.job(launch, name), launch.fleet.kind(kind_of(name))
            ray.get(board.forget.remote(name), timeout=_SECONDS_TO_ANSWER)
            _start(ray, job, name, kind, _script(launch.fleet, kind), _board(launch))
            yield name, job

    def job(self, launch: Launch, name: str) -> str:
        """The name of the actor and its placement group."""
        return f"{launch.name}/{name}"

    def states(self, launch: Launch) -> Mapping[str, State]:
        """By the exit codes on the board; of replicas without one, by their placement groups."""
        ray = _connected(launch)
        try:
            board = ray.get_actor(_board(launch), namespace=_NAMESPACE)
        except ValueError:  # the cluster is another one
            return dict.fromkeys(launch.jobs, "lost")
        codes = ray.get(board.codes.remote(), timeout=_SECONDS_TO_ANSWER)
        groups = {group["name"]: group["state"] for group in ray.util.placement_group_table().values() if group}
        states: dict[str, State] = {}
        for name, job in launch.jobs.items():
            if name in codes:
                states[name] = "finished" if codes[name] == 0 else "stopped" if codes[name] < 0 else "failed"
            else:
                group = groups.get(job, "REMOVED")
                states[name] = "running" if group == "CREATED" else "lost" if group == "REMOVED" else "waiting"
        return states

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """Send SIGTERM to the programs, wait for their ends, and give the resources back."""
        ray = _connected(launch)
        actors = list[Any]()
        for name in names:
            with suppress(ValueError):  # it has ended by itself
                actors.append(ray.get_actor(launch.jobs[name], namespace=_NAMESPACE))
        ends = [actor.stop.remote() for actor in actors]
        ray.wait(ends, num_returns=len(ends), timeout=_SECONDS_TO_STOP) if ends else None
        for name in names:
            _remove(ray, launch.jobs[name])


class _Board:
    """The exit codes of a launch's replicas, which outlive them."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def codes(self) -> dict[str, int]:
        return self._codes

    def note(self, name: str, code: int) -> None:
        self._codes[name] = code

    def forget(self, name: str) -> None:
        self._codes.pop(name, None)


class _Replica:
    """The actor of a replica: it runs the script, and again when Ray starts it again.

    Args:
        name: the machine's.
        job: the name of this actor, and of its placement group.
        board: the name of the board.
        script: of bash; $1 is the machine's number.
    """

    def __init__(self, name: str, job: str, board: str, script: str) -> None:
        self._name, self._job, self._board = name, job, board
        command = ["bash", "-c", script, "bash", name.rpartition("-")[2]]
        self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Ask the program to end, and wait for that."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_STOP)

    def _watch(self) -> None:
        """Write the exit code on the board, and give the resources back, this process among them."""
        import ray

        code = self._process.wait()
        # The program ends a stop by 128 + its signal; -1 stands for all signals.
        board = ray.get_actor(self._board, namespace=_NAMESPACE)
        ray.get(board.note.remote(self._name, -1 if code < 0 or code > 128 else code), timeout=_SECONDS_TO_ANSWER)
        _remove(ray, self._job)


def _start(ray: Any, job: str, name: str, kind: Kind, script: str, board: str) -> None:
    """Make a placement group of one bundle, and the actor in it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = dict(kind.launch.ray.resources)
    _remove(ray, job)
    group = ray.util.placement_group([bundle], name=job, lifetime="detached")
    asked = {name.lower(): bundle.pop(name, 0.0) for name in ("CPU", "GPU")}
    memory = bundle.pop("memory", None)  # which Ray, too, takes apart from other resources
    options = {"num_cpus": asked["cpu"], "num_gpus": asked["gpu"], "memory": memory, "resources": bundle}
    actor = ray.remote(**options, max_restarts=-1)(_Replica)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    actor.options(**_named(job), scheduling_strategy=strategy).remote(name, job, board, script)


def _named(name: str) -> dict[str, Any]:
    """The options of an actor that outlives this process."""
    return {"name": name, "namespace": _NAMESPACE, "lifetime": "detached"}


def _remove(ray: Any, job: str) -> None:
    """Remove a placement group, and by that its actor; it may be gone."""
    with suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(job))


def _connected(launch: Launch) -> Any:
    """Ray, connected to the cluster.

    Raises:
        UserError: if there is none, or ray is not installed.
    """
    ray, address = require("ray", extra="ray"), launch.fleet.launch.ray_address
    if not ray.is_initialized():
        try:
            ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise UserError(
                f"ray_address={address}: no Ray cluster there: start one with `ray start` ({error})", "ray_address"
            ) from None
    return ray


def _script(fleet: Fleet, kind: Kind) -> str:
    """The script whose shell becomes the program, so that it gets the signals."""
    place = Place(index="$1")
    *exports, run = program_of(fleet, kind, place)
    return "\n".join([named(kind, place), *preparation(fleet), *exports, f"exec {run}", ""])


def _board(launch: Launch) -> str:
    return f"{launch.name}/exit-codes"


def _end_with_parent() -> None:
    """Have the program killed with its actor: one that is started again finds its run's directory free."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
