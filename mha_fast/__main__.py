"""``python -m mha_fast`` is the command ``mha-fast``."""

import sys

from .show.command_line import main

if __name__ == "__main__":
    sys.exit(main())
