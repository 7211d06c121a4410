"""The folder of the disk tier: which blocks lie in which file, appending, reading, making room. Every call may be made
from any thread. Whatever is damaged, cut short, or gone because another process removed it, is a miss.

Each process appends to a file of its own, which it holds locked; nobody removes a locked file. All processes that share
a folder read each other's whole records: at the start, and whenever somebody looks what has come since. A key in the
folder names blocks, so that names survive a restart."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

from twostroke.kv.prefix_index import PrefixNode
from twostroke.kv.tiers import segment
from twostroke.kv.tiers.files import (
    SUFFIX,
    Found,
    OpenFiles,
    Segment,
    abandoned_files,
    modified,
    open_folder,
    segment_files,
    segment_sizes,
    size,
    write_all,
)
from twostroke.kv.tiers.segment import DamagedSegmentError

SEGMENT_BYTES = 256 << 20
LEAST_SEGMENTS = 8
"""That the space is cut into, so that making room takes no large part of it away."""
PAUSE_S = 30.0
"""After a write failed."""
SCAN_S = 2.0
"""What a start waits for the folder to be read; the rest is read on a thread."""
LOOK_S = 0.25
"""The longest that one look at what others wrote goes on; the next one goes on from there."""
_LOG = logging.getLogger(__name__)


class DiskTier:
    def __init__(self, folder: Path, limit_bytes: int, identity: str, block_size: int) -> None:
        """`identity`: whose KV it is; files of another are left alone, but for their space."""
        self._folder, self.limit_bytes = folder, limit_bytes
        self._segment_bytes = min(SEGMENT_BYTES, limit_bytes // LEAST_SEGMENTS)
        self._identity, self._block_size = identity.encode(), block_size
        self._lock = threading.RLock()
        self._records: dict[tuple[bytes, int], Found] = {}  # by name and group
        self._read_to: dict[Path, tuple[int, int]] = {}
        """Of each file that is not our own now, up to where its records are known, and its size then."""
        self._reading = threading.Lock()
        """Held by whoever reads heads of records: one at a time."""
        self._stops_reading = False
        """Somebody waits for that lock, to forget all."""
        self._cleared_to: dict[Path, int] = {}
        """Of files that another process wrote to when all was forgotten, up to where nothing is believed."""
        self._own: Segment | None = None
        self._descriptor = -1
        self._paused_until_s = 0.0
        self.used_bytes = 0
        """Of all files in the folder, as last looked at."""
        self.key = open_folder(folder)
        for path in abandoned_files(self._folder):
            self._remove(path)
        self._unread = sorted(segment_files(self._folder), key=modified, reverse=True)
        self.used_bytes = sum(map(size, self._unread))
        self.scan(time.monotonic() + SCAN_S)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_scanned(self) -> bool:
        return not self._unread

    def scan(self, until_s: float | None = None) -> None:
        """Enter what earlier processes left, the latest first, until it is all read, or that moment."""
        while True:
            with self._lock:
                if not self._unread or self._stops_reading or (until_s is not None and time.monotonic() > until_s):
                    return
                path = self._unread.pop(0)
            with self._reading:
                self._enter(path)

    def look(self) -> int:
        """Enter what other processes have written since the last look, and drop what they have removed; returns how
        many blocks came. Files grow while they are looked at: a record is believed when all of it is there."""
        if not self._reading.acquire(blocking=False):
            return 0  # somebody is at it
        try:
            until_s, before, sizes = time.monotonic() + LOOK_S, len(self), segment_sizes(self._folder)
            with self._lock:
                self.used_bytes = sum(sizes.values())
                own, unread = None if self._own is None else self._own.path, set(self._unread)
                gone = [path for path in self._read_to if path not in sizes]
            self._drop(gone)
            for path, num_bytes in sizes.items():
                if path == own or path in unread or self._read_to.get(path, (0, -1))[1] == num_bytes:
                    continue
                if self._stops_reading or time.monotonic() > until_s:
                    break
                self._enter(path)
            return len(self) - before
        finally:
            self._reading.release()

    def _enter(self, path: Path) -> None:
        """Read the heads of a file's records from where they are not known."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            num_bytes = os.fstat(descriptor).st_size
            identity, tag = segment.read_header(descriptor, self.key)
            if identity != self._identity:
                self._read_to[path] = (num_bytes, num_bytes)
                return
            start, _ = self._read_to.get(path, (segment.first_offset(identity), 0))
            entered = Segment(path, tag, num_bytes)
            scanned = segment.scan(descriptor, self.key, tag, self._block_size, start, lambda: self._stops_reading)
            if scanned is None:
                return
            records, end = scanned
            with self._lock:
                self._read_to[path] = (end, num_bytes)
                cleared_to = self._cleared_to.get(path, 0)
                for record in records:
                    if record.offset >= cleared_to:
                        self._records.setdefault((record.name, record.group), Found(entered, record))
            if end == segment.first_offset(identity):
                self._remove(path)  # nothing in it can be used
        except DamagedSegmentError:
            self._remove(path)
        except OSError:
            return
        finally:
            os.close(descriptor)

    # Finding and reading

    def find(self, node: PrefixNode, group: int) -> Found | None:
        """By its names; its tokens are compared when it is read."""
        found = self._records.get((node.digest, group))
        if found is None or node.parent is None or found.record.before != node.parent.digest:
            return None
        return found

    def read(self, found: Found, node: PrefixNode, into: memoryview, files: OpenFiles | None = None) -> bool:
        """Whether `into` has the block now; else it is forgotten. `files`: kept open from one block to the next."""
        try:
            with contextlib.ExitStack() as stack:
                files = files or stack.enter_context(OpenFiles())
                descriptor = files.of(found)
                segment.read_payload(descriptor, self.key, found.segment.tag, found.record, node.tokens, into)
        except (OSError, DamagedSegmentError):
            self._forget(found)
            return False
        return True

    def used(self, found: Found) -> None:
        """What was used last is removed last."""
        with contextlib.suppress(OSError):
            os.utime(found.segment.path)

    def _forget(self, found: Found) -> None:
        name = (found.record.name, found.record.group)
        with self._lock:
            if self._records.get(name) is found:
                del self._records[name]

    def forget(self, node: PrefixNode, group: int) -> None:
        """Never find it again, in any process: its content is not to be trusted. What lies beside it in its file stays;
        the file goes where it cannot be marked."""
        with self._lock:
            found = self._records.pop((node.digest, group), None)
            if found is None:
                return
            try:
                self._bury(found)
            except (FileNotFoundError, DamagedSegmentError):
                return  # nobody finds it
            except OSError:
                if found.segment is self._own:
                    self._seal()
                num_bytes = size(found.segment.path)
                if self._remove(found.segment.path):
                    self.used_bytes -= num_bytes

    def _bury(self, found: Found) -> None:
        path = found.segment.path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(descriptor)
            segment.bury(descriptor, self.key, found.segment.tag, found.record)
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))  # this was no use of it
        finally:
            os.close(descriptor)

    # Writing

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    def write(self, node: PrefixNode, group: int, payload: memoryview) -> bool:
        """Append a block; False: there is no room, or the disk does not take it now."""
        assert node.parent is not None
        with self._lock:
            if (node.digest, group) in self._records:
                return True
            if self.is_paused or not self._has_room(payload.nbytes):
                return False
            assert self._own is not None
            own, offset = self._own, self._own.size
            names = (node.digest, node.parent.digest)
            record, head = segment.encode(self.key, own.tag, offset, group, *names, node.tokens, payload)
            try:
                write_all(self._descriptor, [memoryview(head), payload], offset)
            except OSError as error:
                self._fail(error, offset)
                return False
            own.size = record.end
            self.used_bytes += record.end - offset
            self._records[node.digest, group] = Found(own, record)
            return True

    def _has_room(self, num_bytes: int) -> bool:
        """A file of our own with room for a block; the longest unused are removed where the folder is full."""
        own = self._own
        if own is not None and own.size + num_bytes > self._segment_bytes and own.size > num_bytes:
            self._seal()
        elif own is not None and not own.path.exists():
            self._seal()  # somebody cleared the folder
        if self._own is None:
            files = segment_files(self._folder)
            self.used_bytes = sum(map(size, files))
            self._make_room(files, min(self._segment_bytes, self.limit_bytes))
            try:
                self._begin()
            except OSError as error:
                self._fail(error, None)
                return False
        if self.used_bytes + num_bytes > self.limit_bytes:
            self._make_room(segment_files(self._folder), num_bytes)
        if self.used_bytes + num_bytes <= self.limit_bytes:
            return True
        self._paused_until_s = time.monotonic() + PAUSE_S  # other processes hold what there is
        return False

    def _make_room(self, files: list[Path], num_bytes: int) -> None:
        for path in sorted(files, key=modified):
            if self.used_bytes + num_bytes <= self.limit_bytes:
                return
            num_freed = size(path)
            if self._remove(path):
                self.used_bytes -= num_freed

    def _begin(self) -> None:
        """A file of our own: named when it is locked and has its header, so that nobody sees less."""
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".begun-")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begun = segment.header(self.key, self._identity)
            write_all(handle, [memoryview(begun)], 0)
            path = self._folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}{SUFFIX}"
            Path(temporary).rename(path)
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        self._own, self._descriptor = Segment(path, begun[-segment.TAG_BYTES :], len(begun)), handle
        self.used_bytes += len(begun)

    def _seal(self) -> None:
        if self._own is not None:
            self._read_to[self._own.path] = (self._own.size, self._own.size)
            os.close(self._descriptor)  # and its lock goes
            self._own, self._descriptor = None, -1

    def _fail(self, error: OSError, offset: int | None) -> None:
        """What was begun is cut off again. A full disk is common, and ends: it is tried again later."""
        if offset is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, offset)
        self._seal()
        if self._paused_until_s == 0.0:
            what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"failed ({error.strerror or error})"
            _LOG.warning("KV is not kept on disk for %.0f s: the disk of %s %s", PAUSE_S, self._folder, what)
        self._paused_until_s = time.monotonic() + PAUSE_S

    # The folder

    def _remove(self, path: Path) -> bool:
        """Unless a process writes to it."""
        if self._own is not None and path == self._own.path:
            return False
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self._drop([path])
        return True

    def _drop(self, gone: Collection[Path]) -> None:
        """Of files that are no longer there, forget all."""
        if not gone:
            return
        with self._lock:
            for path in gone:
                self._read_to.pop(path, None)
                self._cleared_to.pop(path, None)
            for name in [name for name, found in self._records.items() if found.segment.path in gone]:
                del self._records[name]

    def stop_reading(self) -> None:
        """Whoever reads what lies in the folder gives up, until it is cleared: that would take long."""
        self._stops_reading = True

    def clear(self) -> None:
        """Remove every block that no other process is writing beside, and forget all. Of files that stay, what is
        written later alone is found."""
        self.stop_reading()
        with self._reading, self._lock:
            self._stops_reading = False
            self._seal()
            self._unread.clear()
            kept = [path for path in segment_files(self._folder) if not self._remove(path)]
            self._cleared_to = {path: size(path) for path in kept}
            self._records.clear()
            self.used_bytes = sum(self._cleared_to.values())

    def close(self) -> None:
        with self._lock:
            self._seal()
