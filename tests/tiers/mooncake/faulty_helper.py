"""The process of a Mooncake client whose reads go wrong, as FAULT in the environment says."""

import ctypes
import os
import threading

from safe_offload.tiers.mooncake.helper import Helper, main

FAILED_TRANSFER = -800


class FaultyHelper(Helper):
    """See `Helper`: a read hangs, ends the process, or fails and writes to its targets for ever."""

    def get(self, keys, objects):
        addresses, lengths = self.places(objects)
        fault = os.environ["FAULT"]
        if fault == "die":
            os._exit(1)
        targets = [(at[-1], size[-1]) for at, size in zip(addresses, lengths, strict=True)]
        threading.Thread(target=scribble, args=(targets,), daemon=True).start()
        if fault == "hang":
            threading.Event().wait()
        return [FAILED_TRANSFER for _ in keys]


def scribble(targets):
    while True:
        for address, length in targets:
            ctypes.memset(address, 0x55, length)


if __name__ == "__main__":
    main(FaultyHelper)
