"""What a file of a workspace is sent as: its own type, and as a download when a browser would do more than show it.

Files are written by commands and models, so none of them may act in the origin of this service. Every answer with a
file also carries `Content-Security-Policy: sandbox` and `nosniff`; this is the second lock on the same door.
"""

import codecs
import mimetypes
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

_OCTETS: Final = "application/octet-stream"
# The tables of the standard library alone: what a machine adds to them must not change the answers.
_TYPES: Final = mimetypes.MimeTypes(filenames=()).types_map[True]
_SHOWN: Final = ("text/", "image/", "audio/", "video/", "application/json")
_ACTIVE: Final = frozenset({"text/html", "text/xml", "text/css", "text/javascript", "text/xsl", "text/cache-manifest"})
# What a type of text may be that the tables give something else for: MPEG transport streams are rare in workspaces.
_TEXTS: Final = {".ts": "text/plain", ".mts": "text/plain", ".md": "text/markdown", ".jsonl": "text/plain"}


def content_headers(path: str, head: bytes, *, whole: bool) -> dict[str, str]:
    """Return the headers that tell what a file is, from its name and its first bytes; `whole`: there are no others."""
    name = PurePosixPath(path).name
    kind = _kind(name, head, whole=whole)
    headers = {"Content-Type": kind, "Content-Security-Policy": "sandbox"}
    bare = kind.partition(";")[0]
    if not bare.startswith(_SHOWN) or bare in _ACTIVE or bare.endswith("+xml"):
        headers["Content-Disposition"] = disposition(name)
    return headers


def disposition(name: str) -> str:
    """Return the value of Content-Disposition that saves an answer under a name (RFC 6266)."""
    plain = "".join(character if " " <= character <= "~" and character not in '"\\%' else "_" for character in name)
    extended = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{extended}'


def _kind(name: str, head: bytes, *, whole: bool) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    kind = _TEXTS.get(suffix) or _TYPES.get(suffix)
    text = _is_text(head, whole=whole)
    if kind is None:
        return "text/plain; charset=utf-8" if text else _OCTETS
    if kind.startswith("text/") or kind == "application/json":
        # A charset only where it is known. Text that is none is not worth its name.
        if text:
            return f"{kind}; charset=utf-8"
        return _OCTETS if b"\0" in head else kind
    return kind


def _is_text(head: bytes, *, whole: bool) -> bool:
    """Whether these first bytes of a file are UTF-8 without NUL; a character may be cut off where they end."""
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return False
    return True
