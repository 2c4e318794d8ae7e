"""What tests of several commands use."""

from collections.abc import Iterator

import pytest

from tests.bucket_server import BucketServer


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[BucketServer]:
    """A real object store that no test ends."""
    with BucketServer() as server:
        yield server
