r"""What grep, find and ls share: where they start, how names are shown and how a list is cut.

Names are kept as the file system decodes them (`os.fsdecode`), so that bytes that are no UTF-8 survive as lone
surrogates; `shown_name` and `name_fields` are the only ways out.
"""

import base64
import os
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Final, Self

from app.domain.workspace import SHOWN_MAX_LINES
from app.sandbox.containment import O_PATH, RelativePath, Root, display_path
from app.tools.truncate import truncate_tail

ROOT_PATH: Final = "."
RESULT_ENTRIES_BYTES: Final = 6 * 1_048_576
"""What the entries in the details of a result may take as JSON, whatever the limit says."""

SHOWN_MOST_BYTES: Final = 1_048_576
"""What the text of a result has at most, whatever the options say: a stored result is at most 8 MiB."""

_SHORT_CHARACTERS: Final = 120
_SEPARATORS: Final = frozenset("\u2028\u2029")


@dataclass(slots=True)
class Start:
    """Where a search or listing starts: an open file or directory of the workspace.

    `path` is absolute and real, for showing, and `place` the same as the file system decodes it. `relative` is `place`
    from the root, empty for the root itself and None for a place outside an unrestricted workspace. `shown` is what
    the caller called it.
    """

    fd: int
    path: str
    place: str
    relative: str | None
    shown: str

    @classmethod
    def open(cls, root: Root, path: RelativePath, flags: int = 0) -> Self:
        """Open a path; without `flags` only to look at it, so that nothing is waited for.

        Raises:
            ToolError: as `Root.open_file` says.
        """
        fd = root.open_file(path, flags or O_PATH)
        try:
            real = os.readlink(b"/proc/self/fd/%d" % fd)  # noqa: PTH115 - bytes
        except OSError:
            real = os.path.normpath(os.path.join(root.real, path.raw))  # noqa: PTH118 - bytes
        return cls(fd, display_path(real), os.fsdecode(real), _below(root.real, real), path.shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.fd)

    @property
    def names(self) -> list[str]:
        """The names that lead here from the root."""
        return self.relative.split("/") if self.relative else []

    @property
    def prefix(self) -> str:
        """What comes before the path of an entry found here: nothing at the root, else a path that ends in `/`."""
        place = self.place if self.relative is None else self.relative
        return place if not place or place.endswith("/") else place + "/"

    @property
    def shown_relative(self) -> str:
        """The path from the root, as details have it."""
        return self.path if self.relative is None else shown_name(self.relative) or ROOT_PATH


def _below(root: bytes, real: bytes) -> str | None:
    """Return the part of a real path below the root, None when it is not below it."""
    above = root if root.endswith(b"/") else root + b"/"
    if real == root or not real.startswith(above):
        return "" if real == root else None
    return os.fsdecode(real[len(above) :])


def shown_name(name: str) -> str:
    r"""Return a name or path for one line of text: `\xNN` for bytes that are no UTF-8, `\n` and its like escaped."""
    if name.isascii() and name.isprintable():
        return name
    text = display_name(name)
    if not any(unicodedata.category(character) == "Cc" or character in _SEPARATORS for character in text):
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) == "Cc" or character in _SEPARATORS
        else character
        for character in text
    )


def short_name(path: str) -> str:
    """Return a path for a notice: of a long one its end."""
    shown = shown_name(path)
    return shown if len(shown) <= _SHORT_CHARACTERS else f"…{shown[1 - _SHORT_CHARACTERS :]}"


def display_name(name: str) -> str:
    r"""Return a name or path as valid Unicode: `\xNN` for bytes that are no UTF-8, everything else as it is."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def name_fields(path: str) -> dict[str, Any]:
    """Return the members of an entry that name it: `path`, and the bytes in base64 when they are no UTF-8."""
    if path.isascii():
        return {"path": path}
    raw = os.fsencode(path)
    try:
        return {"path": raw.decode()}
    except UnicodeDecodeError:
        name = raw.rpartition(b"/")[2]
        return {
            "path": raw.decode("utf-8", "backslashreplace"),
            "pathBase64": base64.b64encode(raw).decode(),
            "nameBase64": base64.b64encode(name).decode(),
        }


@dataclass(frozen=True, slots=True)
class CutText:
    """The text of a result: how many of the lines it shows, and the notices below them."""

    text: str
    shown: int


def cut_lines(
    lines: Sequence[str],
    notices: Callable[[int], Sequence[str]],
    max_bytes: int,
    max_lines: int = SHOWN_MAX_LINES,
) -> CutText:
    """Return as many of the first lines as the limits allow, with the notices for that number.

    `notices` gives the lines to add below when so many are shown, after an empty line. They count in the bytes, as the
    line ends do, and not in `max_lines`. A line may bring a separator, as a line of its own before it.
    """
    max_bytes = min(max_bytes, SHOWN_MOST_BYTES)
    byte_ends = list(accumulate((len(line.encode()) + 1 for line in lines), initial=0))
    line_ends = list(accumulate((line.count("\n") + 1 for line in lines), initial=0))
    count = min(bisect_right(byte_ends, max_bytes + 1), bisect_right(line_ends, max_lines)) - 1
    while True:
        below = list(notices(count))
        gap = bool(below) and count > 0
        if byte_ends[count] + gap + sum(len(line.encode()) + 1 for line in below) - 1 <= max_bytes:
            return CutText("\n".join([*lines[:count], *([""] if gap else []), *below]), count)
        if not count:
            return CutText(truncate_tail("\n".join(below), max_bytes, None).text, 0)
        count -= 1


def notice_of_more(noun: str, shown: int, kept: int, total: int | None, *, by_limit: bool, advice: str) -> str | None:
    """Return the line that tells what a list leaves out, None when it is whole.

    Args:
        noun: what is listed, in the plural.
        shown: how many the text shows.
        kept: how many the details hold.
        total: how many there are, None when there are more than `kept` and nobody counted them.
        by_limit: whether the limit is what left some out.
        advice: how to see the others.
    """
    if shown == total:
        return None
    count = f"[Showing the first {shown} {noun}; there are more." if total is None else ""
    count = count or f"[Showing the first {shown} of {total} {noun}."
    which = "all" if kept == total else f"the first {kept}"
    held = f" The details of this result hold {which}." if kept > shown else ""
    how = f" Raise limit, or {advice}." if by_limit and kept == shown else f" To see the others, {advice}."
    return f"{count}{held}{how}]"


def notice_of_ignored(count: int) -> str:
    """Return the line that tells that ignore rules were applied."""
    return f"[Left out by ignore rules: {count}. Name an ignored path exactly to look into it.]"
