"""``python -m gpurt`` is the command ``gpurt``."""

import sys

from gpurt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
