"""The parts of elastic_join.py and elastic_rounds.py."""
