"""Draws streaming.svg: two replicas train, and fragments travel between them, at the steps of a real schedule.

python docs/pictures/streaming.py
"""

from pathlib import Path

from diloco import Schedule

STEPS, LEFT, WIDTH, HEIGHT = 72, 150, 920, 330
FULL = 24.0  # height of all parameters in FP32; a third of them in 4 bits is 1
COLOURS = ("#4269d0", "#efb118", "#3ca951")
INK, FAINT, PAPER = "#1f2328", "#8c959f", "#ffffff"
SCHEDULE = Schedule(sync_every=24, num_fragments=3, overlap_steps=5, first_sync="early")


def main() -> None:
    parts = [*replica("replica 0", 48), *replica("replica 1", 148), *exchanges(48, 148)]
    parts += [
        *link("Data-Parallel", 230, every_step()),
        *link("DiLoCo", 258, [(step, FULL, FAINT) for step in (24, 48, 72)]),
    ]
    parts += link("Streaming DiLoCo", 286, [(sync.step, FULL / 3 / 8, COLOURS[sync.fragment]) for sync in syncs()])
    parts.append(
        text(
            LEFT,
            24,
            "a tick is an inner step; fragments 0, 1, 2 travel while training goes on, and are merged at the dots",
            FAINT,
        )
    )
    parts.append(text(LEFT, 214, "bytes on the link, to scale", FAINT))
    parts.append(text(LEFT, 318, "time →", FAINT))
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
    Path(__file__).with_suffix(".svg").write_text(picture)


def syncs() -> list:
    """The syncs that are both sent and merged within the picture."""
    return [sync for step in range(1, STEPS + 1 - SCHEDULE.max_overlap) for sync in SCHEDULE.sent(step)]


def every_step() -> list[tuple[int, float, str]]:
    return [(step, FULL, FAINT) for step in range(1, STEPS + 1)]


def x(step: float) -> float:
    return LEFT + (WIDTH - LEFT - 20) * step / STEPS


def replica(name: str, y: int) -> list[str]:
    """A line of inner steps, never interrupted."""
    ticks = [f'<path d="M{x(step):.1f} {y - 5}v10" stroke="{INK}"/>' for step in range(STEPS + 1)]
    line = f'<path d="M{x(0):.1f} {y}H{x(STEPS):.1f}" stroke="{INK}" stroke-width="2"/>'
    return [text(20, y + 4, name, INK), line, *ticks]


def exchanges(top: int, bottom: int) -> list[str]:
    """Each fragment on its way, in both directions at once, over τ steps."""
    arrows = []
    for sync in syncs():
        start, end, colour = x(sync.step), x(sync.step + SCHEDULE.max_overlap), COLOURS[sync.fragment]
        for y0, y1 in ((top, bottom), (bottom, top)):
            near = 9 if y1 > y0 else -9
            arrows.append(
                f'<path d="M{start:.1f} {y0 + near}L{end:.1f} {y1 - near}" stroke="{colour}" stroke-width="3" '
                'stroke-linecap="round" opacity="0.85"/>'
            )
            arrows.append(f'<circle cx="{end:.1f}" cy="{y1}" r="5" fill="{colour}"/>')
        arrows.append(text(end - 4, (top + bottom) / 2 + 4, str(sync.fragment), colour))
    return arrows


def link(name: str, y: int, sends: list[tuple[int, float, str]]) -> list[str]:
    """The bytes of a method on the link: a bar a send, as high as its share of the parameters' bits."""
    bars = [
        f'<rect x="{x(step) - 4:.1f}" y="{y + 20 - height}" width="8" height="{height}" fill="{colour}"/>'
        for step, height, colour in sends
    ]
    return [text(20, y + 17, name, INK), *bars]


def text(left: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{left:.1f}" y="{y:.1f}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    main()
