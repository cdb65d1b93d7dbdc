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
NEED_AN_EXTRA = ("integrations/", "evaluation/zero_shot.py")
"""Files that import the library of an extra at once: they are imported only where somebody has asked for it."""
NOT_FOR_USERS = ("dev", "docs", "peers", "release")
WITH_TORCH = {"triton"}
"""Libraries that come with a PyTorch for GPUs, and are asked for nowhere else."""


def names(requirements: Iterable[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;]", text)[0]).lower() for text in requirements}


def libraries(path: Path) -> Iterator[tuple[str, bool]]:
    """The libraries that a file imports, in functions too, and whether it does so when it is itself imported."""
    module = ast.parse(path.read_text())
    branches = (node for node in ast.walk(module) if isinstance(node, ast.If))
    for_types = [node for node in branches if ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(module) if id(node) not in skipped):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "import_module"):
            imported = [str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)]
        else:
            continue
        roots = {name.partition(".")[0] for name in imported}
        yield from ((root, node in module.body) for root in roots - {"diloco", *sys.stdlib_module_names})


def test_each_library_is_a_dependency_or_comes_with_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always, distributions = names(project["dependencies"]), packages_distributions()
    extras = {name: extra for name, extra in project["optional-dependencies"].items() if name not in NOT_FOR_USERS}
    sometimes = always.union(*map(names, extras.values()))
    wrong = []
    for path in sorted((ROOT / "src" / "diloco").rglob("*.py")):
        place = path.relative_to(ROOT / "src" / "diloco").as_posix()
        for library, is_at_once in libraries(path):
            declared = always if is_at_once and not place.startswith(NEED_AN_EXTRA) else sometimes
            if not names(distributions.get(library, [library])) & (declared | WITH_TORCH):
                wrong.append(f"{place} imports {library}")
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


def test_a_fixed_group_loads_no_store_nor_keys():
    code = "import sys, torch, diloco; diloco.StreamingDiLoCo; diloco.connect; diloco.codec('e3m0'); "
    code += "names = {'cryptography', 'obstore', 'tyro', 'rich', 'triton', 'diloco.exchange.encrypted'}; "
    code += "print(names & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.stderr) == ("set()\n", "")
