"""Frameworks' training loops: one file for each framework, which is imported only with that file."""
