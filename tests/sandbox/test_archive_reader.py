"""Archives nobody vouches for: what is taken, what is refused, and how little of it is held."""

import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox.archive_reader import ArchiveError, ArchiveFormat, Index, check_index, members
from tests.support.archives import gz_of, header_with, tar_info, tar_of, zip_info, zip_of

MB = 1_000_000
TAR, TAR_GZ, ZIP = ArchiveFormat
ALL = {TAR: tar_of, TAR_GZ: lambda *entries: gz_of(tar_of(*entries)), ZIP: zip_of}


def source(data: bytes) -> Callable[[int, int], bytes]:
    return lambda size, offset: data[offset : offset + size]


def go_on() -> None:
    """The check of work that nobody stops."""


def index_of(form: ArchiveFormat, data: bytes, max_bytes: int = 100 * MB, **options: Any) -> Index:
    return check_index(form, source(data), len(data), max_bytes, go_on, **options)


def unpacked(form: ArchiveFormat, data: bytes, max_bytes: int = 100 * MB) -> list[tuple[bytes, bytes | None]]:
    """Return paths and contents, None for a directory."""
    found = members(form, source(data), len(data), max_bytes, go_on)
    return [(member.path, None if member.directory else b"".join(member.blocks)) for member in found]


def refusal(form: ArchiveFormat, data: bytes, max_bytes: int = 100 * MB) -> ArchiveError:
    with pytest.raises(ArchiveError) as raised:
        index_of(form, data, max_bytes)
    return raised.value


@pytest.mark.parametrize("form", ArchiveFormat)
def test_files_and_directories_come_out_as_they_were_put_in(form: ArchiveFormat):
    large = os.urandom(300_000)
    data = ALL[form](
        ("./", b""), ("./a/", b""), ("./a/b.txt", b"two\n"), ("empty", b""), ("a//c/./d", large), ("with\nline", b"x")
    )
    assert unpacked(form, data) == [
        (b"a", None),
        (b"a/b.txt", b"two\n"),
        (b"empty", b""),
        (b"a/c/d", large),
        (b"with\nline", b"x"),
    ]
    assert index_of(form, data) == Index(files=4, directories=1, bytes=4 + len(large) + 1)


@pytest.mark.parametrize("form", ArchiveFormat)
def test_what_is_not_read_of_a_member_is_skipped(form: ArchiveFormat):
    data = ALL[form](("a", bytes(700_000)), ("b", b"x" * 700_000), ("c", b"c"))
    found = []
    for member in members(form, source(data), len(data), 100 * MB, go_on):
        found.append(member.path)
        if member.path == b"b":
            assert next(member.blocks)[:1] == b"x"
    assert found == [b"a", b"b", b"c"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_dialect_is_read(form: int):
    long = "/".join(["directory"] * 16) + "/" + "n" * 90
    info = tar_info("prog", mode=0o4755, mtime=1_234_567_890)
    data = tar_of((info, b"#!"), (long, b"long"), ("ä", b"umlaut"), form=form)
    assert unpacked(TAR, data) == [(b"prog", b"#!"), (long.encode(), b"long"), ("ä".encode(), b"umlaut")]
    first = next(members(TAR, source(data), len(data), MB, go_on))
    assert (first.mode, first.modified_ns) == (0o4755, 1_234_567_890_000_000_000)


def test_names_are_bytes():
    name = os.fsdecode(b"caf\xe9")
    assert unpacked(TAR, tar_of((name, b"x"))) == [(b"caf\xe9", b"x")]
    assert unpacked(TAR, tar_of((name, b"x"), form=tarfile.GNU_FORMAT)) == [(b"caf\xe9", b"x")]
    plain = zip_of(("caf_", b"x")).replace(b"caf_", b"caf\xe9")
    assert unpacked(ZIP, plain) == [(b"caf\xe9", b"x")]


def test_what_git_and_a_fraction_of_a_second_leave_in_a_tar_is_no_matter():
    data = tar_of((tar_info("a", mtime=1_700_000_000.75), b"x"), headers={"comment": "0123abcd"})
    (member,) = members(TAR, source(data), len(data), MB, go_on)
    assert (member.path, member.modified_ns) == (b"a", 1_700_000_000_000_000_000)


def test_a_gzip_file_may_have_several_members_and_padding():
    data = tar_of(("a", b"1"), ("b", b"2" * 5000))
    several = gz_of(data[:700]) + gz_of(data[700:]) + bytes(512)
    assert unpacked(TAR_GZ, several) == [(b"a", b"1"), (b"b", b"2" * 5000)]


@pytest.mark.parametrize("form", ArchiveFormat)
@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["/etc/passwd"], "absolute_name"),
        (["a", "../b"], "parent_name"),
        (["a/../../b"], "parent_name"),
        (["a/.."], "parent_name"),
        (["a", "b", "a"], "duplicate_name"),
        (["a", "./a"], "duplicate_name"),
        (["a/b", "a//b"], "duplicate_name"),
        (["a", "a/"], "duplicate_name"),
        (["a/", "a"], "duplicate_name"),
        (["a", "a/b"], "duplicate_name"),
        (["a/b", "a"], "duplicate_name"),
        (["a/b/c/d", "a/b"], "duplicate_name"),
        (["n" * 256], "name_too_long"),
        (["/".join(["nnnn"] * 820)], "name_too_long"),
        (["x/.toolcrib-tmp-0123456789abcdef"], "reserved_name"),
        ([".toolcrib-tmp-d/x"], "reserved_name"),
    ],
)
def test_a_name_that_cannot_be_one_file_below_the_root_is_refused(form: ArchiveFormat, names: list[str], code: str):
    assert refusal(form, ALL[form](*((name, b"") for name in names))).code == code


def test_a_directory_may_be_named_again_and_after_what_is_in_it():
    entries = [("a/b", b"1"), ("a/", b""), ("c/", b""), ("c/", b"")]
    assert index_of(TAR, tar_of(*entries)) == Index(files=1, directories=3, bytes=1)


@pytest.mark.parametrize("form", ArchiveFormat)
def test_an_entry_of_the_root_is_fine_when_it_is_a_directory(form: ArchiveFormat):
    assert unpacked(form, ALL[form](("./", b""), ("a", b"1"))) == [(b"a", b"1")]
    assert refusal(TAR, tar_of((tar_info("."), b"x"))).code == "malformed_archive"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (tarfile.SYMTYPE, "link"),
        (tarfile.LNKTYPE, "link"),
        (tarfile.CHRTYPE, "special_file"),
        (tarfile.BLKTYPE, "special_file"),
        (tarfile.FIFOTYPE, "special_file"),
        (tarfile.GNUTYPE_SPARSE, "unsupported"),
        (b"V", "unsupported"),
    ],
)
def test_a_tar_entry_that_is_no_file_or_directory_is_refused(kind: bytes, code: str):
    info = tar_info("it", linkname="target" if code == "link" else "")
    info.type = kind
    for data, form in ((tar_of(("a", b""), (info, b"")), TAR), (gz_of(tar_of(("a", b""), (info, b""))), TAR_GZ)):
        error = refusal(form, data)
        assert (error.code, error.name) == (code, b"it")


def test_a_sparse_file_in_the_new_dialect_is_refused():
    info = tar_info("GNUSparseFile.0/it")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1099511627776"}
    assert refusal(TAR, tar_of((info, b"0\n"))).code == "unsupported"


@pytest.mark.parametrize(
    ("mode", "code"),
    [(0o120777, "link"), (0o010644, "special_file"), (0o020644, "special_file"), (0o140644, "special_file")],
)
def test_a_zip_entry_that_is_no_file_or_directory_is_refused(mode: int, code: str):
    error = refusal(ZIP, zip_of(("a", b""), (zip_info("it", mode), b"target")))
    assert (error.code, error.name) == (code, b"it")


def test_encryption_and_other_compressions_are_refused():
    encrypted = bytearray(zip_of(("a", b"x")))
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    assert refusal(ZIP, bytes(encrypted)).code == "unsupported"
    assert refusal(ZIP, zip_of(("a", b"x" * 1000), method=zipfile.ZIP_BZIP2)).code == "unsupported"


def test_a_size_that_is_huge_is_refused_before_anything_is_read():
    plain = tar_of(("a", b"x"), form=tarfile.GNU_FORMAT)
    assert refusal(TAR, header_with(plain, 124, b"77777777777\0")).code == "too_many_bytes"
    assert refusal(TAR, header_with(plain, 124, b"\x80" + b"\xff" * 11)).code == "too_many_bytes"
    negative = header_with(plain, 124, b"\xff" * 12)
    assert refusal(TAR, negative).code == "malformed_archive"
    assert refusal(TAR, header_with(plain, 124, b"-0000000001\0")).code == "malformed_archive"


def test_a_long_name_that_says_it_has_gigabytes_is_not_read_into_memory():
    long_name = tar_info("././@LongLink")
    long_name.type = tarfile.GNUTYPE_LONGNAME
    data = header_with(tar_of((long_name, b""), form=tarfile.GNU_FORMAT), 124, b"77777777777\0")
    assert refusal(TAR, data).code == "malformed_archive"
    extended = tar_info("pax")
    extended.type = tarfile.XHDTYPE
    data = header_with(tar_of((extended, b""), form=tarfile.GNU_FORMAT), 124, b"77777777777\0")
    assert refusal(TAR, data).code == "malformed_archive"


@pytest.mark.parametrize("form", ArchiveFormat)
def test_the_contents_together_have_a_limit(form: ArchiveFormat):
    data = ALL[form](("a", bytes(60_000)), ("b", bytes(60_000)))
    assert index_of(form, data, 120_000).bytes == 120_000
    error = refusal(form, data, 119_999)
    assert (error.code, error.name, error.over_limit) == ("too_many_bytes", b"b", True)


def test_a_bomb_goes_off_in_bounded_memory():
    """100 MB of zeros in 100 kB, twice over."""
    inner = zlib.compressobj(9, wbits=31)
    zeros = bytes(MB)
    head = header_with(tar_of(("zeros", b""), form=tarfile.GNU_FORMAT), 124, b"%011o\0" % (100 * MB))[:512]
    bomb = inner.compress(head) + b"".join(inner.compress(zeros) for _ in range(100)) + inner.flush()
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        assert refusal(TAR_GZ, bomb, 50 * MB).code == "too_many_bytes"
        # Within the limit, and then it ends too early: all of it was unpacked on the way.
        assert refusal(TAR_GZ, bomb, 200 * MB).code == "malformed_archive"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * MB


def test_a_zip_entry_that_is_longer_than_it_says_is_cut_where_it_says():
    """The index is believed for the limit, so its sizes have to hold when the content is produced."""
    data = bytearray(zip_of(("a", bytes(50 * MB))))
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<L", 1000)
    assert index_of(ZIP, bytes(data), MB).bytes == 1000
    (blocks,) = (member.blocks for member in members(ZIP, source(bytes(data)), len(data), MB, go_on))
    with pytest.raises(ArchiveError, match="longer than the index says"):
        next(blocks)


def test_a_zip_entry_that_is_damaged_is_noticed():
    data = bytearray(zip_of(("a", b"hello hello"), method=zipfile.ZIP_STORED))
    data[data.index(b"hello")] ^= 1
    with pytest.raises(ArchiveError, match="checksum"):
        unpacked(ZIP, bytes(data))


def test_too_many_entries_are_refused_whatever_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.sandbox.archive_reader.ENTRIES_MAX", 10)
    monkeypatch.setattr("app.sandbox.archive_reader._HEADERS_MAX", 30)
    for form in ArchiveFormat:
        ten = [(f"f{index}", b"") for index in range(10)]
        assert index_of(form, ALL[form](*ten)).files == 10
        error = refusal(form, ALL[form](*ten, ("f10", b"")))
        assert (error.code, error.over_limit) == ("too_many_entries", True)
    assert refusal(TAR, tar_of(*[("./", b"")] * 40)).code == "too_many_entries"
    assert refusal(ZIP, zip_of(*[(f"{'./' * index}./", b"") for index in range(40)])).code == "too_many_entries"


@pytest.mark.parametrize("form", ArchiveFormat)
def test_an_archive_that_is_cut_anywhere_is_refused(form: ArchiveFormat):
    data = ALL[form](("a", os.urandom(2_000)), ("b/", b""), ("b/c", b"end"))
    whole = unpacked(form, data)
    end = len(data.rstrip(b"\0")) if form is TAR else len(data)
    for cut in {0, 1, 511, 512, 513, 2_000, 2_560, 3_072, end - 1, end // 2}:
        if cut < end:
            with pytest.raises(ArchiveError):
                unpacked(form, data[:cut])
    assert len(whole) == 3


@pytest.mark.parametrize("form", ArchiveFormat)
def test_something_else_is_refused(form: ArchiveFormat):
    for data in (b"", b"no archive at all", bytes(10_000)[:511], os.urandom(5_000), b"\x1f\x8b" + bytes(100)):
        assert refusal(form, data).code == "malformed_archive"


def test_a_zip_whose_index_lies_is_refused():
    whole = zip_of(("aa", b"1"))
    at = whole.index(b"PK\x01\x02")
    other_name = whole[: at + 46] + b"zz" + whole[at + 48 :]
    moved = bytearray(whole)
    moved[at + 42 : at + 46] = struct.pack("<L", 1)
    end = whole.index(b"PK\x05\x06")
    shifted = bytearray(whole)
    shifted[end + 16 : end + 20] = struct.pack("<L", at + 1)
    parts = bytearray(whole)
    parts[end + 4 : end + 6] = struct.pack("<H", 1)
    for data in (other_name, moved, shifted, whole + b"trailing"):
        assert refusal(ZIP, bytes(data)).code == "malformed_archive"
    assert refusal(ZIP, bytes(parts)).code == "unsupported"


def test_work_on_an_archive_stops_when_it_is_told_to():
    signal = AbortSignal()
    data = gz_of(tar_of(("a", bytes(5 * MB)), ("b", b"")))
    found = members(TAR_GZ, source(data), len(data), 100 * MB, signal.raise_if_aborted)
    member = next(found)
    next(member.blocks)
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        next(member.blocks)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_mutated_archive_is_read_or_refused_and_nothing_else(data: st.DataObject):
    form = data.draw(st.sampled_from(list(ArchiveFormat)))
    whole = ALL[form](("a", b"x" * 3_000), ("d/", b""), ("d/ä", b"two"), ("e" * 120, b"long"))
    mutated = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    if form is TAR_GZ and data.draw(st.booleans()):
        # Behind the checksum of the compression, where a mutation would hardly ever get.
        inner = bytearray(tar_of(("a", b"x" * 3_000), ("d/", b""), ("d/ä", b"two")))
        inner[data.draw(st.integers(0, len(inner) - 1))] ^= data.draw(st.integers(1, 255))
        mutated = bytearray(gz_of(bytes(inner)))
    cut = data.draw(st.integers(0, len(mutated)))
    blob = bytes(mutated if data.draw(st.booleans()) else mutated[:cut])
    try:
        index = index_of(form, blob)
        produced = unpacked(form, blob)
    except ArchiveError:
        return
    assert index.files + index.directories == len(produced)
    for path, _ in produced:
        assert path
        assert not path.startswith(b"/")
        assert b".." not in path.split(b"/")
