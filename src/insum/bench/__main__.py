"""``python -m insum.bench``."""

import sys

from insum.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
