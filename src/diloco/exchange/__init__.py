"""Transports: how the bytes of one fragment reach the other replicas."""
