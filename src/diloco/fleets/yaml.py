"""YAML as people read it: a file for SkyPilot or Kubernetes."""

import json
from collections.abc import Mapping
from typing import Any


def yaml(value: Any, indent: str = "") -> str:
    """A value of JSON as YAML: texts of several lines as they are, all others as in JSON.

    >>> print(yaml({"a": [1, {"b": "x", "c": "1\\n2\\n"}]}))
    "a":
      - 1
      - "b": "x"
        "c": |
          1
          2
    <BLANKLINE>
    """
    if isinstance(value, Mapping) and value:
        return "".join(f"{indent}{json.dumps(name)}:{_nested(part, indent)}" for name, part in value.items())
    if isinstance(value, list | tuple) and value:
        return "".join(f"{indent}- {yaml(part, indent + '  ').removeprefix(indent + '  ')}" for part in value)
    return f"{indent}{json.dumps(value)}\n"


def _nested(part: Any, indent: str) -> str:
    """A value after its name and colon."""
    if isinstance(part, str) and part.count("\n") > 1 and part.endswith("\n"):
        return " |\n" + "".join(f"{indent}  {line}\n" for line in part.splitlines())
    is_block = isinstance(part, Mapping | list | tuple) and len(part) > 0
    return "\n" + yaml(part, indent + "  ") if is_block else " " + yaml(part)
