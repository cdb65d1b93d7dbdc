"""Tasks to plan."""

from dataclasses import replace

from diloco.simulator.model_size import ModelSize
from diloco.simulator.planner import Task
from diloco.simulator.replicas import Replica


def task(gbit_s: float, *, num_replicas: int = 2, latency_seconds: float = 0.05) -> Task:
    """A 7B model of 7 layers, for 20 tokens a parameter."""
    replica = Replica(step_seconds=2.3, gbit_s=gbit_s, latency_seconds=latency_seconds)
    size = ModelSize(num_params=7e9, num_layers=7)
    return Task(size=size, replicas=(replica,) * num_replicas, num_steps=66_757)


def with_replicas(original: Task, **changes: float) -> Task:
    return replace(original, replicas=tuple(replace(replica, **changes) for replica in original.replicas))
