"""Publish a model's weights to a store as they are trained, and follow them from anywhere."""
