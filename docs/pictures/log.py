"""Draws log.svg: replicas upload payloads, and the entries of one log say which of them count.

python docs/pictures/log.py
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, STEP, LOG = 980, 330, 86, 84, 168
INK, FAINT, PAPER, DEAD = "#1f2328", "#8c959f", "#ffffff", "#cf222e"
COLOURS = {"a": "#4269d0", "b": "#efb118", "c": "#3ca951"}
LANES = {"a": 52, "b": 96, "c": 258}
LIVES = {"a": (1, 10.0), "b": (2, 5.6), "c": (4, 10.0)}
"""The entry of each replica's join, and where its line ends."""


class Entry(NamedTuple):
    kind: str
    counted: Mapping[str, float] = MappingProxyType({})
    """The place of each counted payload's upload, in entries."""


ENTRIES = (
    Entry("create"),
    Entry("join a"),
    Entry("join b"),
    Entry("outer", {"a": 2.55, "b": 2.7}),
    Entry("join c"),
    Entry("outer", {"a": 4.5, "b": 4.65}),
    Entry("outer", {"a": 5.3, "c": 5.5}),
    Entry("snapshot"),
    Entry("outer", {"a": 7.4, "b": 5.4, "c": 7.6}),
    Entry("outer", {"a": 8.5, "c": 8.6}),
)


def main() -> None:
    parts = [
        text(
            20, 22, "each replica trains without pause, and uploads its outer gradients (dots) to the store", FAINT
        )
    ]
    parts += [part for name in LANES for part in lane(name)]
    parts += [part for number, entry in enumerate(ENTRIES) for part in arrows(number, entry)]
    parts += [part for number, entry in enumerate(ENTRIES) for part in box(number, entry)]
    parts.append(text(20, LOG + 5, "the log", INK))
    caption = "the first replica to create the next entry decides; Θ is what the entries make, in their order"
    parts.append(text(20, HEIGHT - 16, caption, FAINT))
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
    Path(__file__).with_suffix(".svg").write_text(picture)


def x(place: float) -> float:
    return LEFT + 36 + STEP * place


def lane(name: str) -> list[str]:
    """A replica's line, from its join to its end; b is killed, after an upload that still counts."""
    (joined, end), y, colour = LIVES[name], LANES[name], COLOURS[name]
    right = min(x(end), WIDTH - 16)
    parts = [
        text(20, y + 4, f"replica {name}", INK),
        f'<path d="M{x(joined):.1f} {y}H{right:.1f}" stroke="{colour}" stroke-width="3"/>',
    ]
    if end < len(ENTRIES):
        cross = f"M{right - 6:.1f} {y - 6}l12 12m0 -12l-12 12"
        parts += [f'<path d="{cross}" stroke="{DEAD}" stroke-width="3"/>', text(right + 12, y + 4, "killed", DEAD)]
    return parts


def arrows(number: int, entry: Entry) -> list[str]:
    """A line from each counted payload to the entry that counts it."""
    parts = []
    for name, place in entry.counted.items():
        y, colour = LANES[name], COLOURS[name]
        near = LOG - 17 if y < LOG else LOG + 17
        line = f"M{x(place):.1f} {y}L{x(number):.1f} {near}"
        parts.append(f'<path d="{line}" stroke="{colour}" stroke-width="2" opacity="0.8"/>')
        parts.append(f'<circle cx="{x(place):.1f}" cy="{y}" r="5" fill="{colour}"/>')
    return parts


def box(number: int, entry: Entry) -> list[str]:
    """An entry, chained to the one before it."""
    left = x(number) - 33
    words = f"{number} {entry.kind}"
    parts = [f'<rect x="{left:.1f}" y="{LOG - 17}" width="66" height="34" rx="4" fill="{PAPER}" stroke="{INK}"/>']
    if number:
        parts.append(f'<path d="M{left - 14:.1f} {LOG}h14" stroke="{INK}" stroke-width="2"/>')
    parts.append(
        f'<text x="{x(number):.1f}" y="{LOG - 2}" fill="{INK}" text-anchor="middle" font-size="11">{words}</text>'
    )
    who = " ".join(sorted(entry.counted))
    parts.append(
        f'<text x="{x(number):.1f}" y="{LOG + 12}" fill="{FAINT}" text-anchor="middle" font-size="11">{who}</text>'
    )
    return parts


def text(left: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{left:.1f}" y="{y:.1f}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    main()
