"""Weights that anybody may follow: versions in a store, whole or as lossless differences."""
