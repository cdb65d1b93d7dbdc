"""`diloco bridge`: make a run of replicas that come and go one replica of an outer run."""

from typing import TYPE_CHECKING

from diloco.cli._command import asks_for_help, flags_in_errors, parsed
from diloco.errors import UserError

if TYPE_CHECKING:
    from diloco.outer.step import OuterStep

HELP = "join a region's run to an outer run of several regions: diloco bridge REGION OUTER"
ORDER = 13


def run(arguments: list[str]) -> None:
    """Be the bridge that a command line names."""
    from diloco.training.bridge import BridgeConfig, asked, run_bridge

    with flags_in_errors(BridgeConfig):
        default = None if asks_for_help(arguments) else asked(*_stores(arguments))
        config = parsed(BridgeConfig, arguments, prog="diloco bridge", default=default)
        run_bridge(config, on_step=_print)


def _stores(arguments: list[str]) -> list[str]:
    stores = [word for word in arguments[:2] if not word.startswith("-")]
    if len(stores) < 2:
        raise UserError("diloco bridge needs two stores, first the region's and then the outer run's")
    return stores


def _print(outer_step: "OuterStep", names: tuple[str, ...]) -> None:
    sync = outer_step.sync
    print(f"outer step {sync.round} of fragment {sync.fragment}: {', '.join(names)}", flush=True)
