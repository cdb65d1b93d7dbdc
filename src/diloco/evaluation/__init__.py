"""Held-out loss and zero-shot tasks of a model."""
