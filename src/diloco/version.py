"""The version of the package, here alone."""

__version__ = "1.0.0"
