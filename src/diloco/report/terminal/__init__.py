"""Progress and tables for a terminal."""
