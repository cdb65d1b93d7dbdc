"""Passes over CPU memory in C, and memory in huge pages."""
