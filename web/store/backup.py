"""A copy of a data folder while a server uses it, and back."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from mtmd.web.store.database import check_pages, has_no_content, open_readonly
from mtmd.web.store.errors import StoreBusyError, StoreError, store_errors
from mtmd.web.store.folder import FolderLock, make_private, private_file, sync_folder
from mtmd.web.store.image_files import ImageFiles, digest, names_in
from mtmd.web.store.recovery import (
    DATABASE,
    Recovered,
    displaced_folder,
    link_or_copy,
    new_database,
    recover,
    replace_database,
)
from mtmd.web.store.tables import MIGRATIONS

TRIES = 3  # pictures may be deleted while they are copied


@dataclass(frozen=True)
class Copied:
    """Describes what a backup, or a folder restored from one, holds. `missing`: pictures of
    messages that were not there to be copied. `set_aside`: the name of the folder with what was
    there before.
    """

    conversations: int
    messages: int
    pictures: int
    missing: int
    set_aside: str | None = None


def backup(folder: Path, target: Path) -> Copied:
    """Database and pictures of the data folder `folder` as the folder `target`, which appears once
    it is whole and on the disk; only its owner may read it. Pictures are hard links where both are
    on one disk. Servers on the folder go on meanwhile. Raises StoreError.
    """
    _check_is_there(folder)
    with store_errors("copied"):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StoreError(
                "found files at the path of the backup, expected none or an "
                "empty folder; give another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        part.mkdir(mode=0o700)
        try:
            copied = _copy(folder, part)
            if target.exists():
                target.rmdir()
            part.replace(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync_folder(target.parent)
        return copied


def _copy(folder: Path, target: Path) -> Copied:
    """Pictures before the database: one that is deleted meanwhile is of a conversation that is."""
    images = target / "images"
    images.mkdir(mode=0o700)
    linked = set[str]()
    for _ in range(TRIES):
        for name in names_in(folder / "images"):
            _link(folder, target, name, linked)
        (target / DATABASE).unlink(missing_ok=True)
        private_file(target / DATABASE).close()
        with closing(open_readonly(folder / DATABASE)) as source:
            _copy_database(source, target / DATABASE)
        with closing(open_readonly(target / DATABASE)) as made:
            check_pages(made)
            needed = {row[0] for row in made.execute("SELECT sha256 FROM images")}
            copied = _counted(made, len(needed))
        for name in needed - linked:
            _link(folder, target, name, linked)
        if needed <= linked:
            break
    for name in linked - needed:
        (images / name).unlink()
    sync_folder(images)
    sync_folder(target)
    missing = len(needed - linked)
    return Copied(copied.conversations, copied.messages, len(needed) - missing, missing)


def _link(folder: Path, target: Path, name: str, linked: set[str]) -> None:
    if name not in linked:
        with suppress(FileNotFoundError):
            link_or_copy(folder / "images" / name, target / "images" / name)
            linked.add(name)


def _copy_database(source: sqlite3.Connection, path: Path) -> None:
    """Copy the database in one step, so that a server that writes does not make it begin again; one
    file without a log, on the disk when this returns.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as made:
        source.backup(made, pages=-1)
        made.execute("PRAGMA journal_mode = DELETE")
    with private_file(path) as file:
        os.fsync(file.fileno())


def _counted(db: sqlite3.Connection, pictures: int) -> Copied:
    conversations, messages = (
        db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        for table in ("conversations WHERE head IS NOT NULL", "messages")
    )
    return Copied(conversations, messages, pictures, 0)


def restore(source: Path, folder: Path) -> Copied:
    """The conversations of the backup `source` in place of those of the data folder, which no
    server may use meanwhile. The database that was there is set aside, and pictures are added to
    those there. Raises StoreError.
    """
    _check_is_there(source)
    with store_errors("restored"):
        make_private(folder)
        with closing(_to_itself(folder)):
            made = new_database(folder)
            with closing(open_readonly(source / DATABASE)) as old:
                check_pages(old)
                version = old.execute("PRAGMA user_version").fetchone()[0]
                if not 0 < version <= len(MIGRATIONS):
                    raise StoreError(
                        f"found a database of version {version}, expected 1 to "
                        f"{len(MIGRATIONS)}; it was written by a newer mtmd, or is no backup"
                    )
                _copy_database(old, made)
                names = [row[0] for row in old.execute("SELECT sha256 FROM images")]
                copied = _counted(old, len(names))
            missing = _bring_pictures(source / "images", folder / "images", names)
            moved = None
            if not has_no_content(folder / DATABASE):
                moved = displaced_folder(folder, "replaced")
            replace_database(folder, made, moved)
    return Copied(copied.conversations, copied.messages, copied.pictures - missing, missing, moved)


def _bring_pictures(source: Path, target: Path, names: list[str]) -> int:
    """Each is looked at before it is taken; how many are nowhere."""
    files, missing = ImageFiles(target), 0
    for name in names:
        if _is_whole(source / name):
            files.put((source / name).read_bytes())
        elif not _is_whole(target / name):
            missing += 1
    return missing


def _is_whole(path: Path) -> bool:
    try:
        return digest(path) == path.name
    except FileNotFoundError:
        return False


def recover_folder(folder: Path) -> Recovered:
    """Recover the folder as a start of the server does by itself where the database cannot be
    opened: for damage that only a full check finds. Raises StoreError.
    """
    _check_is_there(folder)
    with store_errors("recovered"), closing(_to_itself(folder)):
        return recover(folder, ImageFiles(folder / "images"))


def _check_is_there(folder: Path) -> None:
    if has_no_content(folder / DATABASE):
        raise StoreError(
            f"found no conversations in {str(folder)!r}, expected a data folder of the "
            "server, or a backup of one; name it with --data"
        )


def _to_itself(folder: Path) -> FolderLock:
    lock = FolderLock(folder, wait_s=0.0)
    if not lock.alone:
        lock.close()
        raise StoreBusyError("a server uses the data folder; stop it first, then try again")
    return lock
