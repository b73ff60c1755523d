"""Matrix and filter files: valid content is read, invalid content is reported by line."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.data.sources.lines import Defects
from ramen.data.sources.matrices import ExpectedShape, read_matrix, read_pairs
from ramen.errors import DataError


def read_text_matrix(path: Path, text: str) -> tuple[sp.csr_matrix, list[str]]:
    path.write_text(text)
    defects = Defects()
    return read_matrix(path, defects), [str(defect) for defect in defects.found]


@pytest.mark.parametrize("name", ["m.txt", "m.txt.gz", "m.npz"])
def test_read_matrix_keeps_empty_rows(tmp_path: Path, name: str) -> None:
    wanted = sp.csr_matrix(np.array([[0, 0, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32))
    text = b"5 3\n\n0:1.0 2:1\n\n1:1e0\n\n"
    path = tmp_path / name
    if name == "m.npz":
        sp.save_npz(path, wanted)
    else:
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    defects = Defects()
    found = read_matrix(path, defects)
    assert not defects.found
    assert found.shape == wanted.shape
    assert np.array_equal(found.indptr, wanted.indptr) and np.array_equal(found.indices, wanted.indices)


def test_large_text_matrix_equals_scipy_matrix(tmp_path: Path) -> None:
    wanted = sp.random(70_000, 50, density=0.03, format="csr", rng=np.random.default_rng(0))
    rows = (wanted.indices[wanted.indptr[i] : wanted.indptr[i + 1]] for i in range(wanted.shape[0]))
    lines = [" ".join(f"{column}:0.5" for column in sorted(row)) for row in rows]
    found, defects = read_text_matrix(tmp_path / "m.txt", "\n".join(["70000 50", *lines]) + "\n")
    assert not defects
    assert (found != (wanted != 0)).nnz == 0


def test_values_become_one_and_zeros_are_dropped(tmp_path: Path) -> None:
    found, defects = read_text_matrix(tmp_path / "m.txt", "2 3\n0:0.25 1:0 2:7\r\n \t1:3 \n")
    assert not defects
    assert found.toarray().tolist() == [[1, 0, 1], [0, 1, 0]]


def test_matrix_of_empty_rows_is_read(tmp_path: Path) -> None:
    found, defects = read_text_matrix(tmp_path / "m.txt", "2 3\n\n\n")
    assert not defects and found.shape == (2, 3) and found.nnz == 0


BROKEN = [
    ("3 4\n0:1\n\n", ":1: header says 3 rows, found 2; write an empty line for an empty row"),
    ("1 4\n0:1\n1:1\n", ":1: header says 1 rows, found 2; an empty line at the end counts as a row"),
    ("2 4\n\n1:1 0:1 1:1\n", ":3: duplicate column 1 in this row; list each column once"),
    (
        "1 4\n2:1 0:-2\n",
        ":2: expected a value of 0 or more, found -2; leave out false pairs, or set them to 0",
    ),
    (
        "1 99999999999999999999\n0:1\n",
        ":1: expected at most 2147483647 rows and columns, found '1 99999999999999999999'",
    ),
    (  # exceeds int64
        "1 4\n9223372036854775808:1\n",
        ":2: expected columns below 4 (from the header), found 9223372036854775808; columns start at zero",
    ),
    ("1 4\n0:1 4:1\n", ":2: expected columns below 4 (from the header), found 4; columns start at zero"),
    ("1 4\n0:1 x:1\n", ":2: expected `column:value` pairs, found 'x:1'"),
    ("1 4\n0:1 1\n", ":2: expected `column:value` pairs, found '1'"),
    ("1 4\n1:2:3\n", ":2: expected `column:value` pairs, found '1:2:3'"),
    ("1 4\n0:nan\n", ":2: expected `column:value` pairs, found '0:nan'"),
    ("1 4\n-1:1\n", ":2: expected `column:value` pairs, found '-1:1'"),
    ("2147483648 1\n", ":1: expected at most 2147483647 rows and columns, found '2147483648 1'"),
    (f"{'9' * 5000} 1\n", f":1: expected at most 2147483647 rows and columns, found '{'9' * 40}...'"),
    ("0:1 1:1\n", ":1: expected a header `rows columns`, found '0:1 1:1'"),
    ("", ":1: expected a header `rows columns`, found ''"),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN)
def test_broken_matrix_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trn_X_Y.txt"
    _, defects = read_text_matrix(path, text)
    assert defects == [f"{path}{expected}"]


def test_reading_stops_after_twenty_defects(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_text_matrix(tmp_path / "m.txt", "100 4\n" + "oops\n" * 100)
    assert len(error.value.defects) == 20
    assert error.value.defects[-1].line == 21


def test_truncated_gzip_names_the_last_readable_line(tmp_path: Path) -> None:
    path, defects = tmp_path / "m.txt.gz", Defects()
    packed = gzip.compress(b"20000 7\n" + b"".join(f"{i % 7}:{i}\n".encode() for i in range(20_000)))
    path.write_bytes(packed[: len(packed) // 2])
    read_matrix(path, defects)
    assert [defect.file for defect in defects.found] == [str(path)]
    assert "cannot be decompressed after this line" in defects.found[0].expected and (defects.found[0].line or 0) > 1000


def test_invalid_gzip_is_reported_without_a_line(tmp_path: Path) -> None:
    path, defects = tmp_path / "m.txt.gz", Defects()
    path.write_bytes(b"no gzip at all")
    read_matrix(path, defects)
    (defect,) = defects.found
    assert str(defect).startswith(f"{path}: cannot be decompressed (Not a gzipped")


def test_damaged_npz_is_a_defect_and_never_unpickled(tmp_path: Path) -> None:
    path, objects, defects = tmp_path / "m.npz", tmp_path / "o.npz", Defects()
    path.write_bytes(b"PK\x03\x04 nothing")
    read_matrix(path, defects)
    np.savez(objects, format=np.array([object()], dtype=object), shape=np.array([1, 1]))
    read_matrix(objects, defects)
    assert [str(defect).split(": ", 1)[1] for defect in defects.found] == [
        "cannot be read as a scipy sparse matrix (File is not a zip file)",
        "cannot be read as a scipy sparse matrix (`format` holds object, expected text)",
    ]


def write_npz(path: Path, **changes: object) -> Path:
    """Write a 3 x 4 matrix in scipy's format with some arrays replaced; None = left out."""
    arrays: dict[str, object] = {
        "format": b"csr", "shape": [3, 4], "indices": np.array([0, 2, 3], np.int32),
        "indptr": np.array([0, 1, 1, 3], np.int32), "data": np.ones(3, np.float32),
    } | changes  # fmt: skip
    np.savez_compressed(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


INVALID_NPZ = [
    ({"indices": np.array([0.0, 2.5, 3.0])}, "`indices` holds float64, expected integers"),
    ({"indptr": np.array([0, 1, 1, 3], complex)}, "`indptr` holds complex128, expected integers"),
    ({"data": np.ones(3, complex)}, "`data` holds complex128, expected numbers"),
    ({"data": np.array(["a", "b", "c"])}, "`data` holds str32, expected numbers"),
    ({"data": np.zeros(3, "M8[s]")}, "`data` holds datetime64[s], expected numbers"),
    ({"data": np.array([None, 1, 2])}, "`data` holds object, expected numbers"),
    ({"data": np.ones((3, 1))}, "`data` claims (3, 1) float64 values, but holds 24 bytes"),
    ({"data": np.ones(2)}, "3 positions, but 2 values"),
    ({"indices": np.array([0, 2, 4])}, "expected a column below 4, found 4"),
    ({"indices": np.array([0, -2, 3])}, "expected a column below 4, found -2"),
    ({"indices": np.array([0, 2, 2**64 - 1], np.uint64)}, "expected a column below 4, found 18446744073709551615"),
    ({"indptr": np.array([0, 3, 1, 3])}, "`indptr` does not divide 3 values into 3 rows"),
    ({"indptr": np.array([0, 1, 3])}, "`indptr` does not divide 3 values into 3 rows"),
    ({"shape": [10**12, 4]}, "expected two numbers from 0 to 2147483647 as its shape"),
    ({"shape": [3, -4]}, "expected two numbers from 0 to 2147483647 as its shape"),
    ({"shape": [2147483647, 4]}, "`indptr` does not divide 3 values into 2147483647 rows"),
    ({"format": b"dia"}, "expected the format csr, csc, coo, found 'dia'; convert it with .tocsr()"),
    ({"format": None}, "no arrays `format` and `shape`; write it with scipy.sparse.save_npz"),
    ({"indices": None}, "no array `indices`"),
]


@pytest.mark.parametrize(("changes", "expected"), INVALID_NPZ)
def test_npz_with_invalid_arrays_is_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    path, defects = write_npz(tmp_path / "m.npz", **changes), Defects()
    read_matrix(path, defects)
    assert [str(defect) for defect in defects.found] == [
        f"{path}: cannot be read as a scipy sparse matrix ({expected})"
    ]


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float64])
def test_all_npz_formats_and_dtypes_are_read(tmp_path: Path, form: str, dtype: object) -> None:
    wanted = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    sp.save_npz(tmp_path / "m.npz", getattr(sp, f"{form}_matrix")(wanted.astype(dtype)))
    defects = Defects()
    found = read_matrix(tmp_path / "m.npz", defects, ExpectedShape(3, 4))
    assert not defects.found and found.toarray().tolist() == wanted.tolist()


def write_claim(path: Path, count: int, *, claimed_bytes: int | None = None) -> Path:
    """Write an archive whose array `data` claims `count` values but has 3."""
    write_npz(path, data=None)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", header.getvalue() + np.ones(3, np.float32).tobytes())
        if claimed_bytes is not None:
            archive.filelist[-1].file_size = claimed_bytes
    return path


def test_npz_claims_are_checked_before_memory_is_allocated(tmp_path: Path) -> None:
    cases = {
        write_claim(tmp_path / "a.npz", 10**12): "`data` claims (1000000000000,) float32 values, but holds 12 bytes",
        write_claim(tmp_path / "b.npz", 10**12, claimed_bytes=4 * 10**12 + 128): "more than the file can hold",
        write_claim(tmp_path / "c.npz", 10**5, claimed_bytes=4 * 10**5 + 128): "",
    }
    tracemalloc.start()
    for path, expected in cases.items():
        defects = Defects()
        read_matrix(path, defects)
        assert len(defects.found) == 1 and expected in defects.found[0].expected, path
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_npz_larger_than_free_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, defects = tmp_path / "m.npz", Defects()
    sp.save_npz(path, sp.csr_matrix(np.ones((1, 300_000))), compressed=True)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": 0})())
    read_matrix(path, defects)
    assert "of memory, 0.0 GB are free" in defects.found[0].expected


@pytest.mark.parametrize("change", ["encrypted", "stream", "checksum", "method", "cut"])
def test_damaged_or_encrypted_archive_is_one_defect(tmp_path: Path, change: str) -> None:
    path, defects = write_npz(tmp_path / "m.npz"), Defects()
    data = bytearray(path.read_bytes())
    local, central = data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02")
    if change == "encrypted":
        data[local + 6] |= 1
        data[central + 8] |= 1
    elif change == "stream":
        data[local + 60 : local + 90] = bytes(30)
    elif change == "checksum":
        data[central + 16] ^= 255
        data[local + 14] ^= 255
    elif change == "method":
        data[local + 8] = data[central + 10] = 14
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)
    read_matrix(path, defects)
    assert len(defects.found) == 1 and "cannot be read as a scipy sparse matrix (" in defects.found[0].expected
    assert change != "encrypted" or "(encrypted; write it without a password)" in defects.found[0].expected


@pytest.mark.parametrize("name", ["m.txt", "m.npz"])
def test_wrong_shape_is_refused_before_entries_are_read(tmp_path: Path, name: str) -> None:
    path, defects = tmp_path / name, Defects()
    if name == "m.npz":
        write_npz(path, format=b"coo", row=[0], col=[0], data=[1.0], shape=[2147483647, 20])
    else:
        path.write_text("2147483647 20\n")
    tracemalloc.start()
    read_matrix(path, defects, ExpectedShape(3, 4, "texts of a", "texts of b"))
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    expected = "expected 3 rows (texts of a) and 4 columns (texts of b), found 2147483647 and 20"
    assert [str(defect) for defect in defects.found] == [
        f"{path}: {expected}; row i of every file must be the same item"
    ]


def test_filter_file_accepts_numbers_of_any_length(tmp_path: Path) -> None:
    path, defects = tmp_path / "f.txt", Defects()
    path.write_text(f"{'0' * 5000}1 1\n{'9' * 5000} 1\n")
    assert list(zip(*read_pairs(path, (3, 4), defects).nonzero(), strict=True)) == [(1, 1)]
    assert len(defects.found) == 1 and f":2: expected a row below 3 and a column below 4, found {'9' * 40}..." in str(
        defects.found[0]
    )


def test_npz_with_duplicate_column_is_refused(tmp_path: Path) -> None:
    path, defects = tmp_path / "m.npz", Defects()
    sp.save_npz(path, sp.csr_matrix((np.ones(3), np.array([0, 2, 2]), np.array([0, 1, 3])), shape=(2, 4)))
    read_matrix(path, defects)
    (defect,) = defects.found
    assert str(defect) == f"{path}:2: duplicate column 2 in this row; list each column once"


@pytest.mark.parametrize(
    ("text", "pairs"),
    [("", []), ("1 2\n", [(1, 2)]), ("0 0\n\n0 0\n2\t3", [(0, 0), (2, 3)]), ("1,2\n", [(1, 2)])],
)
def test_filter_file_may_be_empty_or_repeat_pairs(tmp_path: Path, text: str, pairs: list[tuple[int, int]]) -> None:
    path, defects = tmp_path / "filter_labels_test.txt", Defects()
    path.write_text(text)
    found = read_pairs(path, (3, 4), defects)
    assert not defects.found and found.shape == (3, 4)
    assert list(zip(*found.nonzero(), strict=True)) == pairs


def test_broken_filter_line_names_the_line(tmp_path: Path) -> None:
    path, defects = tmp_path / "f.txt", Defects()
    path.write_text("0 1\n3 0\n1\n")
    read_pairs(path, (3, 4), defects)
    assert [str(defect) for defect in defects.found] == [
        f"{path}:2: expected a row below 3 and a column below 4, found 3 0; indices start at zero",
        f"{path}:3: expected `row column`, found '1'",
    ]


def test_reading_stops_after_more_rows_than_the_header_states(tmp_path: Path) -> None:
    file = tmp_path / "trn_X_Y.txt.gz"
    file.write_bytes(gzip.compress(b"60 30\n" + b"\n" * 1_000_000, 1))
    defects = Defects()
    read_matrix(file, defects)
    assert str(defects.found[0]).endswith(
        ":1: header says 60 rows, found 65536 or more; an empty line at the end counts as a row"
    )


def test_duplicate_columns_are_one_defect_per_row(tmp_path: Path) -> None:
    file, defects = tmp_path / "trn_X_Y.txt", Defects()
    file.write_text("2 3\n" + "0:1 " * 50 + "\n1:1 1:1\n")
    read_matrix(file, defects)
    assert [defect.line for defect in defects.found] == [2, 3]


def test_compressed_file_with_too_many_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.data.sources.lines.MAX_LINE", 1 << 12)
    packed, plain = tmp_path / "filter.txt.gz", tmp_path / "filter.txt"
    packed.write_bytes(gzip.compress(b"0 0\n" * 100_000))
    plain.write_bytes(b"\n" * 100_000)
    defects = Defects()
    read_pairs(plain, (1, 1), defects)
    assert not defects.found
    read_pairs(packed, (1, 1), defects)
    assert len(defects.found) == 1
    assert str(defects.found[0]).startswith(f"{packed}: expands to at least ")
    assert f"lines, too many for a file of {packed.stat().st_size} bytes" in str(defects.found[0])
