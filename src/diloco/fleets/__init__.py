"""Fleets of machines: chosen for a budget or a deadline, and launched on the engines that people have."""
