"""A config function of torchtitan's: its Llama 3 debug model, for one replica."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from diloco.integrations.torchtitan import DiLoCo, DiLoCoTrainer, with_diloco


def debugmodel() -> DiLoCoTrainer.Config:
    config = with_diloco(llama3_debugmodel(), DiLoCo(sync_every=10, overlap_steps=1, wire="e3m0"))
    config.debug.seed = 0
    config.training.steps = 40
    config.checkpoint.enable = True
    config.checkpoint.interval = 20
    config.validator.enable = True
    return config
