"""What tests of several commands use."""

import pytest

from tests.bucket_server import BucketServer


@pytest.fixture(scope="session")
def bucket_server():
    """A real object store that no test ends."""
    with BucketServer() as server:
        yield server
