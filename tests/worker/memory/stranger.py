"""A process that is no rank of an engine, where the engine's ranks meet; imports nothing of ours.

Started with `pose SIZE NAME…` it is the first rank at these addresses before the real one is; with
`knock NAME [USER]` it connects to one that listens. Once it is ready it waits for a line.
"""

import contextlib
import os
import socket
import sys
import threading


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pose(size_bytes: int, names: list[str]) -> None:
    """Give each process that comes a memory of ours, and tell in the end what was written to it."""
    memory = os.memfd_create("stranger")
    os.ftruncate(memory, size_bytes)
    for name in names:
        listener = new_socket()
        listener.bind(f"\0{name}")
        listener.listen()
        threading.Thread(target=serve, args=(listener, memory), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    print(max(os.pread(memory, size_bytes, 0)), flush=True)


def serve(listener: socket.socket, memory: int) -> None:
    while True:
        peer, _ = listener.accept()
        with contextlib.suppress(OSError):  # it has gone
            terms = peer.recv(256)
            socket.send_fds(peer, [terms], [memory])
            if peer.recv(256) == b"mapped":
                peer.send(b"committed")


def knock(name: str) -> None:
    """Say nothing, too little, and what is no word of ours; and stay."""
    kept = []
    for message in (b"", b"x", b"x" * 256):
        kept.append(new_socket())
        kept[-1].connect(f"\0{name}")
        with contextlib.suppress(OSError):  # we have been turned away
            kept[-1].send(message)
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "pose":
        pose(int(sys.argv[2]), sys.argv[3:])
    else:
        if sys.argv[3:]:
            os.setuid(int(sys.argv[3]))
        knock(sys.argv[2])
