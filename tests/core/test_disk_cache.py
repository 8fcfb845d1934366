"""Files that outlive the process: whole or absent, bounded, private."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from kina._core.disk_cache import DiskCache, default_folder

KIB = 1 << 10


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "a" / "cache", 64 * KIB)


def test_what_is_stored_is_found(cache):
    assert cache.get("key") is None
    cache.put("key", b"content\0of any kind")
    assert cache.get("key") == b"content\0of any kind"
    assert cache.get("other") is None
    cache.put("key", b"")
    assert cache.get("key") == b""
    assert DiskCache(cache.folder, 64 * KIB).get("key") == b""  # another process's


def test_the_folder_is_private(cache):
    cache.put("key", b"x")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.folder.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720])
def test_a_folder_that_others_can_write_to_is_refused(cache, caplog, mode):
    cache.put("key", b"x")
    os.chmod(cache.folder, mode)
    with caplog.at_level(logging.WARNING, "kina.cache"):
        assert cache.get("key") is None
        cache.put("another", b"y")
    assert f"{mode:o}" in cache.usage().refused
    assert "can be written by others" in caplog.text
    assert len(caplog.records) == 1  # said once
    assert cache.clear() == 0
    os.chmod(cache.folder, 0o700)
    assert cache.get("key") == b"x"
    assert cache.get("another") is None


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch):
    cache.put("key", b"x")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache.get("key") is None
    assert "belongs to user" in cache.usage().refused


def test_a_file_in_its_place_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("no folder")
    cache = DiskCache(path, KIB)
    cache.put("key", b"x")
    assert cache.get("key") is None
    assert path.read_text() == "no folder"
    assert cache.usage().refused


def damaged(whole: bytes) -> list[bytes]:
    return [
        b"",
        whole[:5],
        whole[:-1],
        whole + b"x",
        whole[:-1] + bytes([whole[-1] ^ 1]),
        b"other cache 1\n" + whole[14:],
        bytes(len(whole)),
    ]


@pytest.mark.parametrize("which", range(7))
def test_a_damaged_entry_counts_as_absent(cache, which):
    cache.put("key", b"content")
    (path,) = cache.folder.iterdir()
    path.write_bytes(damaged(path.read_bytes())[which])
    assert cache.get("key") is None
    assert not path.exists()
    cache.put("key", b"content")
    assert cache.get("key") == b"content"


def test_links_and_folders_are_no_entries(cache, tmp_path):
    cache.put("key", b"content")
    (path,) = cache.folder.iterdir()
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert cache.get("key") is None
    path.unlink()
    path.mkdir()
    assert cache.get("key") is None
    path.rmdir()
    os.mkfifo(path)
    assert cache.get("key") is None


def test_it_is_bounded_and_the_least_recently_used_go_first(cache):
    for number in range(6):
        cache.put(f"key{number}", bytes(10 * KIB))
        os.utime(cache.path(f"key{number}"), (number + 1, number + 1))
    assert cache.get("key0") is not None  # used: its time is renewed
    cache.put("new", bytes(10 * KIB))
    cache.put("newer", bytes(10 * KIB))
    assert cache.usage().nbytes <= 64 * KIB
    assert cache.get("key0") is not None
    assert cache.get("newer") is not None
    assert cache.get("key1") is None
    assert cache.get("key2") is None
    cache.put("huge", bytes(65 * KIB))
    assert cache.get("huge") is None
    assert cache.get("newer") is not None


def test_what_was_left_unfinished_goes_in_time(cache):
    cache.put("key", b"x")
    old, young = cache.folder / "new-old.kina-new", cache.folder / "new-young.kina-new"
    for path in (old, young):
        path.write_bytes(bytes(KIB))
    os.utime(old, (1, 1))
    cache.put("another", b"y")
    assert (old.exists(), young.exists()) == (False, True)
    assert cache.clear() == 2
    assert young.exists()


def test_a_disk_that_fails_is_a_cache_with_nothing(cache, caplog, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    cache.put("key", b"x")
    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "kina.cache"):
        cache.put("other", b"y")
    assert "No space left" in caplog.text
    assert [path.name for path in cache.folder.iterdir()] == ["key.kina"]  # nothing half done
    assert cache.get("key") == b"x"


def test_no_folder_is_no_cache():
    cache = DiskCache(None, KIB)
    cache.put("key", b"x")
    assert cache.get("key") is None
    assert cache.usage() == (None, 0, 0, KIB, None)
    assert cache.clear() == 0


def test_what_is_not_ours_stays(cache):
    """Also in a folder that its owner uses for other things."""
    cache.put("key", b"x")
    others = [
        cache.folder / name for name in ("model.bin", "notes.tmp", "new-things.tmp", "key.bin", "kina", "x.kina-old")
    ]
    for path in others:
        path.write_bytes(bytes(100 * KIB))
        os.utime(path, (1, 1))
    cache.put("another", bytes(60 * KIB))
    assert cache.usage().entries == 2
    assert cache.clear() == 2
    assert cache.usage().entries == 0
    assert all(path.exists() for path in others)


def test_threads_see_whole_entries_or_none(cache):
    contents = {bytes([number]) * (4 * KIB) for number in range(8)}
    failures, over = [], threading.Event()

    def write(content: bytes) -> None:
        while not over.is_set():
            cache.put("key", content)

    def read() -> None:
        while not over.is_set():
            found = cache.get("key")
            if found is not None and found not in contents:
                failures.append(found)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    over.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.get("key") in contents


@pytest.mark.parametrize(
    ("named", "base", "folder"),
    [
        ("/x/y", "/z", "/x/y"),
        ("", "/z", None),
        (None, "/z", "/z/kina"),
        (None, "relative", "/home/me/.cache/kina"),
        (None, None, "/home/me/.cache/kina"),
        ("~/cache", None, "/home/me/cache"),
        ("~nobody-of-this-name/cache", None, None),
    ],
)
def test_where_it_is(monkeypatch, named, base, folder):
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("KINA_CACHE_DIR", named), ("XDG_CACHE_HOME", base)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert default_folder() == (None if folder is None else Path(folder))
