"""What tests of several kinds of tier use."""

import asyncio

import pytest
import uvloop

from tests.valkey_server import Certificates

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def runner(request):
    """Each event loop in turn."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Of localhost; nothing trusts their authority by itself."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def tls(request, certificates):
    """With TLS and without."""
    return certificates if request.param == "tls" else None
