"""Reductions: from the replicas' payloads to one average; chosen by name."""

from diloco.errors import UserError
from diloco.reduction.gather import Gather
from diloco.reduction.reduce_scatter import ReduceScatter
from diloco.reduction.reduction import Reduction
from diloco.wire import codec
from diloco.wire.payload import Codec


def reduction_of(spec: str, wire: Codec) -> Reduction:
    """The reduction of a name: `gather`, `reduce_scatter`, or `reduce_scatter:bf16` with a codec for the averages.

    Raises:
        UserError: if there is none, or it does not work with this codec.
    """
    name, _, second = spec.partition(":")
    if spec == "gather":
        return Gather(wire)
    if name == "reduce_scatter":
        return ReduceScatter(wire, codec(second) if second else wire)
    raise UserError(
        f"combine={spec!r} is neither gather nor reduce_scatter, "
        "nor reduce_scatter:CODEC, which sends the averages in another codec",
        "combine",
    )
