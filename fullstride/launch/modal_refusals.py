"""Refusals of Modal's client and service, translated to this command line's terms."""

from collections.abc import Iterator
from contextlib import contextmanager

from modal import exception

from fullstride.errors import ConfigError, one_line

SETTINGS = (exception.AuthError, exception.InvalidError, exception.NotFoundError, exception.PermissionDeniedError)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn Modal's errors into ours.

    Raises:
        ConfigError: for what the caller can mend: an account, a name, a value.
        OSError: for what Modal could not do.

    """
    try:
        yield
    except SETTINGS as error:
        raise ConfigError(f"modal: {one_line(error)}") from None
    except exception.Error as error:
        raise OSError(f"modal: {one_line(error)}") from error
