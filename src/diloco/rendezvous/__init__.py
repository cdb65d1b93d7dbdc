"""Replicas that come and go: the log in a store, its state machine, and the thread that follows it."""
