"""The facts of a run or a store that goes on, as text by name: what the page and the terminal show."""

from collections.abc import Mapping

from diloco.rendezvous.status import RunStatus
from diloco.report.terminal.training import duration, megabytes
from diloco.training.records.tail import RunFollower

_MOST_FLIGHTS = 8


def run_facts(run: RunFollower) -> dict[str, str]:
    """The progress of a run; what is not known yet is left out."""
    last, replicas, config = run.last, run.started, run.config
    if last is None or config is None:
        return {}
    seconds = sum(one.seconds for one in replicas)
    sent, received = ([getattr(one, f"bytes_{way}") for one in replicas] for way in ("sent", "received"))
    facts = {
        "step": f"{last.step:,} of {config.num_steps:,}"
        if config.rendezvous is None
        else f"{last.step:,}, {run.part:.1%} of the run",
        "loss": _loss(run.loss),
        "held-out loss": _loss(run.eval_loss),
        "tokens/s": f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else "",
        "compute utilization": f"{1 - sum(one.blocked_seconds for one in replicas) / seconds:.1%}",
        "MFU": f"{last.model_flops_utilization:.1%}" if last.model_flops_utilization is not None else "",
        "memory": megabytes(last.peak_memory_bytes) if last.peak_memory_bytes else "",
        "sent per replica": megabytes(sum(sent) / len(sent)) if any(sent) else "",
        "merged per replica": megabytes(sum(received) / len(received)) if any(received) else "",
        "ETA": duration(run.eta_seconds) if run.eta_seconds is not None and run.standing == "running" else "",
        "in flight": _in_flight(run.in_flight()),
    }
    return {name: value for name, value in facts.items() if value}


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _in_flight(flights: Mapping[int, Mapping[int, int]]) -> str:
    """The fragments under way, such as `fragment 2 of replicas 0 1 since step 58`."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for replica, sent in flights.items():
        for fragment, step in sent.items():
            replicas.setdefault((step, fragment), []).append(replica)
    parts = [
        f"fragment {fragment} of replica{'s' * (len(senders) > 1)} {' '.join(map(str, senders[:_MOST_FLIGHTS]))}"
        f"{' …' * (len(senders) > _MOST_FLIGHTS)} since step {step:,}"
        for (step, fragment), senders in sorted(replicas.items())
    ]
    return "; ".join(parts[:_MOST_FLIGHTS]) + " …" * (len(parts) > _MOST_FLIGHTS)


def store_facts(status: RunStatus, before: RunStatus | None, seconds: float) -> dict[str, str]:
    """The progress of the run of a store."""
    speed = (status.tokens - before.tokens) / seconds if before is not None and seconds else None
    return {
        "replicas active": f"{status.num_active} of {len(status.replicas)}",
        "outer steps": f"{status.outer_steps:,}",
        "rounds by fragment": " ".join(map(str, status.rounds[:24])) + " …" * (len(status.rounds) > 24),
        "contributors, lately": f"{status.contributors:.1f}",
        "tokens counted": f"{status.tokens:,}",
        **({} if speed is None else {"tokens/s": f"{speed:,.0f}"}),
        "entries": f"{status.entries:,}",
        "up, about": megabytes(status.traffic.bytes_up),
        "down, about": megabytes(status.traffic.bytes_down),
    }
