"""The config of a run: what is asked for, what follows from it, and what it will need."""
