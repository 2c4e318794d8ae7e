"""Engines on one pool, all of them in this process."""

import pytest

from tests.node.engines import Engine, pools_in
from tests.simulator.node import Node


@pytest.fixture
def start_engine(tmp_path):
    """Start engines on one pool."""
    engines = []

    def start(num_slots, **options):
        engines.append(Engine(num_slots, **options))
        return engines[-1]

    with pools_in(tmp_path):
        yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def node():
    """A machine of the simulator's engines."""
    node = Node()
    yield node
    node.close()
