"""Addresses: a local path, or ``s3://bucket/path``; any other is refused before a library asks the network."""

import re

from raycl.errors import ConfigError, StorageError

_SECRET = re.compile(r"://[^/@]*:[^/@]*@")
_BUCKET = re.compile(r"s3://([^/?@]*@)?[^/?@]")


def check_address(uri: str) -> None:
    """Raise ``StorageError`` for another scheme or a missing bucket, ``ConfigError`` for a secret."""
    if "://" not in uri:
        return
    if _SECRET.search(uri):
        raise ConfigError(
            f"the address {_SECRET.sub('://***@', uri)!r} holds a secret, which would be written to files and "
            "logs; give it without, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not _BUCKET.match(uri):
        scheme = uri.partition("://")[0]
        wrong = "it names no bucket" if scheme == "s3" else f"raycl cannot read {scheme}://"
        raise StorageError(f"cannot use the address {uri!r}: {wrong}; give a local path or s3://bucket/path")
