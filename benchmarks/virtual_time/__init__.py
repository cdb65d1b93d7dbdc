"""Replicas in one process and in virtual time."""
