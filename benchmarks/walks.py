"""The files whose functions run in a sync and in a run, the modules that are imported, and the sizes of the tree.

    python benchmarks/walks.py                # a table of numbers, in about a minute
    python benchmarks/walks.py --files        # the files of each walk as well

The walks, by `sys.setprofile` in every thread of two replicas:

- send: six steps of an engine in a fixed group of gloo, in which two fragments are sent and merged;
- store: the same through a directory, until both are merged;
- train: `diloco train tiny` to the end of its first `engine.step()`, launcher and replicas together.

A file counts if a function in it runs; what runs only because its module is imported counts as imported.
"""

import argparse
import ast
import atexit
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

_spec = find_spec("diloco")
assert _spec is not None and _spec.origin is not None, "diloco is installed"
PACKAGE = str(Path(_spec.origin).parent)
LOG, FIRST_STEP = "DILOCO_WALK_LOG", "DILOCO_WALK_FIRST_STEP"
"""Environment variables: the file to which traced processes add lines, and the file that ends the walk."""
ABSENT = ("cryptography", "obstore", "tyro", "rich")
"""Libraries that the engine alone does not need."""


class Tracer:
    """Tells which files of the package are imported, and in which of them functions run, in all threads.

    Args:
        see: called with "import" or "run" and the file, once each, and again in a forked process.
        last: the qualified name of the function whose first return ends the walk; it calls `end`.
        end: called then.
    """

    def __init__(
        self, see: Callable[[str, str], None], last: str = "", end: Callable[[], None] = lambda: None
    ) -> None:
        self.see, self.last, self.end, self.is_on = see, last, end, False
        self._seen: set[tuple[str, str]] = set()
        self._importing = threading.local()
        os.register_at_fork(after_in_child=self._seen.clear)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        atexit.register(sys.setprofile, None)  # then globals go away

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not self.is_on:
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        is_module = code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__"
        depth = getattr(self._importing, "depth", 0)
        if is_module:
            self._importing.depth = max(0, depth + (1 if event == "call" else -1))
        if event == "return":
            if code.co_qualname == self.last:
                self.is_on = False
                self.end()
            return
        if depth and not is_module:
            return  # a function or the body of a class that an import runs
        key = ("import" if is_module else "run", os.path.relpath(code.co_filename, PACKAGE))
        if key not in self._seen:
            self._seen.add(key)
            self.see(*key)


def trace_process() -> None:
    """Trace a process of a run from its start to the first step of any replica; sitecustomize.py calls this."""
    log, first_step = os.environ[LOG], Path(os.environ[FIRST_STEP])

    def see(kind: str, file: str) -> None:
        if first_step.exists():
            tracer.is_on = False
            return
        descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(descriptor, f"{json.dumps([kind, file])}\n".encode())  # whole, whatever other processes write
        os.close(descriptor)

    tracer = Tracer(see, "StreamingDiLoCo.step", first_step.touch)
    tracer.is_on = True


def replica(rank: int, folder: Path, through_store: bool) -> list[str]:
    """The files of the walk of one of two replicas, which this process is."""
    import torch
    import torch.distributed as dist

    import diloco

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = rendezvous = None
    files: set[str] = set()
    # After what imports for long, and before the engine starts threads.
    tracer = Tracer(lambda kind, file: files.add(file) if kind == "run" else None)
    if through_store:
        while rank and not any((folder / "run").glob("log/*")):
            time.sleep(0.01)  # the second replica joins the run of the first
        rendezvous = diloco.StoreRendezvous(
            str(folder / "run"), name=f"replica{rank}", num_replicas=2, quorum="all"
        )
    else:
        dist.init_process_group("gloo", init_method=(folder / "group").as_uri(), rank=rank, world_size=2)
        exchange = diloco.ProcessGroupExchange()
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=[diloco.Fragment((f"{layer}.weight", f"{layer}.bias")) for layer in (0, 1)],
        sync_every=2,
        overlap_steps=1,
        exchange=exchange,
        rendezvous=rendezvous,
    )
    data = torch.Generator().manual_seed(rank)
    diloco.codec("e3m0").encode(torch.ones(1))  # what is compiled once is no part of a send
    tracer.is_on = True
    merged = []
    for _ in range(6):
        model(torch.randn(4, 40, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        merged += engine.step(tokens=4)
    tracer.is_on = False
    assert {step.sync.fragment for step in merged} == {0, 1}, "both fragments were sent and merged"
    engine.finish()
    if rendezvous is not None:
        rendezvous.leave()
    return sorted(files)


def walk_of_replicas(walk: str) -> list[str]:
    """The files of a walk of two replicas together."""
    import_module("torch._dynamo")  # once for both: every optimizer imports it
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(2) as pool:
        walks = [(rank, Path(folder), walk == "store") for rank in (0, 1)]
        return sorted(set().union(*pool.starmap(replica, walks, 1)))


def walk_of_training() -> tuple[list[str], list[str]]:
    """The files that run in `diloco train tiny` to its first step, and those that are imported."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "startup").mkdir()
        call = f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['trace_process']()\n"
        (folder / "startup" / "sitecustomize.py").write_text(call)
        paths = [str(folder / "startup"), str(Path(PACKAGE).parent), os.environ.get("PYTHONPATH", "")]
        variables = {LOG: str(folder / "log"), FIRST_STEP: str(folder / "first step")}
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        text = folder / "text.txt"  # the default text is larger, and is read by the same files
        text.write_text(Path(__file__).read_text())
        data = ["--data.train", str(text), "--data.held-out-fraction", "0.1"]
        command = [sys.executable, "-m", "diloco", "train", "tiny", "--name", "walk", *data]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
        deadline = time.monotonic() + 300
        while not (is_over := (folder / "first step").exists()) and process.poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the rest of the training is no part of the walk
        output = process.communicate()[0]
        if not is_over:
            raise SystemExit(f"{' '.join(command)} failed: {output}")
        events = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    run, imported = (sorted({file for kind, file in events if kind == k}) for k in ("run", "import"))
    return run, imported


IMPORT = """
import json, sys, time, torch
start = time.perf_counter()
import diloco; diloco.StreamingDiLoCo
seconds = time.perf_counter() - start
print(json.dumps([seconds, list(sys.modules)]))
"""


def import_of_the_engine(repeats: int) -> tuple[float, int, list[str]]:
    """Least seconds after torch, modules of ours, and those of `ABSENT` that are imported."""
    results = []
    for _ in range(repeats):
        output = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        results.append(json.loads(output))
    modules = results[0][1]
    num_ours = sum(name.partition(".")[0] == "diloco" for name in modules)
    return min(seconds for seconds, _ in results), num_ours, [name for name in ABSENT if name in modules]


def declarations(nodes: Sequence[ast.AST], name: str) -> int:
    """The fields of classes, and the parameters with a default, that have a name."""
    fields = [
        statement
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if statement.target.id == name
    ]
    parameters = []
    for node in nodes:
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            parameters += positional[len(positional) - len(node.defaults) :]
            parameters += [a for a, default in zip(node.kwonlyargs, node.kw_defaults, strict=True) if default]
    return len(fields) + sum(parameter.arg == name for parameter in parameters)


def tree_rows(name: str) -> list[tuple[str, str]]:
    """Sizes of files, folders and functions, and how far a name is spread."""
    paths = sorted(Path(PACKAGE).rglob("*.py"))
    texts = [path.read_text() for path in paths]
    trees = [[*ast.walk(ast.parse(text))] for text in texts]
    lines = [len(text.splitlines()) for text in texts]
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in paths if path.name != "__init__.py")
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for tree in trees
        for node in tree
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    )
    holding = sum(name in text for text in texts)
    return [
        ("files, lines, median lines", f"{len(paths)}, {sum(lines):,}, {statistics.median(lines):g}"),
        ("fullest folders, without __init__.py", _listed(folders.most_common(6))),
        (
            "functions, median lines, p90",
            f"{len(functions)}, {_quantile(functions, 5)}, {_quantile(functions, 9)}",
        ),
        (f"files with {name}, declarations", f"{holding}, {sum(declarations(tree, name) for tree in trees)}"),
    ]


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{folder} {count}" for folder, count in counts)


def _quantile(values: Sequence[int], tenth: int) -> int:
    return values[len(values) * tenth // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="overlap_steps", help="the name whose files are counted")
    parser.add_argument("--repeats", type=int, default=5, help="imports of which the fastest counts")
    parser.add_argument("--files", action="store_true", help="list the files of each walk")
    options = parser.parse_args()
    send, store = walk_of_replicas("send"), walk_of_replicas("store")
    train, imported = walk_of_training()
    seconds, num_modules, present = import_of_the_engine(options.repeats)
    rows = [
        ("send and merge, two replicas of gloo: files that run", str(len(send))),
        ("the same through a store: files that run", str(len(store))),
        ("diloco train tiny to its first step: files that run, imported", f"{len(train)}, {len(imported)}"),
        *tree_rows(options.name),
        ("import of the engine: modules of ours", str(num_modules)),
        ("seconds after torch", f"{seconds:.3f}"),
        (f"of {', '.join(ABSENT)} imported", ", ".join(present) or "none"),
    ]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    if options.files:
        for label, files in (("send", send), ("store", store), ("train", train), ("imported", imported)):
            print(f"\n{label}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
