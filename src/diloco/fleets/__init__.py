"""Fleets: machines and settings for a budget or a deadline."""
