"""The console of everything that is shown by rich."""

from collections.abc import Iterator
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from diloco.errors import printable


class Screen(Console):
    """A console that adds its own colors and cursor movements, and shows those in a text as U+FFFD."""

    @property
    def file(self) -> IO[str]:
        """The stream of the terminal, behind those that stand in `sys.stdout` for others."""
        file = super().file
        while (behind := getattr(file, "rich_proxied_file", None)) is not None:
            file = behind
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The parts of what is shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
