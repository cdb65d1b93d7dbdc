"""Held-out loss and zero-shot tasks: take a model, know no run."""
