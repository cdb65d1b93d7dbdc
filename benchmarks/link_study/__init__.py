"""The parts of `links.py`: its methods, its measurements, their predictions, table and figure."""
