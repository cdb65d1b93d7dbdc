"""The log of a run: its entries, their signatures, and the state machine that they make."""
