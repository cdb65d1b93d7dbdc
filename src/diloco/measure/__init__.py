"""Measurements of the wire formats, the links and the training step on this machine."""
