"""The outer rule `auto`: the learning rate and momentum by the length of a run, fitted to sweeps; no torch."""

import math

AUTO = "auto"
"""The name that stands for Nesterov's rule with these values."""
NO_AUTO_IN_A_STORE = (
    "{}=auto chooses by the number of replicas, which no replica knows where they come and go: give the rule "
    "itself, such as nesterov:lr=0.4,momentum=0.9"
)
"""The refusal, which names the setting."""
MOST_FITTED_REPLICAS = 4
"""The largest M of the sweeps."""
_MOST_GAIN, _MOST_MEMORY = 4.0, 4.5
_STEPS_PER_GAIN = 5.0
"""Inner steps that one above G = 1 needs between outer steps."""


def chosen(num_outer_steps: int, num_replicas: int, sync_every: int, mixing: float) -> tuple[float, float]:
    """η and μ of Nesterov's rule for R outer steps of each fragment, M replicas, H, and α (0 to below 1).

        G = 0.97 (min(R, 75)/30)^¼ (H/10)^¼ (M/2)^⅙;  n = 2.25 (R/30)^0.4, from 1 to 4.5
        g = min(4, G (1 − α) / (1 − α G));  η = g / n;  μ = 1 − 1/n

    Where a replica drifts by F between two outer steps, Θ moves by g Δ in sum, g = η / (1 − μ). A merge passes on
    1 − α of what Θ moved beyond F, so that α (g − 1) Δ is missing from the next outer gradient: if they go on as
    they are, Δ = F − α (g − 1) Δ, and Θ moves by G F with G = g / (1 + α (g − 1)). Momentum averages over n outer
    steps, which must be few beside R. In the sweeps the best G and n are the same for α = 0 and ½; the constants
    are fitted to R = 10 … 1,000, H = 5 … 100 and M = 1, 2, 4. There the rule ended 0.1 % above the best of a grid
    on average, 0.3 % at most in 40 of 41 cells, and 0.6 % in the last.

    >>> chosen(17, 2, 30, 0.0), chosen(17, 2, 30, 0.5)
    ((0.618, 0.442), (0.692, 0.442))
    """
    gain, memory = _best(num_outer_steps, num_replicas, sync_every)
    before_merges = _MOST_GAIN
    if mixing * gain < 1:
        before_merges = min(_MOST_GAIN, gain * (1 - mixing) / (1 - mixing * gain))
    return round(before_merges / memory, 3), round(1 - 1 / memory, 3)


def expected_excess(
    lr: float, momentum: float, num_outer_steps: int, num_replicas: int, sync_every: int, mixing: float
) -> float:
    """The part by which the loss is expected to lie above that of `chosen`: 0.025 ln²(G/G′) + 0.002 ln⁺(n/n′)².

    G and n are those of η and μ, n′ that of `chosen`, and G′ that of `chosen` times (n/n′)^0.2: the longer the
    memory, the larger the best gain; ln⁺ is 0 below 0. Where this was above 0.01 in the sweeps, the loss was 0.2
    to 4.7 % above, 2.1 % on average.

    >>> round(expected_excess(0.4, 0.9, 17, 2, 30, 0.0), 3), round(expected_excess(0.4, 0.9, 300, 2, 30, 0.5), 3)
    (0.028, 0.002)
    """
    best_gain, best_memory = _best(num_outer_steps, num_replicas, sync_every)
    memory = 1 / (1 - momentum)
    gain = _after_merges(lr * memory, mixing)
    longer = math.log(memory / best_memory)
    return 0.025 * (math.log(gain / best_gain) - 0.2 * longer) ** 2 + 0.002 * max(0.0, longer) ** 2


def warning_of_frequent(lr: float, momentum: float, sync_every: int, mixing: float) -> str | None:
    """A warning that outer steps follow each other too soon for their momentum; None if they don't.

    Successive outer gradients of a few inner steps point alike, since the inner optimizer has momentum, too: G, as
    in `chosen`, multiplies all that replicas learn, as a learning rate would. With η = 0.4, μ = 0.9 and M = 2 the
    loss at H = 1, 2, 5, 10 was 78, 51, 9 and 3 % above averaging's with α = 0, and at H = 2, 5, 10 6.3, 0.2 and
    −0.5 % with α = ½. The bound, H ≤ 5 (G − 1), lies between.

    >>> warning_of_frequent(0.4, 0.9, 4, 0.5), warning_of_frequent(1.0, 0.0, 1, 0.0)
    (None, None)
    """
    gain = _after_merges(lr / (1 - momentum), mixing)
    most = _STEPS_PER_GAIN * (gain - 1)
    if sync_every > most:
        return None
    return (
        f"outer steps every sync_every={sync_every} inner steps are too frequent for lr={lr:g} and "
        f"momentum={momentum:g}, which multiply what replicas learn by {gain:.3g}: in our runs the loss ended 3 "
        f"to 80 % higher; set outer=sgd:lr=1, outer=auto, or sync_every={int(most) + 1} or more"
    )


def _after_merges(gain: float, mixing: float) -> float:
    """G of g and α."""
    return gain / (1 + mixing * (gain - 1))


def _best(num_outer_steps: int, num_replicas: int, sync_every: int) -> tuple[float, float]:
    """G and n."""
    steps = max(1, num_outer_steps)
    gain = 0.97 * (min(steps, 75) / 30 * sync_every / 10) ** 0.25 * (num_replicas / 2) ** (1 / 6)
    gain = min(gain, 0.99 * (1 + sync_every / _STEPS_PER_GAIN))  # beyond the fit, up to where we would warn of it
    return gain, min(_MOST_MEMORY, max(1.0, 2.25 * (steps / 30) ** 0.4))
