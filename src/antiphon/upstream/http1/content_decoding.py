"""Decoding of compressed bodies. Requests ask for none, but some servers compress anyway."""

import zlib

from antiphon.upstream.http1.errors import IncompleteBody, InvalidResponse

MAX_DECODED_SIZE = 256 * 1024
"""No more is decoded at once: a few bytes can decode to a thousand times their size."""

_GZIP = 16 + zlib.MAX_WBITS
_UNSUPPORTED = frozenset({"br", "zstd", "compress", "x-compress"})


class ContentDecoder:
    """Decodes a gzip or deflate body part by part. `received` is the number of encoded bytes so far."""

    def __init__(self, encoding: str) -> None:
        self.received = 0
        self._is_gzip = encoding == "gzip"
        self._inflater: zlib._Decompress | None = None
        self._pending = b""
        self._has_more = False

    def feed(self, data: bytes) -> None:
        self.received += len(data)
        self._pending += data

    def take(self) -> bytes:
        """Return the next decoded part, or b"" if more input is needed. Raises IncompleteBody."""
        while self._pending or self._has_more:
            try:
                decoded = self._decode()
            except zlib.error:
                raise IncompleteBody from None
            if decoded:
                return decoded
        return b""

    def check_end(self) -> None:
        """Raise IncompleteBody if the input ends within the compressed data."""
        if self._inflater is not None and not self._inflater.eof:
            raise IncompleteBody

    def _decode(self) -> bytes:
        if self._inflater is None:
            self._inflater = zlib.decompressobj(self._choose_format())
        elif self._inflater.eof:
            if not self._is_gzip:
                raise IncompleteBody  # bytes after the end
            self._inflater = zlib.decompressobj(_GZIP)  # the next member
        decoded = self._inflater.decompress(self._pending, MAX_DECODED_SIZE)
        self._pending = self._inflater.unconsumed_tail or self._inflater.unused_data
        self._has_more = len(decoded) == MAX_DECODED_SIZE and not self._inflater.eof
        return decoded

    def _choose_format(self) -> int:
        if self._is_gzip:
            return _GZIP
        # "deflate" is zlib data, but some servers send it without the header of zlib.
        return zlib.MAX_WBITS if self._pending[0] & 0x0F == 8 else -zlib.MAX_WBITS


def make_decoder(encoding: str) -> ContentDecoder | None:
    """Return a decoder for a Content-Encoding, or None if the body is not encoded. Raises InvalidResponse."""
    encoding = encoding.strip().lower().removeprefix("x-")
    if encoding in ("gzip", "deflate"):
        return ContentDecoder(encoding)
    if encoding in _UNSUPPORTED:
        raise InvalidResponse
    return None
