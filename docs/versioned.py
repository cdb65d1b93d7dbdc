"""The pages of a version, to be hosted as they are: site/VERSION, site/latest, the list of versions.

    python docs/versioned.py VERSION [URL]

A version that is there is built anew, the others stay; latest is a copy of the newest. URL is where the site will
stand: other programs that show a link to a page need it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REDIRECT = '<!doctype html><title>diloco</title><meta http-equiv="refresh" content="0; url=latest/index.html">\n'


def main() -> None:
    version, url, site = sys.argv[1], "".join(sys.argv[2:3]).rstrip("/"), ROOT / "site"
    if not re.fullmatch(r"\d+(\.\w+)+", version):
        sys.exit(f"{version} is no version: write one such as 1.0")
    # A page that is read from a web server needs no copy of the search index for browsers without one.
    environment = os.environ | {"DOCS_OFFLINE": "false", "DOCS_VERSIONS": "mike"}
    environment |= {"DOCS_URL": f"{url}/{version}/"} if url else {}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site / version)]
    if code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        sys.exit(code)
    versions = sorted((path.name for path in site.glob("[0-9]*")), key=in_order, reverse=True)
    listed = [{"version": one, "title": one, "aliases": ["latest"] * (one == versions[0])} for one in versions]
    shutil.rmtree(site / "latest", ignore_errors=True)
    shutil.copytree(site / versions[0], site / "latest")
    (site / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (site / "index.html").write_text(REDIRECT)
    print(f"{site}: {', '.join(versions)}; latest is {versions[0]}")


def in_order(version: str) -> list[tuple[bool, int, str]]:
    """The parts of a version, which put 1.10 behind 1.9, and 1.0 behind 1.0.rc1.

    >>> sorted(["1.10", "1.9", "1.0.rc1", "1.0"], key=in_order)
    ['1.0.rc1', '1.0', '1.9', '1.10']
    """
    parts = [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in version.split(".")]
    return [*parts, (True, -1, "")]


if __name__ == "__main__":
    main()
