"""The header of a safetensors file that is at a URL. Beside safetensors.py, so that who reads files needn't import HTTP."""

from __future__ import annotations

import http.client

from . import download
from .errors import RolloutError
from .safetensors import Header, header_of


def read_remote_header(url: str, headers: dict[str, str]) -> Header:
    """The header of the safetensors file at `url`, by two requests for a part; `headers` go with them.

    Raises RolloutError as read_header does, and where the server can't be reached, refuses, or sends no parts.
    """
    shown = download.shown_url(url)

    def fetch(length: int, offset: int) -> tuple[int, bytes]:
        try:
            total, chunks = download.fetch_range(url, headers, offset, offset + length)
            data = b""
            for chunk in chunks:
                data += chunk
                if len(data) >= length:  # a server may send more than it was asked for
                    break
            if len(data) < min(length, total - offset):
                raise ConnectionError("the connection ended early")
            return total, data[:length]
        except download.DownloadError as error:
            raise RolloutError(str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise RolloutError(
                f"{shown} can't be reached",
                found=str(error) or type(error).__name__,
                remedy="see whether this host has a route to it, and whether its certificate is known here",
            ) from error

    size, head = fetch(512, 0)
    # Most of a request is its way there: the first one brings what a damaged file is told by as well.
    return header_of(
        shown, size, lambda length, offset: head[:length] if offset == 0 else fetch(length, offset)[1]
    )
