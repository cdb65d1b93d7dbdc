"""Measurements of the wire, the link and the training step on this machine."""
