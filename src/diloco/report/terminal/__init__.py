"""Tables and progress in a terminal, and the same numbers as JSON."""
