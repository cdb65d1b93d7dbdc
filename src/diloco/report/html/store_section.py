"""The section of a run in a store: when replicas joined, died and left, and who was in each outer step."""

from typing import TYPE_CHECKING

from diloco.rendezvous.status import Timeline, binned, read_timeline
from diloco.report.figures.drawing import new_figure, viridis
from diloco.report.html.page import facts, figures, heading, paragraph, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LANES = 40
_MOST_POINTS = 400
_ENDS = {"died": ("x", "tab:red"), "replaced": ("d", "black"), "revoked": ("d", "tab:red"), "left": ("|", "black")}


def store_section(url: str) -> str:
    """The section of the run of a URL.

    Raises:
        UserError: if there is no run.
        FileError: if its log is damaged.
        StoreError: if the store can't be read.
    """
    timeline = read_timeline(url)
    parts = [
        heading(f"Run in {url}"),
        facts(_facts(timeline)),
        paragraph(
            "Time is counted in outer steps, since the log has no clock. A replica that became inactive without "
            "leaving counts as dead."
        ),
    ]
    if timeline.contributors:
        drawn = {
            "Replicas: a dot is an outer step that counted one; × died, ◆ replaced or revoked, | left": _lanes(
                timeline
            ),
            "Contributors of an outer step": _curve(timeline.contributors, "contributors"),
            "Tokens counted": _curve(timeline.tokens, "tokens"),
        }
        parts.append(figures(drawn))
    columns = ("replica", "name", "joined", "ended", "", "outer steps", "tokens", "inner steps")
    return "\n".join([*parts, table(columns, _rows(timeline))])


def _facts(timeline: Timeline) -> dict[str, str]:
    state = timeline.state
    mean = sum(timeline.contributors) / max(1, len(timeline.contributors))
    return {
        "entries": f"{state.number:,}",
        "outer steps": f"{state.num_outer:,}",
        "fragments": str(len(state.fragments)),
        "tokens": f"{state.tokens // len(state.fragments):,}",
        "joins": str(len(timeline.lives)),
        "active": str(timeline.count("active")),
        "left": str(timeline.count("left")),
        "deaths": str(timeline.count("died", "replaced")),
        "contributors, mean": f"{mean:.2f}",
        "finished": "yes" if state.finished else "no",
    }


def _rows(timeline: Timeline) -> list[list[str]]:
    num_fragments = len(timeline.state.fragments)
    return [
        [
            str(number),
            life.name,
            f"{life.joined:,}",
            f"{life.ended:,}",
            life.end,
            f"{len(life.counted):,}",
            f"{member.tokens // num_fragments:,}",
            f"{member.steps // num_fragments:,}",
        ]
        for number, (life, member) in enumerate(zip(timeline.lives, timeline.state.members, strict=True))
    ]


def _lanes(timeline: Timeline) -> "Figure":
    """A lane for each of the last replicas: a bar from join to end, and a dot for each outer step."""
    first = max(0, len(timeline.lives) - _MOST_LANES)
    lives = timeline.lives[first:]
    figure = new_figure(6.6, 1.2 + 0.22 * len(lives))
    axes = figure.subplots()
    axes.set(xlabel="outer steps of all fragments", ylabel="replica")
    for lane, life in enumerate(lives, first):
        axes.plot([life.joined, life.ended], [lane, lane], color="0.75", lw=5, solid_capstyle="butt")
        points = life.counted[:: max(1, len(life.counted) // _MOST_POINTS)]
        axes.plot(points, [lane] * len(points), ".", ms=3, color=viridis(0.1))
        if life.end in _ENDS:
            marker, colour = _ENDS[life.end]
            axes.plot([life.ended], [lane], marker, color=colour, ms=6, mew=1.6)
    axes.set_yticks(
        range(first, first + len(lives)), [f"{first + i} {life.name}"[:24] for i, life in enumerate(lives)]
    )
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(values: list[int], label: str) -> "Figure":
    figure = new_figure(4.4, 3.1)
    axes = figure.subplots()
    x, y = zip(*binned(values, _MOST_POINTS), strict=True)
    axes.plot(x, y, color=viridis(0.0), drawstyle="steps-pre")
    axes.set(xlabel="outer steps of all fragments", ylabel=label)
    axes.set_ylim(0)
    axes.grid(visible=True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
