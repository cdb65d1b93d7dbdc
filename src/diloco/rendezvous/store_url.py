"""From a URL and the ordinary environment variables to a client of obstore."""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from diloco.errors import UserError
from diloco.files import expanded, make_directory
from diloco.rendezvous.store_errors import CREDENTIALS, first_line

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_BUCKET_IN_ENDPOINT = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"
"""The variable with which the endpoint of S3 has to name the bucket."""
_CERTIFICATES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE")
_FOR_EVER = "1day"
"""Time limit of the client's own; `Store` has others, which depend on the size."""


def opened_url(url: str) -> "tuple[str, ObjectStore]":
    """The URL, for a directory its path, and a client.

    A directory is made if its parent is there.

    Raises:
        UserError: for a URL, or an environment variable, that can't be right.
        FileWriteError: if the directory can't be made.
    """
    parts = urlsplit(url)
    if "://" not in url or parts.scheme == "file":
        if parts.netloc:
            raise UserError(f"{url}: a directory's URL has three slashes, file:///directory", "url")
        return _directory(unquote(parts.path) if parts.scheme == "file" and "://" in url else url)
    if parts.scheme not in CREDENTIALS:
        raise UserError(f"{url}: give a directory, or s3://bucket/prefix, gs://… or az://…", "url")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"{parts.scheme}://…: give no credentials or options in the URL: set {CREDENTIALS[parts.scheme]}",
            "url",
        )
    if not parts.netloc:
        raise UserError(f"{url}: the bucket's name is missing: {parts.scheme}://bucket/prefix", "url")
    url = url.rstrip("/")
    options = _client_options(parts.scheme, parts.netloc, os.environ)
    retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    try:
        return url, from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError, OSError) as error:
        if any(name in str(error) for name in ("MissingAccount", "MissingAccessKeyId", "MissingSecretAccessKey")):
            needed = CREDENTIALS[parts.scheme]
            raise UserError(f"{url}: there are no credentials, or half of them: set {needed}", "url") from None
        raise UserError(f"{url}: {first_line(error)}", "url") from None


def _directory(path: str) -> "tuple[str, ObjectStore]":
    if not path or "\0" in path:
        raise UserError("give the directory, or the URL, of the store", "url")
    if scheme := re.match(f"({'|'.join(CREDENTIALS)}):/?(?!/)", path):
        raise UserError(f"{path}: a bucket's URL has two slashes: {scheme[1]}://bucket/prefix", "url")
    directory = expanded(path).absolute()
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: give a directory", "url")
    if not directory.parent.is_dir():
        raise UserError(f"{directory.parent} does not exist: make it, or mount it, first", "url")
    make_directory(directory)
    try:
        return str(directory), LocalStore(directory, automatic_cleanup=True)  # of empty directories
    except BaseError as error:
        raise UserError(f"{directory}: {first_line(error)}", "url") from None


def _client_options(scheme: str, bucket: str, environment: Mapping[str, str]) -> "ClientConfig":
    options: ClientConfig = {"timeout": _FOR_EVER, "connect_timeout": "10s", "user_agent": "diloco"}
    variable = next((name for name in _ENDPOINTS[scheme] if environment.get(name)), "")
    endpoint = environment.get(variable, "")
    if endpoint:
        parts = _endpoint_parts(variable, endpoint)
        may_name_it = scheme == "az" or _is_true(environment, _BUCKET_IN_ENDPOINT)  # Azure's path is the account
        if parts.path.strip("/") == bucket and not may_name_it:
            bare = parts._replace(path="", query="", fragment="").geturl()
            raise UserError(
                f"the endpoint {variable}={endpoint} already names the bucket {bucket}: leave it out of the "
                f"endpoint: {variable}={bare}"
            )
    if endpoint.lower().startswith("http://"):
        host = urlsplit(endpoint).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        if not is_here and not _is_true(environment, _ALLOW_HTTP[scheme]):
            raise UserError(
                f"{endpoint} is not encrypted: take an https endpoint, or set {_ALLOW_HTTP[scheme]}=true on a "
                "network in which you trust everybody",
                "url",
            )
        options["allow_http"] = True
    authority = next((environment[name] for name in _CERTIFICATES if environment.get(name)), None)
    if authority is not None:
        try:
            options["root_certificate"] = Path(authority).read_bytes()
        except OSError as error:
            raise UserError(f"SSL_CERT_FILE={authority} can't be read: {error.strerror}") from None
    return options


def _is_true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("1", "true")


def _endpoint_parts(variable: str, endpoint: str) -> SplitResult:
    """The parts of an endpoint's URL; the client would panic at one that is none."""
    if "://" not in endpoint:
        host = re.sub("^https?:/?", "", endpoint)
        raise UserError(f"{variable}={endpoint} does not begin with https://: write https://{host}")
    try:
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # the port is no number, or a bracket is not closed
        pass
    raise UserError(f"{variable}={endpoint} is no URL of an endpoint: write https://HOST, or https://HOST:PORT")
