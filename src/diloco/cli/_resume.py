"""The command that goes on with a run after a failure: on each machine its own."""

import os
import shlex
from collections.abc import Mapping

from diloco.training.config.config import TrainConfig


def resume_command(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The command line that resumes a run here; under torchrun that of this machine, with its number.

    Args:
        config: the run's.
        environment: the variables in which torchrun describes this machine and the others.
    """
    resume = ["diloco", "train", *filter(None, [config.recipe]), "--resume", str(config.directory)]
    if "TORCHELASTIC_RUN_ID" not in environment:
        return shlex.join(resume)
    flags = {flag: environment.get(variable, "") for flag, variable in _FLAGS.items()}
    words = [word for flag, value in flags.items() for word in (flag, value)]
    return shlex.join(["torchrun", *words, "-m", *resume])


_FLAGS = {
    "--nnodes": "GROUP_WORLD_SIZE",
    "--nproc-per-node": "LOCAL_WORLD_SIZE",
    "--node-rank": "GROUP_RANK",
    "--master-addr": "MASTER_ADDR",
    "--master-port": "MASTER_PORT",
}
"""torchrun's flags, and the variables that have their values in its processes."""
