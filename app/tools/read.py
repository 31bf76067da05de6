"""read: lines of a text file, pages of a PDF, an image, or the bytes of a small file of another kind."""

import base64
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from app.domain.abort import AbortSignal
from app.domain.encodings import TextEncoding
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import OpenedFile, RelativePath, Root, tool_error_from_oserror
from app.sandbox.files import read_whole
from app.tools import image_content, pdf_text
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.image_content import IMAGE_FORMATS, ShownImage
from app.tools.line_index import LineIndexes
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define
from app.tools.pdf_text import PdfPages
from app.tools.text_encoding import NotText, detect_encoding, encoding_named
from app.tools.text_page import RESULT_MAX_BYTES, Beginning, Window, read_beginning, read_page, unknown_text

BLOB_MAX_BYTES: Final = 524_288
"""The largest file of another kind that is given whole, before base64."""

_LINES_IN_PATH: Final = re.compile(r"(?P<path>.+):(?P<start>\d{1,15})(?:-(?P<end>\d{1,15}))?", re.DOTALL)

# Of all workspaces: an index belongs to a file, and what may be read is decided before it is looked for.
_LINE_INDEXES: Final = LineIndexes()

READ_ANNOTATIONS: Final = ToolAnnotations(
    title="Read a file",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)

_TEXT_TYPES: Final = {
    "c": "text/x-c",
    "cfg": "text/plain",
    "cpp": "text/x-c++",
    "css": "text/css",
    "csv": "text/csv",
    "go": "text/x-go",
    "h": "text/x-c",
    "htm": "text/html",
    "html": "text/html",
    "java": "text/x-java",
    "js": "text/javascript",
    "json": "application/json",
    "jsonl": "application/jsonl",
    "md": "text/markdown",
    "mjs": "text/javascript",
    "py": "text/x-python",
    "rs": "text/x-rust",
    "rst": "text/x-rst",
    "sh": "application/x-sh",
    "sql": "application/sql",
    "svg": "image/svg+xml",
    "tex": "application/x-tex",
    "toml": "application/toml",
    "ts": "text/x-typescript",
    "tsv": "text/tab-separated-values",
    "xml": "application/xml",
    "yaml": "application/yaml",
    "yml": "application/yaml",
}


class ReadArguments(ArgumentsModel):
    path: str = Field(
        description="The file, relative to the workspace root (or absolute, below it). path:START-END or path:LINE "
        "shows these lines, unless a file has that very name."
    )
    offset: int | None = Field(
        default=None, ge=1, description="First line to show (of a PDF: first page), counted from 1 (default 1)."
    )
    limit: int | None = Field(default=None, ge=1, description="How many lines (of a PDF: pages) to show at most.")
    line_numbers: bool | None = Field(default=None, description="Whether to number the lines (default true).")
    encoding: str | None = Field(
        default=None,
        description="What the file is encoded in, for example gb18030 or windows-1252, when it is neither UTF-8 nor "
        "UTF-16.",
    )


class ImageDetails(DetailsModel):
    """Sizes in pixels, upright: of the image that is shown and of the one in the file.

    `scale` is the one by the other, 1 for an image that is not smaller. `converted` tells that what is shown is not the
    file as it is: of an `animated` one it is the first picture.
    """

    width: int
    height: int
    original_width: int
    original_height: int
    scale: float
    animated: bool
    converted: bool


class ReadDetails(DetailsModel):
    """`bytes` and `lines` are the file's, `start_line` to `end_line` were shown; `lines` is None when not counted.

    What does not come in lines has no lines and no encoding. `next_offset` counts what `offset` counts: lines, or pages
    of a PDF. `encoding_confidence` tells of an encoding that was guessed, `pages` to `end_page` of a PDF, `image` of an
    image; elsewhere they are left out on the wire.
    """

    path: str
    relative_path: str
    bytes: int
    lines: int | None = None
    start_line: int | None = None
    end_line: int | None = None
    truncated: bool = False
    next_offset: int | None = None
    encoding: str | None = None
    mime_type: str
    encoding_confidence: float | None = None
    pages: int | None = None
    start_page: int | None = None
    end_page: int | None = None
    image: ImageDetails | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_json().items() if value is not None or name in _ALWAYS}


_ALWAYS: Final = frozenset(("lines", "startLine", "endLine", "nextOffset", "encoding"))


def read_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.read
    return define(
        "read",
        "Read a file of the workspace. Text: numbered lines, at most "
        f"{limits.max_lines} lines and {min(limits.max_bytes, RESULT_MAX_BYTES)} bytes in one call; when more follow, "
        "the result ends in a notice that gives the offset to go on with. PNG, JPEG, GIF, WebP and BMP: the image, "
        f"made smaller when it has more than {image_content.MAX_SIDE} pixels a side. PDF: its text, by page. Other "
        f"files of at most {BLOB_MAX_BYTES} bytes: their bytes. Directories are for ls.",
        ReadArguments,
        READ_ANNOTATIONS,
        limits.execution_mode,
    )


class ReadTool(ModelTool[ReadArguments]):
    arguments_model = ReadArguments

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(read_definition(environment.options))
        self._environment = environment

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: ReadArguments,
        signal: AbortSignal,
        on_update: OnUpdate,  # noqa: ARG002 - as above
    ) -> ToolResult:
        environment = self._environment
        return await environment.files.run(
            self._read, args, signal.raise_if_aborted, signal=signal, workspace=environment.cwd
        )

    def _read(self, args: ReadArguments, check: Callable[[], None]) -> ToolResult:
        environment = self._environment
        encoding = None if args.encoding is None else encoding_named(args.encoding)
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            path, file, lines = _open(root, args)
        try:
            return _Reading(environment, args, path.shown, file, lines, check).result(encoding)
        except OSError as error:
            raise tool_error_from_oserror(error, path.shown) from None
        except ToolError as error:
            where = {"path": file.path, "relativePath": file.relative_path, "bytes": file.status.st_size}
            error.details = {**where, **error.details}
            raise
        finally:
            file.close()


@dataclass(frozen=True, slots=True)
class _Lines:
    """What to show, as the caller said: from `offset`, counted from 1, at most `limit` when that was said."""

    offset: int
    limit: int | None


@dataclass(slots=True)
class _Reading:
    """One call, after its file was opened."""

    environment: ToolEnvironment
    args: ReadArguments
    shown: str
    file: OpenedFile
    wanted: _Lines
    check: Callable[[], None]

    def result(self, encoding: TextEncoding | None) -> ToolResult:
        beginning = read_beginning(self.file.fd, self.file.status.st_size)
        if encoding is None:
            # What a call says of a file holds whatever the file looks like. The workspace's word is for its texts.
            found = detect_encoding(beginning.sample, whole=beginning.whole)
            if not isinstance(found, NotText) or not self._is_shown_otherwise(found):
                label = self.environment.options.read.encoding
                encoding = None if label is None else encoding_named(label)
                if encoding is not None:
                    found = detect_encoding(beginning.sample, whole=beginning.whole, encoding=encoding)
        else:
            found = detect_encoding(beginning.sample, whole=beginning.whole, encoding=encoding)
        if isinstance(found, TextEncoding):
            return self._text(beginning, found, encoding)
        if not found.binary:
            raise unknown_text(self.shown, found)
        if found.mime_type in IMAGE_FORMATS:
            return self._image(found.mime_type)
        if found.mime_type == pdf_text.MIME_TYPE:
            return self._pdf()
        return self._blob(found.mime_type)

    @staticmethod
    def _is_shown_otherwise(found: NotText) -> bool:
        return found.mime_type in IMAGE_FORMATS or found.mime_type == pdf_text.MIME_TYPE

    def _text(self, beginning: Beginning, encoding: TextEncoding, said: TextEncoding | None) -> ToolResult:
        options = self.environment.options.read
        args, status = self.args, self.file.status
        limit = self.wanted.limit
        window = Window(
            shown=self.shown,
            offset=self.wanted.offset,
            limit=options.max_lines if limit is None else min(limit, options.max_lines),
            max_bytes=min(options.max_bytes, RESULT_MAX_BYTES),
            numbered=options.line_numbers if args.line_numbers is None else args.line_numbers,
            encoding=said,
        )
        index = _LINE_INDEXES.of(status, "" if encoding.newline_is_a_byte else encoding.name)
        page = read_page(self.file.fd, status.st_size, beginning, encoding, window, self.check, index)
        details = ReadDetails(
            path=self.file.path,
            relative_path=self.file.relative_path,
            bytes=page.bytes,
            lines=page.lines,
            start_line=page.start_line,
            end_line=page.end_line,
            truncated=page.next_offset is not None,
            next_offset=page.next_offset,
            encoding=page.encoding.name,
            mime_type=_TEXT_TYPES.get(self.file.path.rpartition(".")[2].lower(), "text/plain"),
            encoding_confidence=page.encoding.confidence,
        )
        return ToolResult(text_content(page.text), details.to_json())

    def _image(self, mime_type: str) -> ToolResult:
        self._at_most(image_content.MAX_FILE_BYTES, mime_type)
        image = ShownImage(**self._decoded(image_content.__name__, mime_type=mime_type))
        details = ReadDetails(
            path=self.file.path,
            relative_path=self.file.relative_path,
            bytes=self.file.status.st_size,
            mime_type=mime_type,
            image=ImageDetails(
                width=image.width,
                height=image.height,
                original_width=image.original_width,
                original_height=image.original_height,
                scale=image.scale,
                animated=image.animated,
                converted=image.converted,
            ),
        )
        return ToolResult(
            [
                {"type": "text", "text": _image_note(self.shown, mime_type, image)},
                {"type": "image", "data": image.data, "mimeType": image.mime_type},
            ],
            details.to_json(),
        )

    def _pdf(self) -> ToolResult:
        self._at_most(pdf_text.MAX_FILE_BYTES, pdf_text.MIME_TYPE)
        # A quotation mark is two bytes of JSON.
        max_bytes = min(self.environment.options.read.max_bytes, RESULT_MAX_BYTES // 2)
        pages = PdfPages(
            **self._decoded(pdf_text.__name__, offset=self.wanted.offset, limit=self.wanted.limit, max_bytes=max_bytes)
        )
        details = ReadDetails(
            path=self.file.path,
            relative_path=self.file.relative_path,
            bytes=self.file.status.st_size,
            truncated=pages.next_offset is not None,
            next_offset=pages.next_offset,
            mime_type=pdf_text.MIME_TYPE,
            pages=pages.pages,
            start_page=pages.start_page,
            end_page=pages.end_page,
        )
        return ToolResult(text_content(pages.text), details.to_json())

    def _blob(self, mime_type: str) -> ToolResult:
        self._at_most(BLOB_MAX_BYTES, mime_type)
        content = self._content()
        details = ReadDetails(
            path=self.file.path, relative_path=self.file.relative_path, bytes=len(content), mime_type=mime_type
        )
        return ToolResult(
            [
                {"type": "text", "text": f"{self.shown} is not text: {mime_type}, {len(content)} bytes"},
                {
                    "type": "blob",
                    "data": base64.b64encode(content).decode("ascii"),
                    "mimeType": mime_type,
                    "bytes": len(content),
                },
            ],
            details.to_json(),
        )

    def _decoded(self, module: str, **arguments: Any) -> Any:
        return self.environment.decoder.decode(
            module, self.file.fd, {"shown": self.shown, **arguments}, shown=self.shown, check=self.check
        )

    def _content(self) -> bytes:
        os.lseek(self.file.fd, 0, os.SEEK_SET)
        return read_whole(self.file.fd, self.file.status.st_size, self.shown, self.check)

    def _at_most(self, max_bytes: int, mime_type: str) -> None:
        size = self.file.status.st_size
        if size > max_bytes:
            raise ToolError(
                ErrorCode.UNSUPPORTED,
                f"{self.shown} is not text that read can show: {mime_type}, {size} bytes (at most {max_bytes} are "
                "given of this type); use bash to look into it",
                {"mimeType": mime_type, "maxBytes": max_bytes},
            )


def _open(root: Root, args: ReadArguments) -> tuple[RelativePath, OpenedFile, _Lines]:
    """Open the file a path names, with what is to be shown of it.

    A path that ends like `:3-5` means these lines when no file has this name.
    """
    wanted = _Lines(args.offset or 1, args.limit)
    path = root.relative(args.path)
    try:
        return path, root.open_regular(path), wanted
    except ToolError as error:
        match = _LINES_IN_PATH.fullmatch(args.path)
        if match is None or error.code is not ErrorCode.NOT_FOUND:
            raise
        missing = error
    try:
        path = root.relative(match["path"])
        file = root.open_regular(path)
    except ToolError as other:
        raise (missing if other.code is ErrorCode.NOT_FOUND else other) from None
    try:
        return path, file, _lines_of(match, args)
    except ToolError:
        file.close()
        raise


def _lines_of(match: re.Match[str], args: ReadArguments) -> _Lines:
    start = int(match["start"])
    end = start if match["end"] is None else int(match["end"])
    if not 1 <= start <= end:
        raise ToolError(
            ErrorCode.INVALID_ARGUMENTS,
            f"path: there are no lines {start} to {end} in any file, and no file is called {args.path}; lines count "
            "from 1 and the first of a range comes first",
        )
    if args.offset is not None or args.limit is not None:
        raise ToolError(
            ErrorCode.INVALID_ARGUMENTS,
            "path: it names lines already; leave out either these or offset and limit",
        )
    return _Lines(start, end - start + 1)


def _image_note(shown: str, mime_type: str, image: ShownImage) -> str:
    """Return what there is to know of an image beside the image."""
    notes = [f"{shown} is an image ({mime_type}, {image.original_width}x{image.original_height} pixels)"]
    if image.scale < 1:
        factor = 1 / image.scale
        notes.append(
            f"It is shown at {image.width}x{image.height}, scale {image.scale:.3g}: multiply coordinates by "
            f"{factor:.4g} to find them in the file"
        )
    if image.turned:
        notes.append("It was turned upright as its EXIF orientation says")
    if image.animated:
        notes.append("It is animated: only its first picture is shown" if image.converted else "It is animated")
    if image.mime_type != mime_type:
        notes.append(f"It is shown as {image.mime_type}")
    return ". ".join(notes) + ("." if len(notes) > 1 else "")
