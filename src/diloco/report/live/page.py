"""The live page: one document without anything from elsewhere, whose script asks for the state and draws it."""

import base64
import hashlib
from pathlib import Path

from diloco.report.html.page import STYLE, document

_STYLE = """
figure h3 { font-size: .95rem; line-height: 1.3; margin: 0 0 .25rem; }
figure svg { display: block; max-width: 100%; }
figure text { font: 12px system-ui, sans-serif; fill: #444; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin-left: 52px; overflow-wrap: anywhere; }
figcaption svg { display: inline; vertical-align: middle; }
main { display: flex; flex-direction: column; gap: 1.5rem; }
main > * { min-width: 0; }
#charts { margin-top: 1rem; }
#cards.several { order: 1; }
select { font: inherit; }
#cards.several { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
#cards.several section { border: 1px solid #ccc; border-radius: 6px; padding: .75rem 1rem; min-width: 0; }
#cards h2 { border: 0; padding: 0; margin: 0; font-size: 1.1rem; }
#cards h2 svg { margin-right: .3rem; vertical-align: -1px; }
#cards p { margin: .1rem 0; color: #555; }
#cards dl { margin: .5rem 0; gap: .4rem 1rem; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }
.wide { grid-column: 1 / -1; }
.wide dd { font-weight: normal; }
progress { width: 100%; accent-color: #1d4ed8; }
#note:empty { display: none; }
"""
_SCRIPT = Path(__file__).with_name("page.js").read_text()
_BODY = f"""<p id="note">Reading …</p>
<main>
<div id="cards"></div>
<div id="curves">
<label>Show <select id="shown"><option value="1">all of the run</option><option value="0.5">the last half</option>
<option value="0.1">the last tenth</option></select></label>
<div id="charts" class="figures"></div>
</div>
</main>
<script>{_SCRIPT}</script>"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def live_page(title: str) -> bytes:
    """The document."""
    icon = '<link rel="icon" href="data:,">'  # a browser would ask for one
    return document(title, _BODY, style=STYLE + _STYLE, head=icon).encode()


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash(_SCRIPT)}",
        f"style-src {_hash(STYLE + _STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
"""The Content-Security-Policy: this script and this style alone run, and they reach this server alone."""
