"""The licences of everything that a user installs, by the metadata of what is installed here."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = {"dev", "docs", "peers", "release"}
PERMISSIVE = re.compile(
    r"apache|bsd|mit|expat|isc|zlib|cc0|psf|python software foundation|unlicense|hpnd|0bsd|public domain|cnri",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"gpl|gnu|mpl|mozilla|eupl|cddl|epl\b|eclipse|osl|cc-by-sa|sspl|busl", re.IGNORECASE)
EXCEPTIONS = {
    "certifi": "MPL-2.0, of its list of certificates; through requests, of several extras",
    "tqdm": "MPL-2.0 of some files, MIT of the others; through huggingface-hub",
    "chardet": "LGPL-2.1, a library that is only called; through lm-eval, of the extra eval alone",
}
"""Libraries with a copyleft that ends at their own files, and what leads to them."""


def licence(installed: Distribution) -> str:
    """The licence in the words of the metadata."""
    metadata = installed.metadata
    named = metadata.get_all("License-Expression") or [
        line.rpartition(":: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    return " and ".join(named) or (metadata.get("License") or "").partition("\n")[0]


def tree(requirements: list[str], seen: set[str]) -> Iterator[Distribution]:
    """The distributions that requirements lead to, each once; those for other machines are not installed."""
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        if name == "diloco":
            yield from tree(
                [one for extra in requirement.extras for one in PROJECT["optional-dependencies"][extra]], seen
            )
        elif name not in seen:
            seen.add(name)
            try:
                installed = distribution(name)
            except PackageNotFoundError:
                continue
            yield installed
            wanted = [Requirement(one) for one in installed.requires or []]
            own = (str(one) for one in wanted if one.marker is None or _is_asked(one, requirement.extras))
            yield from tree([one.partition(";")[0] for one in own], seen)


def _is_asked(requirement: Requirement, extras: set[str]) -> bool:
    assert requirement.marker is not None, "it was looked at"
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})


def test_no_licence_is_unknown_or_copyleft():
    of_users = [
        one
        for name, extra in PROJECT["optional-dependencies"].items()
        if name not in NOT_FOR_USERS
        for one in extra
    ]
    installed = list(tree([*PROJECT["dependencies"], *of_users], set()))
    assert {"torch", "numpy", "transformers", "sympy"} <= {canonicalize_name(one.name) for one in installed}
    wrong = [
        f"{one.name} {one.version}: {text[:100] or 'unknown'}"
        for one, text in ((one, licence(one)) for one in installed)
        if (COPYLEFT.search(text) or not PERMISSIVE.search(text)) and canonicalize_name(one.name) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)
