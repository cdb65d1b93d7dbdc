"""Kubernetes: an Indexed Job per kind of machines, whose pods are replicas, or the machines of a site."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diloco.errors import UserError
from diloco.fleets.engine import Launch, State, Submission, as_yaml, asked, refuse_directory_store
from diloco.fleets.fleet_file import Fleet, Kind, index_of, kind_of
from diloco.fleets.script import Place, script

_LAUNCH, _INDEX = "diloco-launch", "batch.kubernetes.io/job-completion-index"
_GRACE_SECONDS = 60
"""Time between a pod's SIGTERM and its end; a replica answers within 25 s."""
_MOST_FAILURES = 3
"""Failures of a replica, preemptions apart, after which it is not started again."""
_STATES: Mapping[str, State] = {"Running": "running", "Succeeded": "finished", "Failed": "failed"}


class Kubernetes:
    """The program `kubectl`; a job is `JOB/INDEX`."""

    def check(self, fleet: Fleet) -> None:
        """Refuse fleets without an image, names that are none of Kubernetes', and stores that no pod sees."""
        if fleet.launch.image is None:
            raise UserError("image is missing: on Kubernetes every program runs in a container", "image")
        for kind in fleet.machines:
            if not re.fullmatch("[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", kind.name):
                raise UserError(
                    f"name={kind.name!r} of machines: Kubernetes takes 32 small letters, digits and dashes",
                    "name",
                )
        refuse_directory_store(fleet, "Kubernetes")

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """A Job per kind, with a Service in front of a fixed group; a Job that is there gets another size."""
        _check_name(launch.name)
        files, commands = dict[str, str](), list[tuple[str, ...]]()
        for kind in launch.fleet.machines:
            there, added = launch.of_kind(kind.name), [name for name in names if kind_of(name) == kind.name]
            file, size = f"{kind.name}.yaml", len(there) + len(added)
            files[file] = as_yaml(_job(launch, kind, size))
            if added:
                apply = ("kubectl", "apply", "--filename", launch.file(file))
                commands.append(_resized(launch, kind.name, size) if there else apply)
        if launch.fleet.launch.rendezvous is None:
            files["service.yaml"] = as_yaml(_service(launch))
            commands.insert(0, ("kubectl", "apply", "--filename", launch.file("service.yaml")))
        return Submission(files=files, commands=tuple(commands))

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Apply what is planned, kind by kind; a Job that has ended, of an earlier launch, is deleted first."""
        for kind in dict.fromkeys(map(kind_of, names)):
            added = [name for name in names if kind_of(name) == kind]
            if not launch.of_kind(kind):
                _delete_ended(f"{launch.name}-{kind}")
            for command in self.submission(launch, added).commands:
                asked(command, engine="Kubernetes")
            for name in added:
                yield name, self.job(launch, name)

    def job(self, launch: Launch, name: str) -> str:
        """The Job, and the index in it."""
        return f"{launch.name}-{kind_of(name)}/{index_of(name)}"

    def states(self, launch: Launch) -> Mapping[str, State]:
        """The phase of each index's newest pod; one without a pod waits, until its Job has ended."""
        command = ("kubectl", "get", "jobs,pods", "--selector", f"{_LAUNCH}={launch.name}", "--output", "json")
        newest, known = dict[str, tuple[str, str]](), set[str]()
        for item in json.loads(asked(command, engine="Kubernetes"))["items"]:
            metadata = item["metadata"]
            if item["kind"] == "Job":
                known |= set() if _has_ended(item) else {metadata["name"]}
                continue
            job = f"{metadata['labels']['batch.kubernetes.io/job-name']}/{metadata['labels'][_INDEX]}"
            phase = metadata["creationTimestamp"], item["status"]["phase"]
            newest[job] = max(newest.get(job, phase), phase)

        def state(job: str) -> State:
            if job in newest:
                return _STATES.get(newest[job][1], "waiting")
            return "waiting" if job.partition("/")[0] in known else "lost"

        return {name: state(job) for name, job in launch.jobs.items()}

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """Make Jobs smaller, or delete them; the pods with the highest numbers end first."""
        for kind in dict.fromkeys(map(kind_of, names)):
            size = len([name for name in launch.of_kind(kind) if name not in names])
            delete = ("kubectl", "delete", "job", f"{launch.name}-{kind}", "--wait=false", "--ignore-not-found")
            asked(_resized(launch, kind, size) if size else delete, engine="Kubernetes")
        if launch.fleet.launch.rendezvous is None:
            asked(("kubectl", "delete", "service", launch.name, "--ignore-not-found"), engine="Kubernetes")


def _check_name(name: str) -> None:
    if not re.fullmatch("[a-z]([a-z0-9-]{0,20}[a-z0-9])?", name):
        raise UserError(
            f"{name!r} is no name of Kubernetes': name the launch's directory with at most 22 small letters, "
            "digits and dashes, a letter first",
            "output",
        )


def _delete_ended(job: str) -> None:
    """Delete a Job that has ended: to apply it again would start nothing."""
    answer = asked(("kubectl", "get", "job", job, "--ignore-not-found", "--output", "json"), engine="Kubernetes")
    if answer.strip() and _has_ended(json.loads(answer)):
        asked(("kubectl", "delete", "job", job), engine="Kubernetes")


def _has_ended(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions)


def _resized(launch: Launch, kind: str, size: int) -> tuple[str, ...]:
    """The command that gives a Job another size: an Indexed Job has as many pods as indices."""
    patch = json.dumps({"spec": {"parallelism": size, "completions": size}})
    return ("kubectl", "patch", "job", f"{launch.name}-{kind}", "--patch", patch)


def _service(launch: Launch) -> dict[str, Any]:
    """The Service that gives each pod of a fixed group a host name, before it is ready, too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": launch.name, "labels": {_LAUNCH: launch.name}},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_LAUNCH: launch.name}},
    }


def _job(launch: Launch, kind: Kind, size: int) -> dict[str, Any]:
    """The Job of a kind's machines."""
    is_group = launch.fleet.launch.rendezvous is None
    labels = {_LAUNCH: launch.name}
    # A pod that is preempted or drained does not count as a failure.
    ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    failures: dict[str, Any] = {"backoffLimitPerIndex": _MOST_FAILURES, "podFailurePolicy": {"rules": [ignored]}}
    if is_group:  # which fails together
        failures = {"backoffLimit": 0}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{launch.name}-{kind.name}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "parallelism": size,
            "completions": size,
            **failures,
            "template": {"metadata": {"labels": labels}, "spec": _pod(launch, kind)},
        },
    }


def _pod(launch: Launch, kind: Kind) -> dict[str, Any]:
    """The pod of a machine: one container, which runs its script."""
    fleet, request = launch.fleet, kind.launch.kubernetes
    hosts = (f"{launch.name}-{name}-0.{launch.name}" for name in (fleet.machines[0].name, kind.name))
    first, site = hosts
    place = Place(index="$JOB_COMPLETION_INDEX", first=first, site=site)
    container: dict[str, Any] = {
        "name": "diloco",
        "image": fleet.launch.image,
        "command": ["bash", "-c"],
        # Kubernetes would read $(NAME) as a variable of its own, and $$ as an escape.
        "args": [re.sub(r"\$(?=[$(])", "$$", script(fleet, kind, place))],
    }
    if request.resources:
        container["resources"] = {"requests": dict(request.resources), "limits": dict(request.resources)}
    if request.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in request.secrets]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
    }
    if fleet.launch.rendezvous is None:
        pod["subdomain"] = launch.name
    if request.node_selector:
        pod["nodeSelector"] = dict(request.node_selector)
    if request.tolerations:
        pod["tolerations"] = [dict(one) for one in request.tolerations]
    return pod
