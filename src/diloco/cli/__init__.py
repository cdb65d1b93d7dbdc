"""The `diloco` command: one module a verb, with HELP and run(arguments); other modules begin with an underscore."""
