"""The public names and their arguments: none is taken away, or changed, without a deprecation.

    python tests/compatibility/test_public_api.py > tests/compatibility/public_api.txt

writes the list anew.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import diloco
import diloco.extend

SOURCE = Path(diloco.__file__).parent
LIST = Path(__file__).with_name("public_api.txt")


def exported() -> Iterator[str]:
    """The exports of `diloco`, `diloco.extend` and each integration, with arguments, and the verbs."""
    for module in (diloco, diloco.extend):
        for name in module.__all__:
            yield from lines(f"{module.__name__}.{name}", getattr(module, name))
    for path in (SOURCE / "integrations").glob("[a-z]*.py"):  # whose frameworks take long to import
        yield from read_lines(f"diloco.integrations.{path.stem}", ast.parse(path.read_text(encoding="utf-8")))
    yield from (f"diloco {path.stem}" for path in (SOURCE / "cli").glob("[a-z]*.py") if path.stem != "main")


def lines(name: str, value: object) -> Iterator[str]:
    """A function, or a class with its public methods, those of other libraries' classes apart."""
    if not inspect.isclass(value):
        yield name + (arguments(value) if inspect.isfunction(value) else "")
        return
    own = [vars(base) for base in reversed(value.__mro__) if base.__module__.startswith("diloco.")]
    members = {member: each for base in own for member, each in base.items()}
    has_arguments = "__init__" in members and not getattr(value, "_is_protocol", False)
    yield name + (arguments(value) if has_arguments else "")
    for member, each in members.items():
        function = each.__func__ if isinstance(each, classmethod | staticmethod) else each
        if not member.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{member}{arguments(function)}"


def arguments(function: object) -> str:
    """The arguments by name, kind and default; annotations are written otherwise by each version of Python."""
    empty, parameters = inspect.Parameter.empty, list[inspect.Parameter]()
    for each in inspect.signature(function).parameters.values():
        default = ... if inspect.isfunction(each.default) else each.default
        parameters.append(each.replace(annotation=empty, default=default))
    return str(inspect.Signature(parameters))


def read_lines(prefix: str, tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The same of what a tree defines, and of the fields of its classes."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield f"{prefix}.{name}"
                yield from read_lines(f"{prefix}.{name}", node)
            case ast.FunctionDef(name=name, args=args) if not name.startswith("_") or name == "__init__":
                for each in ast.walk(args):
                    if isinstance(each, ast.arg):
                        each.annotation = None
                yield f"{prefix}.{name}({ast.unparse(args)})"
            case ast.AnnAssign(target=ast.Name(id=name), value=default) if isinstance(tree, ast.ClassDef):
                yield f"{prefix}.{name}" + (f"={ast.unparse(default)}" if default else "")


def test_the_public_names_and_arguments_are_those_that_are_listed():
    listed, names = LIST.read_text(encoding="utf-8").splitlines(), sorted(exported())
    gone, new = sorted({*listed} - {*names}), sorted({*names} - {*listed})
    assert names == listed, (
        f"{gone} are gone: keep them for a minor version with a warning (docs/reference/versions.md); {new} are "
        "new: write the list anew"
    )


if __name__ == "__main__":
    print(*sorted(exported()), sep="\n")  # noqa: T201
