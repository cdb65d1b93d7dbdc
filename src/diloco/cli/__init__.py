"""The `diloco` command: a module a verb, with HELP, ORDER and run(arguments); others begin with an underscore."""
