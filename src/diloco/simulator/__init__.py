"""How long a run takes, and how much of that time computes, before any machine is rented. NumPy, no torch."""
