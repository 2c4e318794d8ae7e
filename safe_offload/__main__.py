"""`safe-offload`, which is `python -m safe_offload`, too."""

import contextlib
import os
import sys
from typing import NoReturn

from safe_offload.commands.cli import main


def program() -> NoReturn:
    """Run the command, and end the process with its status.

    obstore's threads outlive its calls, and one that needs Python while Python is finalized aborts
    the process: where obstore is loaded, the process ends without that.
    """
    status = main()
    if "obstore" in sys.modules:
        with contextlib.suppress(OSError):  # nobody reads it any more
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    program()
