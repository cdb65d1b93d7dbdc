"""The parts of fault_storm.py."""
