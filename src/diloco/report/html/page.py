"""A self-contained HTML page: it loads nothing from a network, and is legible on a phone and in print."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.files import make_directory, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 72rem; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; border-top: 1px solid #ccc; padding-top: 1rem;
  overflow-wrap: anywhere; }
p, dd { max-width: 46rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 10.5rem), 1fr)); gap: .75rem 1rem;
  margin: 1rem 0; }
dt { font-size: .8rem; color: #555; }
dd { margin: 0; font-size: .95rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; break-inside: avoid; }
figure img { width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #444; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
@media print { body { max-width: none; font-size: 10pt; padding: 0; } h2 { break-after: avoid; }
  .table { overflow: visible; } table { font-size: 7pt; } th, td { padding: .1rem .3rem; white-space: normal; } }
"""


def write_page(title: str, sections: Iterable[str], path: Path) -> None:
    """Write a page of sections, each a piece of HTML."""
    text = document(title, "\n".join(sections))
    make_directory(path.parent)
    write_atomically(path, [text.encode()])


def document(title: str, body: str, *, style: str = STYLE, head: str = "") -> str:
    """A whole document.

    Args:
        title: text.
        body: HTML below the title.
        style: CSS.
        head: HTML for the head.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """The heading of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>"


def facts(values: Mapping[str, str]) -> str:
    """A list of names with their values; `data-fact` lets a program find a value by its name."""
    items = (
        f'<div><dt>{html.escape(name)}</dt><dd data-fact="{html.escape(name)}">'
        f"{html.escape(value).replace('_', '_<wbr>')}</dd></div>"
        for name, value in values.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def figures(drawn: Mapping[str, "Figure"]) -> str:
    """Figures with their captions, as many side by side as fit."""
    return f'<div class="figures">{"".join(_figure(caption, one) for caption, one in drawn.items())}</div>'


def _figure(caption: str, drawn: "Figure") -> str:
    import matplotlib as mpl

    svg = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "diloco", "svg.fonttype": "path"}):
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    source = base64.b64encode(svg.getvalue()).decode()
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/svg+xml;base64,{source}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; one that is wider than the page scrolls by itself."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
