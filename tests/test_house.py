"""The house rules that no linter knows: the order of the rooms, the length of functions, wording."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "diloco"
ROOMS = [
    *(
        "version",
        "errors",
        "units",
        "files",
        "hub",
        "schema",
        "schedule",
        "presets",
        "auto",
        "fragments",
        "wire",
        "outer",
    ),
    *("exchange", "rendezvous", "engine", "publishing", "integrations", "models", "data", "evaluation"),
    *("paper_tables", "simulator", "scaling", "fleets", "training", "experiments", "report", "cli", "extend"),
]
"""A room imports only from rooms that stand before it."""
ENTRANCES = ("__init__.py", "__main__.py")
"""Files of the package itself, which may import from every room."""
WITHOUT_TORCH = ("presets", "auto", "schedule", "wire.formats", "paper_tables", "simulator", "scaling", "fleets")
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
RIDDLES = ("found", "it", "of", "said", "those", "told", "what")
"""Names that no variable has: they do not say what it holds."""
MAX_FUNCTION_LINES = 60
MAX_FILES = 12
"""Files of a folder, beside its `__init__`; cli/ has one per verb."""
FOREIGN_FLAGS = {
    "errors.py": {"--num-tokens"},
    "experiments/runner/machines.py": {"--head"},
    "fleets/kubernetes.py": {"--filename", "--ignore-not-found", "--output", "--patch", "--selector", "--wait"},
    "fleets/script.py": {
        *("--master-addr", "--master-port", "--nnodes", "--node-rank", "--nproc-per-node"),
        "--name",  # of the program, which is another machine's command line
    },
    "fleets/skypilot.py": {"--all", "--detach-run", "--env", "--name", "--output", "--yes"},
    "fleets/slurm.py": {
        *("--array", "--format", "--job-name", "--kill-on-bad-exit", "--me", "--name", "--no-requeue"),
        *("--nodes", "--noheader", "--ntasks-per-node", "--open-mode", "--output", "--parsable", "--requeue"),
        *("--signal", "--states"),
    },
    "rendezvous/store.py": {"--master-addr"},
}
"""Flags that a library file may spell: in a doctest of `UserError.spelled`, and those of other programs."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def all_files() -> list[Path]:
    """The Python files of the package, the tests, the benchmarks, the examples and the documentation."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's tree, which takes longer to walk than to look through."""
    return [*ast.walk(ast.parse(path.read_text()))]


def room(module: str) -> str:
    """The room of a module, such as `wire` of `diloco.wire.blocks`."""
    return module.split(".")[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, *, for_types: bool) -> Iterator[tuple[int, str]]:
    """Line and name of each module of the package that a file imports, inside functions too."""
    only_types = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if id(node) in only_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path)}:{node.lineno}: the package imports by full names"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else str(node.module) for name in whole]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith("diloco."))


@cache
def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_every_room_is_in_the_list():
    present = {room(module_name(path)) for path in sources() if place(path) not in ENTRANCES}
    assert present <= set(ROOMS)
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("## The rooms")
    cells = re.findall(r"^\| (`.*?) \|", rest.partition("| question |")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)(?:/|\.py)`", " ".join(cells)) == ROOMS, "the table for contributors, in this order"


def test_a_room_imports_only_from_rooms_above_it():
    wrong = [
        f"{place(path)}:{line} imports {imported}"
        for path in sources()
        if place(path) not in ENTRANCES
        for line, imported in imported_modules(path, for_types=True)
        if ROOMS.index(room(imported)) > ROOMS.index(room(module_name(path)))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        module_name(path): {name for _, name in imported_modules(path, for_types=False)} for path in sources()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))


def test_no_module_hides_behind_a_string_or_the_front_door():
    """`import_module("diloco.…")`, and `import diloco` in a room, would hide a circle, or an arrow upward."""
    wrong = []
    for path in sources():
        if place(path) in ENTRANCES:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Import) and any(alias.name == "diloco" for alias in node.names):
                wrong.append(f"{place(path)}:{node.lineno} imports the package itself")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                wrong += [f"{place(path)}:{node.lineno} imports {n}" for n in names if n.startswith("diloco")]
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_too_large():
    folders = {path.parent for path in sources()} - {PACKAGE / "cli"}
    sizes = {folder: len([*folder.glob("*.py")]) - (folder / "__init__.py").exists() for folder in folders}
    wrong = [f"{folder.relative_to(ROOT)} has {size} files" for folder, size in sizes.items() if size > MAX_FILES]
    assert not wrong, "\n".join(wrong)


def test_no_function_is_too_long():
    wrong = []
    for path in all_files():
        name = path.relative_to(ROOT).as_posix()
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields too."""
    for node in nodes(path):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def test_docstrings_begin_with_their_noun_or_verb():
    words = "Of|What|Whatever|Who|Whom|Whose|When|Where|How|Why|Which|Those|That|It|Its|They"
    riddle = re.compile(rf"({words})\b|Whether\b[^.;]* or ")
    wrong = [
        f"{path.relative_to(ROOT).as_posix()}:{line} {text.splitlines()[0]}"
        for path in all_files()
        for line, text in docstrings(path)
        if riddle.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_variables_are_named_for_what_they_hold():
    wrong = []
    for path in all_files():
        for node in nodes(path):
            match node:
                case (
                    ast.arg(arg=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                ):
                    if name.strip("_") in RIDDLES:
                        wrong.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_spells_flags():
    # Not custom properties of CSS: `--ink: black`, `var(--ink)`.
    flag = re.compile(r"(?<![\w(-])--[a-z][a-z.-]+(?![\w.-]*\s*:\s)")
    wrong = [
        f"{place(path)}:{node.lineno} {match[0]}"
        for path in sources()
        if room(module_name(path) + ".") != "cli"
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in flag.finditer(node.value)
        if match[0] not in FOREIGN_FLAGS.get(place(path), ())
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_text_name_their_encoding():
    """A locale's own is ASCII in some containers."""
    wrong = []
    for path in sources():
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Attribute(attr="read_text" | "write_text"), keywords=keywords):
                    is_text = True
                case ast.Call(
                    func=ast.Attribute(attr="open"), args=[] | [ast.Constant()] as mode, keywords=keywords
                ):
                    is_text = not (mode and "b" in str(mode[0].value))
                case _:
                    continue
            if is_text and "encoding" not in [keyword.arg for keyword in keywords]:
                wrong.append(f"{place(path)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_everything_that_rich_shows_is_shown_on_the_screen():
    """A console of rich's own would have the terminal obey what strangers wrote."""
    calls = [f"{place(path)}:{node.lineno}" for path in sources() for node in nodes(path) if is_console(node)]
    assert not calls, f"take Screen: {calls}"


def is_console(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Console"


IMPORTED_ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        raise SystemExit(f"{name} imports torch")
"""


def test_modules_that_plan_and_simulate_import_no_torch():
    names = [module_name(path) for path in sources()]
    alone = []
    for room in WITHOUT_TORCH:
        inside = [name for name in names if f"{name}.".startswith(f"diloco.{room}.")]
        assert inside, f"there is no diloco.{room}"
        alone += inside
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_ALONE, *alone], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


MODULES_THAT_RUN_CODE = ("cloudpickle", "dill", "marshal", "pickle", "shelve")
CALLS_THAT_RUN_CODE = (
    *("all_gather_object", "broadcast_object_list", "gather_object"),
    *("recv_object_list", "scatter_object_list", "send_object_list"),
)


def test_ruff_refuses_what_runs_the_code_of_others():
    lines = [f"import {name}" for name in MODULES_THAT_RUN_CODE]
    lines += [f"from torch.distributed import {name}" for name in CALLS_THAT_RUN_CODE]
    lines += ["import torch.distributed as dist", *(f"dist.{name}()" for name in CALLS_THAT_RUN_CODE)]
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", str(PACKAGE / "some.py"), "-"],
        **{"input": "\n".join(lines) + "\n", "capture_output": True, "text": True, "cwd": ROOT, "timeout": 60},
    )
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "TID251" in line}
    allowed = [line for number, line in enumerate(lines, 1) if number not in refused]
    assert allowed == ["import torch.distributed as dist"], done.stdout + done.stderr


def test_torch_loads_nothing_but_weights():
    for path in all_files():
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                    given = [ast.unparse(keyword) for keyword in keywords]
                    assert "weights_only=True" in given, f"{path}, line {node.lineno}"


def test_every_tensor_names_its_dtype_and_device():
    """Else a script that sets torch's default dtype or device would change what is computed."""
    makers = "zeros|ones|empty|full|tensor|arange|linspace|rand|randn|randint|randperm|eye"
    maker = re.compile(rf"torch\.({makers})")
    wrong = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        for path in all_files()
        if path.is_relative_to(PACKAGE)
        for node in nodes(path)
        if isinstance(node, ast.Call) and maker.fullmatch(ast.unparse(node.func))
        if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, "\n".join(wrong)
