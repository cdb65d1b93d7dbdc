"""The flags with which `diloco watch` and `diloco chat` serve the live page."""

from typing import TYPE_CHECKING

from diloco.errors import UserError

if TYPE_CHECKING:
    from diloco.report.chat import Chat
    from diloco.report.sources import Sources


def check_serving(serve: bool, *, port: int, address: str) -> None:
    """Refuse a place to serve at without `serve`."""
    for name, value in {"port": port, "address": address}.items():
        if value and not serve:
            raise UserError(
                f"{name}={value} means nothing without serve: add that, or leave it out", name, "serve"
            )


def serve_page(sources: "Sources", title: str, *, port: int, address: str, chat: "Chat | None" = None) -> None:
    """Serve the live page until Ctrl-C, and print its address."""
    from diloco.report.server import ADDRESS, LiveServer

    server = LiveServer(sources, title=title, port=port, address=address or ADDRESS, chat=chat)
    print(f"{server.url} (Ctrl-C ends it)", flush=True)
    if server.is_open:
        print(
            "Anybody with this URL can read the page, and nothing is encrypted: use it in your own network.",
            flush=True,
        )
    try:
        server.serve()
    finally:
        server.close()
