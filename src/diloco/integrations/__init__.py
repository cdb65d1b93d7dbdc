"""Adapters for other libraries, one file each: a library is imported only when its file is."""
