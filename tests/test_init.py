"""The package: what importing it loads, its public names, and the libraries that it imports."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import diloco
import diloco.extend

ROOT = Path(__file__).parents[1]
COME_WITH = {
    "cli/": "train",
    "report/terminal/": "train",
    "report/figures/": "pictures",
    "models/hugging_face": "transformers",
    "evaluation/zero_shot.py": "eval",
    "fleets/ray.py": "ray",
    "integrations/": "*",
}
"""The extra that is asked for before a place is imported, or its functions called; an integration has its own."""
NOT_FOR_USERS = ("dev", "docs", "peers", "release")
WITH_TORCH = {"triton"}
"""Libraries that come with a PyTorch for GPUs, and are asked for nowhere else."""
NO_LIBRARIES = {"diloco", *sys.stdlib_module_names}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def names(requirements: Iterable[str]) -> set[str]:
    """The distributions of requirements, those of the extras among them included."""
    distributions = set()
    for text in requirements:
        if extras := re.fullmatch(r"diloco\[(.*)\]", text):
            distributions |= names(
                one for extra in extras[1].split(",") for one in PROJECT["optional-dependencies"][extra]
            )
        else:
            distributions.add(re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;]", text)[0]).lower())
    return distributions


def libraries(node: ast.AST, extra: str = "") -> Iterator[tuple[str, str]]:
    """The libraries that code imports, in functions too, and the extra that a refusal names if one is missing."""
    imported: list[str] = []
    match node:
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            return
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="requiring")) as call)]):
            extra = extra_of(call) or extra
        case ast.Call(args=[ast.Constant(value=str() as name), *_]) if is_import(node):
            imported, extra = [name], extra_of(node) or extra
        case ast.Import(names=aliases):
            imported = [alias.name for alias in aliases]
        case ast.ImportFrom(module=module):
            imported = [module or ""]
    roots = {name.partition(".")[0] for name in imported}
    yield from ((root, extra) for root in roots - NO_LIBRARIES)
    for child in ast.iter_child_nodes(node):
        yield from libraries(child, extra)


def is_import(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in ("require", "import_module")


def extra_of(call: ast.Call) -> str:
    """The extra that a call of `require` or `requiring` names; empty where it is computed."""
    values = (word.value for word in call.keywords if word.arg == "extra")
    return next((str(value.value) for value in values if isinstance(value, ast.Constant)), "")


@pytest.mark.slow
def test_each_library_is_a_dependency_or_comes_with_the_extra_that_a_refusal_names():
    distributions = packages_distributions()
    of_users = names(text for extra, some in EXTRAS.items() if extra not in NOT_FOR_USERS for text in some)
    wrong = []
    for path in sorted((ROOT / "src" / "diloco").rglob("*.py")):
        place = path.relative_to(ROOT / "src" / "diloco").as_posix()
        of_place = next((extra for start, extra in COME_WITH.items() if place.startswith(start)), "")
        for library, extra in libraries(ast.parse(path.read_text())):
            declared = names(PROJECT["dependencies"]) | WITH_TORCH
            for one in {extra, of_place} - {""}:
                declared |= of_users if one == "*" and not extra else names(EXTRAS.get(one, ()))
            if not names(distributions.get(library, [library])) & declared:
                wrong.append(f"{place} imports {library}, which {extra or 'no extra'} installs")
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_and_its_schedule_warns_of_nothing_and_loads_nothing_heavy():
    code = "import sys, diloco, diloco.schedule; print({'torch', 'numpy'} & set(sys.modules), diloco.__version__)"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (process.stdout, process.stderr) == (f"set() {diloco.__version__}\n", "")


@pytest.mark.parametrize(
    ("module", "some"),
    [
        (diloco, {"StreamingDiLoCo", "UserError", "codec", "__version__"}),
        (diloco.extend, {"OuterRule", "MergeRule", "Codec", "Transport", "Masters", "ModelConfig"}),
    ],
    ids=["diloco", "extend"],
)
def test_every_public_name_can_be_loaded(module, some):
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) == set(dir(module)) >= some
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


WITHOUT_EXTRAS = """
import sys
from importlib import metadata
version, absent = metadata.version, {libraries}
sys.modules.update(dict.fromkeys(absent))
def version_of(name):
    if name.replace("-", "_") in absent:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = version_of
import torch, diloco
from diloco.cli.main import main
from diloco.rendezvous.store import Store
diloco.StreamingDiLoCo, diloco.connect
diloco.codec("e3m0").encode(torch.ones(300))
print({{"diloco.exchange.encrypted", "triton"}} & set(sys.modules))
for act, words in (main, ["train", "tiny"]), (Store.open, "meeting"), (main, ["doctor"]):
    try:
        act(words)
    except (SystemExit, diloco.UserError) as end:
        print("end:", end)
"""


def test_the_core_works_without_extras_and_names_the_one_that_is_missing(tmp_path):
    absent = names(EXTRAS["all"]) - names(PROJECT["dependencies"])
    code = WITHOUT_EXTRAS.format(libraries={name.replace("-", "_") for name in absent})
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert process.stderr == "diloco: tyro is not installed: run pip install 'diloco[train]'\n"
    loaded, train, store, *doctor = process.stdout.splitlines()
    assert (loaded, train) == ("set()", "end: 2")
    assert store == "end: obstore is not installed: run pip install 'diloco[store]'"
    assert all(any(line.startswith(part) for line in doctor) for part in ("+ torch ", "- extras "))
