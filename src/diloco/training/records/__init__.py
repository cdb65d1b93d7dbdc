"""The directory of a run: what it leaves on disk, and what reads it."""
