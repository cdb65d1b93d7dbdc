"""The trainer: config, recipes, the loop, checkpoints, metrics and the launcher."""
