"""The `diloco` command, one file a verb."""
