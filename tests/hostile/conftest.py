"""Fixtures of the hostile tests."""

import pytest

from diloco.exchange.encrypted.tls import Security, security_of

SECRET = "correct horse battery staple"


@pytest.fixture(scope="session")
def security() -> Security:
    """The proof of a process that has the secret."""
    return security_of(SECRET, None)
