"""`python -m diloco`."""

from diloco.cli.main import main

if __name__ == "__main__":
    main()
