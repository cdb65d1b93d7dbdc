"""The parts of `elastic_peers.py`: a replica of each system, runs with a death and a join, and their figures."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for the store's server in tests/
