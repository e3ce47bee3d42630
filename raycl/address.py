"""Validation of addresses: local paths and ``s3://bucket/path``, without network access."""

import re

from raycl.errors import ConfigError, StorageError

_SECRET = re.compile(r"://[^/@]*:[^/@]*@")
_BUCKET = re.compile(r"s3://([^/?@]*@)?[^/?@]")


def check_address(uri: str) -> None:
    """Raise ``StorageError`` for another scheme or a missing bucket, ``ConfigError`` for credentials."""
    if "://" not in uri:
        return
    if _SECRET.search(uri):
        raise ConfigError(
            f"the address {_SECRET.sub('://***@', uri)!r} contains credentials, which would be written to files and "
            "logs; remove them, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not _BUCKET.match(uri):
        scheme = uri.partition("://")[0]
        wrong = "it has no bucket" if scheme == "s3" else f"raycl does not support {scheme}://"
        raise StorageError(f"cannot use the address {uri!r}: {wrong}; give a local path or s3://bucket/path")
