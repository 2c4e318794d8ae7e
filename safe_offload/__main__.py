"""`python -m safe_offload` is the `safe-offload` command."""

import sys

from safe_offload.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
