"""The HTML page of `diloco report`."""
