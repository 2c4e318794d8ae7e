"""The error tree: one root, messages that start with what matters."""

import enum
import pickle

import pytest

from safe_offload.errors import (
    ConfigError,
    InvariantError,
    ProtocolError,
    SafeOffloadError,
    SharingError,
    TransferError,
)

ERRORS = [
    ConfigError("bad"),
    ProtocolError("bad"),
    SharingError("bad"),
    TransferError("TIMED_OUT", "3 of 4 blocks."),
    InvariantError("I2", "2 references, expected 0."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_ours_has_one_root_and_survives_pickling(error):
    assert isinstance(error, SafeOffloadError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_config_error_is_a_value_error_as_vllm_expects():
    assert issubclass(ConfigError, ValueError)


def test_a_transfer_error_names_its_reason():
    class Reason(enum.Enum):
        COPY_FAILED = 1

    error = TransferError(Reason.COPY_FAILED, "3 of 4 blocks.")
    assert error.reason is Reason.COPY_FAILED
    assert str(error) == "COPY_FAILED: 3 of 4 blocks."
    assert str(TransferError("TIMED_OUT", "after 3 s.")) == "TIMED_OUT: after 3 s."


def test_an_invariant_error_starts_with_the_number_of_the_invariant():
    assert str(InvariantError("I2", "2 references, expected 0.")) == (
        "I2: 2 references, expected 0."
    )
