"""The `diloco` command: one module a verb, with HELP and run(arguments); the others begin with an underscore."""
