"""Adapters for other libraries, which are imported when an adapter is made."""
