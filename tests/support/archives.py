"""Archives for tests, made by the standard library and, where it would refuse, by hand."""

import gzip
import io
import tarfile
import warnings
import zipfile
from collections.abc import Iterable

Entry = tuple[str | tarfile.TarInfo, bytes]


def tar_of(*entries: Entry, form: int = tarfile.PAX_FORMAT, headers: dict[str, str] | None = None) -> bytes:
    """Return a tar archive; an entry is a name, or a whole TarInfo, and the content. A final / makes a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers, errors="surrogateescape") as archive:
        for what, content in entries:
            info = what if isinstance(what, tarfile.TarInfo) else tar_info(what)
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_info(name: str, **members: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name.rstrip("/") if name.strip("/") else name)
    info.mode = 0o644
    info.mtime = 1_700_000_000
    if name.endswith("/"):
        info.type = tarfile.DIRTYPE
        info.mode = 0o755
    for member, value in members.items():
        setattr(info, member, value)
    return info


def gz_of(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zip_of(*entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")  # of two entries with one name, which some tests are about
        for what, content in entries:
            info = what if isinstance(what, zipfile.ZipInfo) else zip_info(what)
            archive.writestr(info, content, method)
    return out.getvalue()


def zip_info(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
    info.create_system = 3
    info.external_attr = (0o40755 if name.endswith("/") else mode) << 16
    return info


def header_with(data: bytes, position: int, field: bytes) -> bytes:
    """Return a tar archive whose first header has other bytes at `position`, and the checksum that goes with them."""
    header = bytearray(data[:512])
    header[position : position + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


def names_in(data: bytes) -> list[str]:
    """Return the names in an archive of any of the three formats, directories with a final /."""
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.namelist()
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        return [info.name + "/" * info.isdir() for info in archive.getmembers()]


def contents_of(data: bytes) -> dict[str, bytes]:
    """Return the files in an archive of any of the three formats."""
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        return {info.name: _read(archive, info) for info in archive.getmembers() if info.isreg()}


def _read(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(info)
    assert file is not None
    return file.read()


def pieces(data: bytes, size: int = 10_007) -> Iterable[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))
