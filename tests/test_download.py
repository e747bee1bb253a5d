"""Downloads, against a server on this machine that can send ranges, break off, and lie."""

import concurrent.futures
import errno
import hashlib
import http.server
import threading
from typing import ClassVar
from unittest import mock

import pytest

from balnorm.bench.data import DataError, check, download, sets
from balnorm.bench.data.downloads import fetch

CONTENTS = bytes(range(256)) * 8000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENTS under any name; ``/whole`` ignores ranges, ``/lies`` sends something else, ``/gone`` nothing."""

    breaks: ClassVar[list[int]] = []  # after how many bytes the next answers break off
    ranges: ClassVar[list[str | None]] = []

    def do_GET(self):
        wanted = self.headers.get("Range")
        Handler.ranges.append(wanted)
        if self.path.startswith("/gone"):
            self.send_error(404)
            return
        data = b"something else" if self.path.startswith("/lies") else CONTENTS
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and "/whole" not in self.path else 0
        if start and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = data[start:]
        if Handler.breaks:
            self.wfile.write(body[: Handler.breaks.pop(0)])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def server():
    Handler.breaks, Handler.ranges = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def file_at(url):
    return sets.DataFile(url, "set/file.bin", hashlib.md5(CONTENTS).hexdigest())


def quiet(*_):
    pass


def test_a_download_arrives_whole(server, tmp_path):
    seen = []
    path = fetch(file_at(f"{server}/a"), tmp_path, lambda *call: seen.append(call))
    assert path.read_bytes() == CONTENTS
    assert seen[0] == ("set/file.bin", 0, len(CONTENTS))
    assert seen[-1] == ("set/file.bin", len(CONTENTS), len(CONTENTS))
    assert {p.name for p in path.parent.iterdir()} == {"file.bin", "file.bin.lock"}
    fetch(file_at(f"{server}/a"), tmp_path, quiet)
    assert len(Handler.ranges) == 1  # what is there is not fetched again


@pytest.mark.parametrize("address", ["a", "whole"])
def test_a_broken_transfer_goes_on(server, tmp_path, address):
    Handler.breaks = [1_200_000, 300_000]
    for _ in range(2):
        with pytest.raises(DataError, match=r"could not download .*bytes are kept: repeat the command to resume"):
            fetch(file_at(f"{server}/{address}"), tmp_path, quiet)
        assert not (tmp_path / "set" / "file.bin").exists()
    assert fetch(file_at(f"{server}/{address}"), tmp_path, quiet).read_bytes() == CONTENTS
    if address == "a":
        assert Handler.ranges == [None, "bytes=1200000-", "bytes=1500000-"]


def test_a_complete_part_is_only_checked(server, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin.part").write_bytes(CONTENTS)
    assert fetch(file_at(f"{server}/a"), tmp_path, quiet).read_bytes() == CONTENTS


def test_a_wrong_file_does_not_get_in_place(server, tmp_path):
    with pytest.raises(
        DataError, match=r"other than the published file \(its MD5 differs\), which was deleted: try again"
    ):
        fetch(file_at(f"{server}/lies"), tmp_path, quiet)
    assert [p.name for p in (tmp_path / "set").iterdir()] == ["file.bin.lock"]
    with pytest.raises(DataError, match="404"):
        fetch(file_at(f"{server}/gone"), tmp_path, quiet)
    (tmp_path / "set" / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="delete or move it"):
        fetch(file_at(f"{server}/a"), tmp_path, quiet)
    assert (tmp_path / "set" / "file.bin").read_bytes() == b"mine"


def test_a_folder_without_locks_is_good_enough(server, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert fetch(file_at(f"{server}/a"), tmp_path, quiet).read_bytes() == CONTENTS


def test_two_at_a_time_fetch_it_once(server, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = [pool.submit(fetch, file_at(f"{server}/a"), tmp_path, quiet) for _ in range(4)]
    assert {future.result().read_bytes() for future in done} == {CONTENTS}
    assert len(Handler.ranges) == 1
    assert {p.name for p in (tmp_path / "set").iterdir()} == {"file.bin", "file.bin.lock"}


def test_a_root_that_cannot_be_used_gives_one_sentence(server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="could not download"):
        fetch(file_at(f"{server}/a"), tmp_path / "file", quiet)


def test_what_is_unpacked_is_not_fetched_again(tmp_path):
    file = sets.DataFile("http://127.0.0.1:9/x", "set.tar", "", ("set/a.bin", "set/b.bin"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.bin").touch()
    (tmp_path / "set" / "b.bin.xz").touch()
    fetch(file, tmp_path, quiet)
    assert not (tmp_path / "set.tar").exists()


def test_no_server_gives_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"could not download http://127.0.0.1:9/x") as raised:
        fetch(file_at("http://127.0.0.1:9/x"), tmp_path, quiet)
    assert "\n" not in str(raised.value)


def test_a_set_is_downloaded_and_checked(server, tmp_path, monkeypatch, capsys):
    import dataclasses

    files = (file_at(f"{server}/a"),)
    monkeypatch.setitem(sets.SETS, "mnist", dataclasses.replace(sets.SETS["mnist"], files=files))
    assert check("mnist", tmp_path) == {"set/file.bin": "missing"}
    assert download("mnist", tmp_path) == [tmp_path / "set" / "file.bin"]
    assert "set/file.bin" in capsys.readouterr().out
    assert check("mnist", tmp_path) == {"set/file.bin": "good"}
    (tmp_path / "set" / "file.bin").write_bytes(b"short")
    assert check("mnist", tmp_path) == {"set/file.bin": "damaged"}
    (tmp_path / "set" / "file.bin").unlink()
    said = []
    download("mnist", tmp_path, lambda *progress: said.append(progress))
    assert said[0] == ("set/file.bin", 0, len(CONTENTS))
    assert said[-1] == ("set/file.bin", len(CONTENTS), len(CONTENTS))
    assert capsys.readouterr().out == ""
    assert download("digits", tmp_path) == []
    with pytest.raises(ValueError, match="the data set must be one of"):
        download("imagenet", tmp_path)
