"""The compute time of a step, from floating-point operations, chips, and how well the chips are used."""

import math

from diloco.errors import UserError


def step_seconds(
    *, num_params: float, batch_tokens: float, num_chips: float, flops_per_chip: float, mfu: float = 1.0
) -> float:
    """6·N·B/(R·Q·MFU) seconds: the rule of Kaplan et al. (arXiv 2001.08361), forward and backward pass.

    Args:
        num_params: N, the parameters that a token activates; all of them but in a mixture of experts.
        batch_tokens: B, tokens of a step on these chips.
        num_chips: R.
        flops_per_chip: Q, floating-point operations that a chip can do in a second.
        mfu: the part of Q that training reaches, above 0 and at most 1.

    Raises:
        UserError: if a number is out of range.

    >>> round(step_seconds(num_params=1e9, batch_tokens=2**17, num_chips=64, flops_per_chip=197e12, mfu=0.6), 3)
    0.104
    """
    numbers = {"num_params": num_params, "batch_tokens": batch_tokens, "num_chips": num_chips}
    for name, value in (numbers | {"flops_per_chip": flops_per_chip}).items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, not {value}", name)
    if not 0 < mfu <= 1:
        raise UserError(f"mfu must be above 0 and at most 1, not {mfu}", "mfu")
    return 6 * num_params * batch_tokens / (num_chips * flops_per_chip * mfu)
