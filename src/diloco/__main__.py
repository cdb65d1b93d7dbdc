"""The command `diloco`, and `python -m diloco`."""

import atexit
import gc
import signal


def main() -> None:
    """Run the command line; Ctrl-C before it is understood ends the process without a word."""
    atexit.register(gc.freeze)  # after torch, the collection at the end takes half a second and frees nothing
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:  # a shell has its scripts' background jobs ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from diloco.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
