"""``python -m insum``: the command line."""

from insum.cli import main

if __name__ == "__main__":
    main()
