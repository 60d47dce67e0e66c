"""Test encodings: detected by mark and content, set by the user, and invalid bytes."""

import codecs
import json

import pytest

import eval
from data.reading.encodings import checked_encoding
from data.types import DataError
from tests.data.raw_files import error_of

pl = pytest.importorskip("polars")

ROWS = "user;item;timestamp;shop\nMüller;Käse;100;Köln\nMüller;Wein – 0,75 l;200;Spa\nØrsted;Crème brûlée;300;Nîmes\n"
IDS = ["Crème brûlée", "Käse", "Wein – 0,75 l"]
MARKED = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-le": codecs.BOM_UTF32_LE}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252", *MARKED]
)
def test_encoding_is_detected(load, encoding, partitions, ending):
    rows = ROWS.replace("\n", ending)
    content = MARKED.get(encoding, b"") + rows.encode(encoding)
    dataset = load("csv", content, partitions=partitions)
    assert dataset.item_ids.tolist() == IDS and dataset.user_ids.tolist() == ["Müller", "Ørsted"]
    named = [note for note in dataset.notes if "data.encoding" in note]
    assert len(named) == (not encoding.startswith("utf-8")) and all(
        "raw.txt: not UTF-8, read as" in note for note in named
    )
    assert load("csv", content, partitions=partitions).notes == dataset.notes  # from the cache


def test_utf_16_without_a_mark(load):
    for encoding in ("utf-16-le", "utf-16-be"):
        assert load("ml-100k", "1\t2\t3\t4\n".encode(encoding)).num_events == 1


@pytest.mark.parametrize(
    ("encoding", "text"), [("cp1251", "Москва"), ("shift_jis", "東京"), ("gb18030", "上海"), ("cp1250", "Łódź")]
)
def test_encoding_that_cannot_be_detected_must_be_set(load, encoding, text):
    content = f"user,item,timestamp\n1,{text},5\n1,3,6\n".encode(encoding)
    message = error_of(load, "csv", content)
    assert "raw.txt line 2, column item: not valid UTF-8: '" in message and "set data.encoding to it)" in message
    dataset = load("csv", content, encoding=encoding)
    assert dataset.item_ids.tolist() == ["3", text] and not any("UTF-8" in note for note in dataset.notes)


def test_damaged_utf_8_stays_utf_8(load):
    content = "user,item,timestamp\n1,Käse,5\n".encode() + b"1,K\xe4se,6\n"
    assert "raw.txt line 3, column item: not valid UTF-8: 'K\\xe4se'" in error_of(load, "csv", content)
    assert load("csv", content, on_bad_row="drop").item_ids.tolist() == ["Käse"]


def test_invalid_bytes_in_a_set_encoding(load):
    content = b"user,item,timestamp\n1,2,5\n1,\x81,6\n"
    assert error_of(load, "csv", content, encoding="cp1252").startswith("raw.txt line 3, column item: not valid cp1252")
    assert load("csv", content, encoding="cp1252", on_bad_row="drop").num_events == 1
    odd = ROWS.encode("utf-16")[:-1]
    assert "line 4" in error_of(load, "csv", odd)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "latin-1"])
def test_encoding_that_is_set(load, encoding):
    rows = ROWS.replace("–", "-")
    assert load("csv", rows.encode(encoding), encoding=encoding).item_ids.tolist() == [i.replace("–", "-") for i in IDS]


def test_unknown_encoding(load):
    for wrong in ("latin-9000", "base64", "cp125", ""):
        with pytest.raises(DataError, match=r"data.encoding: expected a text encoding that Python has, got "):
            checked_encoding(wrong, "data.encoding")
    assert "did you mean cp1252?" in error_of(load, "csv", ROWS, encoding="cp12522")
    assert "data.encoding: files of format parquet are not text" in error_of(load, "parquet", b"", encoding="cp1252")


def test_sequences_features_and_json(load, tmp_path):
    dataset = load("sequences", "Müller Käse Öl\n".encode("cp1252"))
    assert dataset.item_ids.tolist() == ["Käse", "Öl"] and "read as cp1252" in dataset.notes[0]
    (tmp_path / "items.csv").write_bytes("item;town\nKäse;Köln\nÖl;Nîmes\n".encode("cp1252"))
    items = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"town": "category"}}
    dataset = load("sequences", "Müller Käse Öl\n", features={"items": items})
    assert dataset.features[0].values.tolist() == ["Köln", "Nîmes"]
    assert "items.csv: not UTF-8, read as cp1252 (data.features.items.encoding)" in dataset.notes
    items["encoding"] = "cp1250"
    assert load("sequences", "Müller Käse Öl\n", features={"items": items}).features[0].values.tolist() == [
        "Köln",
        "Nîmes",
    ]
    content = json.dumps({"Käse": ["süß"], "Öl": ["fett"]}, ensure_ascii=False)
    (tmp_path / "items.json").write_bytes(content.encode("utf-16"))
    items = {"format": "attributes", "path": str(tmp_path / "items.json")}
    assert load("sequences", "Müller Käse Öl\n", features={"items": items}).features[0].values.tolist() == [
        "fett",
        "süß",
    ]


def test_file_of_users(load, tmp_path):
    dataset = load("csv", ROWS)
    for encoding in ("utf-8", "utf-8-sig", "cp1252", "utf-16"):
        (tmp_path / "users").write_bytes("Ørsted\n".encode(encoding))
        assert eval.chosen_users(tmp_path / "users", dataset).tolist() == [1]
    (tmp_path / "users").write_bytes(b"\x81\n")
    with pytest.raises(DataError, match="users: not valid utf-8"):
        eval.chosen_users(tmp_path / "users", dataset)
