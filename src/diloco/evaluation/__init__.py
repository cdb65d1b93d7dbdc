"""Held-out loss: takes a model, knows no run."""
