"""The papers' experiments: each module is a group of them, and registers its own."""
