"""A file's parts are read, and checked, one by one."""

import numpy as np
import pytest

from kmem.sharding import files

ARRAYS = [
    np.arange(7, dtype="float32"),
    np.zeros((0, 3), "float32"),
    np.arange(12, dtype="uint8").reshape(3, 4).T,
    np.float64(3.5),
]
CONTENTS = b"".join(np.ascontiguousarray(x).tobytes() for x in ARRAYS)


@pytest.fixture(params=[1, 16, 24, 1000])
def written(request, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)
    with files.Writer(tmp_path / "a.shard") as writer:
        for array in ARRAYS:
            writer.write(array)
    return tmp_path / "a.shard", writer.num_bytes, writer.checksums


def test_what_is_written_is_read(written):
    path, num_bytes, checksums = written
    assert path.read_bytes() == CONTENTS
    assert num_bytes == len(CONTENTS) == 48
    assert len(checksums) == -(-48 // files.BLOCK_BYTES)
    reader = files.Reader(*written)
    for start, stop in [(0, 48), (3, 5), (15, 33), (47, 48), (20, 20)]:
        assert reader.read(start, stop) == CONTENTS[start:stop]


def test_only_what_is_read_is_checked(written):
    path = written[0]
    path.write_bytes(CONTENTS[:40] + b"?" + CONTENTS[41:])
    reader = files.Reader(*written)
    with pytest.raises(ValueError, match=r"a\.shard with other contents"):
        reader.read(30, 48)
    if files.BLOCK_BYTES < 40:
        assert reader.read(0, 24) == CONTENTS[:24]


def test_a_truncated_file_is_refused(written):
    written[0].write_bytes(CONTENTS[:-1])
    with pytest.raises(ValueError, match="with 47 bytes instead of 48"):
        files.Reader(*written)


def test_a_missing_file_is_refused(written):
    written[0].unlink()
    with pytest.raises(ValueError, match=r"a\.shard with no such file"):
        files.Reader(*written)


def test_a_file_that_cannot_be_finished_does_not_appear(tmp_path):
    with pytest.raises(KeyError), files.Writer(tmp_path / "a.shard") as writer:
        writer.write(ARRAYS[0])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_index_is_the_old_one_or_the_new(tmp_path):
    files.write_index(tmp_path, {"is": "old"})
    files.write_index(tmp_path, {"is": "new"})
    assert files.read_index(tmp_path)["is"] == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "index.json"]
