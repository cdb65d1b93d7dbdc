"""The decoder, its loss and its size ladder."""
