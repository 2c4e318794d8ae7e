"""A master of Mooncake Store, and a process that gives it memory."""

import asyncio

import pytest

from safe_offload.config.tiers import TierConfig
from tests.mooncake_server import Master, Segment, find_master, open_client


def pytest_collection_modifyitems(items):
    if find_master() is None:
        skip = pytest.mark.skip(reason="Mooncake is not installed: make servers")
        for item in items:
            if "tiers/mooncake" in item.path.as_posix():
                item.add_marker(skip)


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """One that soon notices when an engine is gone."""
    folder = tmp_path_factory.mktemp("mooncake")
    with Master(folder, client_ttl="3") as master:
        yield master


@pytest.fixture(scope="module")
def segment(tmp_path_factory, master):
    """Memory of another process."""
    with Segment(tmp_path_factory.mktemp("segment"), master) as segment:
        yield segment


@pytest.fixture(scope="module")
def anyone(master, segment):
    """A client of Mooncake's own, with which anyone may write anything."""

    store = open_client(master.address)
    yield store
    store.close()


@pytest.fixture
def config(master, segment):
    """A tier that gives the store no memory."""
    return TierConfig.at(master.url)


@pytest.fixture(scope="class")
def event_loop_policy():
    return asyncio.DefaultEventLoopPolicy()
