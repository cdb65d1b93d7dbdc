"""The page of runs: its content as records, which are its JSON, and the document whose script draws them.

The server of `diloco watch` answers with the document, whose script asks for the JSON again and again. `diloco
report` writes the same document with the JSON in it. The document loads nothing from elsewhere, and every text of
a run is escaped.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.files import make_directory, reading, write_atomically

if TYPE_CHECKING:
    from diloco.training.records.samples import Sample

Points = Sequence[tuple[float, ...]]
BLACK = -1


@dataclass(kw_only=True)
class Series:
    """A curve."""

    label: str
    """The curve's name; empty for one that the legend leaves out."""
    color: int
    """Number of the colour; `BLACK` is black."""
    points: Points
    """x and y, or x, y and the ends of a range around it; without those that are beyond a number's range."""
    thin: bool = False
    value: str = ""
    """The number in the legend; empty is the last y."""

    def __post_init__(self) -> None:
        """Leave out the points that JSON can't say."""
        self.points = [point for point in self.points if all(map(math.isfinite, point))]


@dataclass(kw_only=True)
class Lane:
    """Bars and dots along the x axis."""

    label: str
    color: int
    bars: Sequence[tuple[float, float]]
    dots: Sequence[float] = ()
    end: str = ""
    """The way in which the last bar ended, where it is marked."""


@dataclass(kw_only=True)
class Chart:
    """Curves, or lanes, over one axis."""

    title: str
    x: str
    """The name of the x axis, with its unit."""
    y: str = ""
    """The name of the y axis, with its unit."""
    about: str = ""
    """A sentence that says what it shows, and how to read it."""
    legend: str = ""
    """The quantity that tells the series apart, where their names are its values."""
    series: Sequence[Series] = ()
    lanes: Sequence[Lane] = ()
    names: Sequence[str] = ()
    """Names of the values 0, 1, … of x; empty for an x of numbers."""
    from_zero: bool = False
    x_log: bool = False
    y_log: bool = False
    is_history: bool = True
    """True if x goes on with the run, so that the page can show the last part alone."""


@dataclass(kw_only=True)
class Table:
    """A table of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    colors: Sequence[int] = ()
    """Numbers of the rows' colours, where the rows have curves."""
    meanings: dict[str, str] = field(default_factory=dict)
    """The definitions of columns, by name."""


@dataclass(kw_only=True)
class Section:
    """A run, a store, an experiment, or a comparison of runs."""

    title: str
    color: int = BLACK
    """Number of the colour of its curves beside others."""
    standing: str = ""
    eta: str = ""
    """Time to the end, as far as it is known."""
    part: float | None = None
    """The share of the run that is over."""
    headline: str = ""
    """A sentence that says the result, or how far the run is."""
    notes: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    main: Sequence[str] = ()
    """The names of the facts that are shown large, before everything else."""
    setup: dict[str, str] = field(default_factory=dict)
    """The command, the machine, the date, the model and the data of the run, by name."""
    samples: "Sequence[Sample]" = ()
    charts: Sequence[Chart] = ()
    table: Table | None = None
    is_open: bool = True
    """True if the section is unfolded at first."""


@dataclass(kw_only=True)
class Page:
    """The content of a page."""

    note: str
    sections: Sequence[Section]
    date: str = ""
    """The moment that it shows, where it is frozen."""

    def as_json(self) -> bytes:
        """The content as JSON, which may stand in a script element: it has no `<`."""
        text = json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)
        return text.replace("<", r"\u003c").encode()


def write_page(title: str, page: Page, path: Path) -> None:
    """Write a document that needs neither a server nor a network; it replaces an earlier one.

    Raises:
        UserError: if another file has its name.
        FileWriteError: if it can't be written.
    """
    if path.is_file():
        with reading(path, "output"), path.open("rb") as file:
            head = file.read(len(_BEGINNING)).decode(errors="replace")
        if head and head.lower() != _BEGINNING:  # an empty file loses nothing
            raise UserError(f"{path} is no HTML page, and is not replaced: choose another output", "output")
    make_directory(path.parent)
    write_atomically(path, [document(title, page)])


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part at the top of the page that has a script of its own."""

    body: str
    """Markup, which holds nothing of a run."""
    style: str
    script: str


def document(title: str, page: Page | None, *, panel: Panel | None = None) -> bytes:
    """The document.

    Args:
        title: text.
        page: its content; without it, the script asks the server for it.
        panel: at its top.
    """
    policy = content = ""
    styles = "".join(f"<style>{style}</style>\n" for style in _styles(panel))
    scripts = "".join(f"<script>{script}</script>\n" for script in _scripts(panel))
    if page is not None:
        policy = f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(_policy(panel))}">\n'
        content = f'<script type="application/json" id="content">{page.as_json().decode()}</script>\n'
    title = html.escape(title)
    return (
        f'{_BEGINNING}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{policy}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # a browser would ask for one
        f"<title>{title}</title>\n{styles}</head>\n<body>\n<h1>{title}</h1>\n"
        f"{'' if panel is None else panel.body}{_BODY}\n{content}{scripts}</body>\n</html>\n"
    ).encode(errors="replace")  # a directory's name need not be UTF-8


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_BEGINNING = "<!doctype html>"
_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_BODY = """<p id="note">Reading …</p>
<main></main>
<footer><label>Charts show <select id="shown"><option value="1">all of the run</option>
<option value="0.5">its last half</option><option value="0.1">its last tenth</option></select></label>
<label><input type="checkbox" id="common" checked> the same axes for all runs</label></footer>"""


def _styles(panel: Panel | None) -> list[str]:
    return [_STYLE] if panel is None else [_STYLE, panel.style]


def _scripts(panel: Panel | None) -> list[str]:
    return [_SCRIPT] if panel is None else [_SCRIPT, panel.script]


def _policy(panel: Panel | None) -> list[str]:
    return [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, _scripts(panel)))}",
        f"style-src {' '.join(map(_hash, _styles(panel)))}",
        "img-src data:",
        *(f"{name} 'none'" for name in ("base-uri", "form-action")),
    ]


def served_policy(panel: Panel | None) -> str:
    """The Content-Security-Policy of a server: own scripts and styles alone run, and they reach this server alone.

    That of a file lets them reach nothing; it can't forbid that another page frames it.
    """
    return "; ".join([*_policy(panel), "connect-src 'self'", "frame-ancestors 'none'"])
