"""The time of one fragment's sync in passes over memory, beside copies of as many bytes.

    python benchmarks/outer_step.py [--parameters N] [--replicas M] [--threads T] [--dtype bf16]

Each stage of a sync is timed by itself: the outer gradient, the digest of Θ, encoding, decoding and adding M
payloads, the outer step with the merge. Θ is FP32, θ of the given dtype. Bytes are those that a stage must read
and write for each parameter; the floor is their time at the speed of a copy in the same run (bytes read and
written, both counted).

Below: each rule's outer step and merge, with what it does at the send, in passes, which are times of a copy. A
row names the merge rule, where it is not `mix`.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import diloco
from diloco.engine.parameters import FragmentParameters
from diloco.outer.averages import Average, Gather
from diloco.outer.cohort import Cohort
from diloco.outer.merge import MergeRule, Mixing, Past
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState, OuterRule, Span
from diloco.outer.rules import RULES, merge_rule, outer_rule
from diloco.outer.step import outer_digest, take_outer_step
from diloco.schedule import Sync
from diloco.wire import Key, codec
from diloco.wire.kernels.memory import empty

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 26)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wire", default="e3m0")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the parameters")
    torch.set_num_threads((arguments := parser.parse_args()).threads)
    N, M, wire = arguments.parameters, arguments.replicas, codec(arguments.wire)
    outer_N, velocity_N, delta_N, total_N = (
        empty(N, torch.float32, torch.device("cpu")).normal_(std=1e-3) for _ in range(4)
    )
    model = torch.nn.ParameterDict({"theta": delta_N.to(DTYPES[arguments.dtype], copy=True)})
    parameters = FragmentParameters(model, diloco.whole(model))
    theta_bytes = DTYPES[arguments.dtype].itemsize
    parameters.outer_gradient(0, outer_N, delta_N)
    received = {m: wire.encode(delta_N) for m in range(M)}
    payload_bytes = wire.payload_bytes(N) / N
    gather, rule, cohort, sync = Gather(wire), Nesterov(), Cohort.equal(M), Sync(fragment=0, round=1, step=1)
    vectors = {"outer": outer_N, "velocity": velocity_N}
    fragment = FragmentState(vectors.__getitem__, {"theta": Span((-(-N // 1024), 1024), 0)})

    # Bytes a parameter: read + written.
    stages: dict[str, tuple[float, Callable[[], object]]] = {
        "outer gradient: Θ − θ": (
            4 + theta_bytes + 4,
            lambda: parameters.outer_gradient(0, outer_N, delta_N),
        ),
        "digest of Θ": (4, lambda: outer_digest(outer_N)),
        "encode": (4 + payload_bytes, lambda: wire.encode(delta_N)),
        f"decode and add {M} payloads": (
            payload_bytes + 4 + (M - 1) * (payload_bytes + 4 + 4),
            lambda: gather.average(received, total_N, Key(), cohort),
        ),
        "outer step and merge": (
            12 + theta_bytes + 8 + theta_bytes,
            lambda: take_outer_step(
                rule, Mixing(0.5), fragment, parameters.shards(0), Average(total_N, M), sync, cohort
            ),
        ),
    }
    copy_seconds = shortest_seconds(lambda: np.copyto(delta_N.numpy(), total_N.numpy()))
    bytes_a_second = 8 * N / copy_seconds
    print(f"{N:,} parameters in {arguments.dtype}, {M} replicas, {wire.spec}, {arguments.threads} threads")
    print(f"copy: {bytes_a_second / 1e9:.1f} GB/s read and written\n")
    print(f"{'stage':28} {'bytes a parameter':>17} {'ms':>8} {'floor, ms':>10} {'ratio':>6}")
    total_bytes = total_seconds = 0.0
    for name, (bytes_a_parameter, stage) in stages.items():
        seconds = shortest_seconds(stage)
        total_bytes, total_seconds = total_bytes + bytes_a_parameter, total_seconds + seconds
        report(name, bytes_a_parameter, seconds, bytes_a_parameter * N / bytes_a_second)
    report("together", total_bytes, total_seconds, total_bytes * N / bytes_a_second)
    average = gather.average(received, total_N, Key(), cohort)

    def step(one: OuterRule, merge: MergeRule) -> None:
        one.on_send(fragment, lambda: delta_N, sync, cohort)
        past = Past(theta_N=delta_N, num_steps=1, sync_every=30)
        take_outer_step(one, merge, fragment, parameters.shards(0), average, sync, cohort, past)

    report_rules(step, vectors, copy_seconds)


def report_rules(
    step: Callable[[OuterRule, MergeRule], None], vectors: dict[str, torch.Tensor], copy_seconds: float
) -> None:
    print(f"\n{'rule':28} {'ms':>8} {'passes':>7}")
    rows = [(name, "translate" if name == "eager" else "mix") for name in (*RULES, "torch.AdamW")]
    for name, merge in (*rows, ("nesterov", "taylor")):
        rule, merging = outer_rule(name), merge_rule(merge)
        for slot in {*vectors} - {"outer", *rule.slots}:
            del vectors[slot]
        vectors |= {slot: torch.zeros_like(vectors["outer"]) for slot in rule.slots if slot not in vectors}
        seconds = shortest_seconds(lambda rule=rule, merging=merging: step(rule, merging))
        row = name if merge == "mix" else f"{name}, {merge}"
        print(f"{row:28} {seconds * 1e3:8.1f} {seconds / copy_seconds:7.1f}", flush=True)


def report(name: str, bytes_a_parameter: float, seconds: float, floor_seconds: float) -> None:
    ratio = seconds / floor_seconds
    print(f"{name:28} {bytes_a_parameter:17.2f} {seconds * 1e3:8.1f} {floor_seconds * 1e3:10.1f} {ratio:6.2f}")


def shortest_seconds(stage: Callable[[], object], runs: int = 7) -> float:
    """The shortest of several runs, after one to warm up: other programs only ever make a run longer."""
    stage()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        stage()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
