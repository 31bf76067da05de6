"""What the record of a call is searched by once it has ended: a short text about it, and the path it names."""

import posixpath
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

import orjson

from app.domain.tool_call import ToolCall, ToolResult

SUMMARY_CHARACTERS: Final = 256
PATH_MAX_BYTES: Final = 4096

# What stays for the result's text, however long the arguments are.
_SUBJECT_CHARACTERS: Final = 144
_LOOK_CHARACTERS: Final = 1024
_PARSE_CHARACTERS: Final = 65_536
_SUBJECTS: Final = ("path", "file_path", "command", "pattern")


def summary_of(call: ToolCall, result: ToolResult) -> str:
    """Return the text `q` is compared with, ready for comparison (`comparable`), at most 256 characters.

    It is made of the tool's name, the path, command and pattern of the arguments, and the first text of the result.
    """
    arguments = _arguments(call)
    subjects = [value for name in _SUBJECTS if isinstance(value := arguments.get(name), str)]
    relative = _relative_path(result)
    if relative is not None and relative not in subjects:
        subjects.append(relative)
    head = f"{call.tool_name} {' '.join(subject[:_LOOK_CHARACTERS] for subject in subjects)}"
    subject = comparable(head)[:_SUBJECT_CHARACTERS]
    return f"{subject} {comparable(_first_text(result.content))}"[:SUMMARY_CHARACTERS].strip()


def comparable(text: str) -> str:
    """Return a text in the form in which texts are compared: case, composition and the kind of blanks do not count."""
    if text.isascii():
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return " ".join(folded.encode("utf-8", "replace").decode().split())


def path_of(call: ToolCall, result: ToolResult) -> str | None:
    """Return the path a call was about, relative to the workspace's root when it lies below; None when there is none.

    What the result names counts before what the arguments name.
    """
    arguments = _arguments(call)
    for found in (_relative_path(result), arguments.get("path"), arguments.get("file_path")):
        if isinstance(found, str) and found:
            return plain_path(found)
    return None


def plain_path(path: str, root: str | None = None) -> str | None:
    """Return a path in the spelling paths of records are compared in; None when it is too long to be one.

    `a`, `./a`, `a/` and, with a `root`, `/root/a` are the same; the root itself is `.`.
    """
    encoded = path.encode("utf-8", "replace")
    if len(encoded) > PATH_MAX_BYTES:
        return None
    plain = posixpath.normpath(encoded.decode())
    if plain.startswith("//"):
        plain = plain[1:]
    if root is not None and posixpath.isabs(plain):
        base = posixpath.normpath(root)
        if plain == base:
            return "."
        plain = plain.removeprefix(base.rstrip("/") + "/")
    return plain


def _arguments(call: ToolCall) -> Mapping[str, Any]:
    value = call.arguments
    if isinstance(value, str) and len(value) <= _PARSE_CHARACTERS:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {"command": value}
    return value if isinstance(value, dict) else {}


# A hook may have put anything into a result.


def _first_text(content: Any) -> str:
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(text := block.get("text"), str):
            return text[:_LOOK_CHARACTERS]
    return ""


def _relative_path(result: ToolResult) -> str | None:
    details: Any = result.details
    found = details.get("relativePath") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None
