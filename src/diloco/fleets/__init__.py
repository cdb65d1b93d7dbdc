"""Fleets of machines: launched on the engines that people have."""
