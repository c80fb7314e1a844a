"""The small files of a checkpoint, and every way in which one can be wrong."""

import pytest
from compare import refused

from common.loading.files import read_json, read_json_if_there


def test_json_is_read_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": [1, "\u00e9"]}


def test_a_pair_of_surrogates_is_one_character(tmp_path):
    (tmp_path / "config.json").write_text(r'{"a": "\ud83d\ude00"}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": "\U0001f600"}


def test_a_missing_file_is_an_error_or_nothing(tmp_path):
    file = tmp_path / "config.json"
    assert str(tmp_path) in refused(FileNotFoundError, "config.json is missing", read_json, file)
    assert read_json_if_there(file) == {}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"a": 1', "is not JSON"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
        (rb'{"a": "\ud800"}', "is not JSON"),
        (rb'{"\uDC00\uD83D": 1}', "is not JSON"),
        (b"[1]", "does not hold a JSON object, but a list"),
        (b"", "is not JSON"),
    ],
    ids=lambda x: str(x)[:12],
)
@pytest.mark.parametrize("read", [read_json, read_json_if_there])
def test_a_file_that_cannot_be_understood_is_named(tmp_path, content, match, read):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert str(file) in refused(ValueError, match, read, file)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "config.json") == {"a": 1}
