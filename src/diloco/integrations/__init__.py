"""Adapters for frameworks and other libraries: one file each, which alone imports what it adapts."""
