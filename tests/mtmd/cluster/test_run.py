"""A job from its start to its end, without Ray: whatever ends, every row is there once."""

from __future__ import annotations

import errno
import io
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.batch.output import Row
from mtmd.cluster import run as runs
from mtmd.cluster.actors import Ended, Result
from mtmd.cluster.manifest import Item, Unit
from mtmd.cluster.out.folder import Folder
from mtmd.cluster.out.parts import not_written, write_part
from mtmd.cluster.output import Output
from mtmd.cluster.progress import Progress
from mtmd.cluster.run import LOST, Run
from mtmd.cluster.schedule import Task
from mtmd.cluster.sources.find import Columns, SourceItems
from mtmd.cluster.sources.listing import Listed, Shard, list_shard, list_shards
from mtmd.cluster.worker import Failed, Job, Loaded, Written


def items(count: int, first: int = 0) -> tuple[Item, ...]:
    return tuple(Item(f"/p/{n}", f"p/{n}", "file", f"/p/{n}") for n in range(first, first + count))


def listed(*all_items: Item) -> SourceItems:
    return SourceItems(all_items, (), Counter())


def row_of(item: Item) -> Row:
    bad = item.id.endswith("7")
    return Row(item.name, error="bad" if bad else None, text=None if bad else item.id)


class FakePool:
    """Actors that answer at once, in any order; `ends` says which call is an actor's last. Some
    of those write what they had all the same, later: they were out of reach, not dead.
    """

    def __init__(self, job: Job, chance: random.Random, ends: Callable[[Sequence[Item]], bool]):
        self.job, self.chance, self.ends = job, chance, ends
        self.count, self.write_late = 0, True
        self.calls: list[tuple[int, Task | None, Unit | None]] = []
        self.late: list[Callable[[], object]] = []
        self.answered: Counter[str] = Counter()

    def start(self, host_bytes: int) -> int:  # noqa: ARG002
        self.count += 1
        self.calls.append((self.count, None, None))
        return self.count

    def give(self, actor: int, task: Task, unit: Unit) -> None:
        self.calls.append((actor, task, unit))

    def write(self, unit: Unit) -> Written:
        rows = [*map(row_of, unit.items)]
        write_part(self.job.out, unit, rows, self.job.ending)
        return Written(len(rows), sum(row.error is not None for row in rows))

    def wait(self, seconds: float) -> list[Result | Ended]:  # noqa: ARG002
        if self.late and self.chance.random() < 0.3:
            self.late.pop()()
        if not self.calls:
            return []
        actor, task, unit = self.calls.pop(self.chance.randrange(len(self.calls)))
        if task is None or unit is None:
            return [Result(actor, None, Loaded(*LOADED))]
        here = unit.items if task.row is None else unit.items[task.row : task.row + 1]
        if self.ends(here):
            self.calls = [call for call in self.calls if call[0] != actor]
            if self.write_late:
                self.late.append(lambda: self.write(unit))
            return [Ended(actor, "killed", blame=True)]
        if task.row is not None:
            return [Result(actor, task, row_of(unit.items[task.row]))]
        self.answered.update(item.id for item in unit.items)
        try:
            return [Result(actor, task, self.write(unit))]
        except OSError as error:
            return [Result(actor, task, Failed(not_written(self.job.out, error)))]

    def needs(self) -> str:
        return "nothing"


def version() -> str:
    from mtmd import __version__

    return __version__


LOADED = (version(), "here", 1, 100, 0.1)


def never(_: Sequence[Item]) -> bool:
    return False


def job_in(folder: Path, ending: str = ".jsonl", **chosen: Any) -> Job:
    return Job(str(folder / f"rows{ending}"), ending, "?", **chosen)


def ids_in(job: Job) -> list[str]:
    return [row["id"] for row in Output(job, True).rows()]


def run(output: Output, pool: FakePool, actors: int = 2) -> Progress:
    progress = Progress()
    output.count_before(progress)
    Run(output, pool, progress).until_done(actors, lambda _: None)
    return progress


@pytest.mark.parametrize("ending", (".jsonl", ".parquet"))
def test_every_row_is_there_once_and_in_order(ending: str, tmp_path: Path) -> None:
    job = job_in(tmp_path, ending)
    output = Output(job, False)
    output.prepare(listed(*items(40)), list_shards, 6, 2)
    progress = run(output, FakePool(job, random.Random(1), never))
    rows = [*output.rows()]
    assert [row["id"] for row in rows] == [item.id for item in items(40)]
    assert [row["image"] for row in rows] == [item.name for item in items(40)]
    assert [row["error"] for row in rows if row["image"].endswith("7")] == ["bad"] * 4
    assert (progress.total, progress.written, progress.failed, progress.left) == (40, 40, 4, 0)
    names = sorted(path.name for path in Path(job.out).iterdir())
    assert names == ["_job.json", "_plan-000000.parquet"] + [
        f"part-{n:06}{ending}" for n in range(7)
    ]


class Killed(BaseException):
    """The driver, at any moment."""


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_killed_every_row_is_there_once(seed: int, tmp_path: Path) -> None:
    """Actors end by chance, some write later what another one has written; the driver is killed
    again and again, and each time pictures have come to the folder.
    """
    chance, job, late = random.Random(seed), job_in(tmp_path), list[Callable[[], object]]()
    known = 20
    for attempt in range(40):
        output = Output(job, attempt > 0)
        output.prepare(listed(*items(known)), list_shards, 1 + seed % 5, 3)
        pool = FakePool(job, chance, lambda _: chance.random() < 0.2)
        pool.late = late
        until = chance.randrange(1, 12)

        def report(progress: Progress, until: int = until, pool: FakePool = pool) -> None:
            if progress.written >= until:
                late.extend(_writer(pool, call) for call in pool.calls if call[2] is not None)
                raise Killed

        progress = Progress()
        output.count_before(progress)
        try:
            Run(output, pool, progress).until_done(3, report)
        except Killed:
            known = min(known + chance.randrange(5), 60)
        else:
            break
    for write in late:
        write()
    assert sorted(ids_in(job)) == sorted(item.id for item in items(known))
    assert progress.before + progress.written == known


def _writer(pool: FakePool, call: Any) -> Callable[[], object]:
    return lambda: pool.write(call[2])


def test_a_picture_that_ends_its_process_is_a_row_with_its_error(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(30)), list_shards, 10, 2)
    pool = FakePool(job, random.Random(3), lambda here: any(item.id == "/p/13" for item in here))
    pool.write_late = False
    progress = run(output, pool)
    rows = {row["id"]: row for row in output.rows()}
    assert list(rows) == [item.id for item in items(30)]
    assert rows["/p/13"]["error"] == LOST and "ended, 2 times" in LOST
    assert rows["/p/12"]["text"] == "/p/12" and rows["/p/7"]["error"] == "bad"
    # twice with its unit, twice alone
    assert (progress.ended, progress.failed, progress.written) == (4, 4, 30)


def test_a_later_run_answers_what_has_no_row_and_nothing_else(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(20)), list_shards, 5, 2)
    run(output, FakePool(job, random.Random(1), never))
    first = {path.name: path.read_bytes() for path in Path(job.out).iterdir()}
    again = Output(job, True)
    again.prepare(listed(*items(26, 2)), list_shards, 4, 2)
    pool = FakePool(job, random.Random(2), never)
    progress = run(again, pool)
    assert set(pool.answered) == {item.id for item in items(8, 20)}
    assert (progress.before, progress.written, progress.failed_before) == (20, 8, 2)
    assert ids_in(job) == [item.id for item in items(28)]
    now = {path.name: path.read_bytes() for path in Path(job.out).iterdir()}
    assert first.items() <= now.items()
    assert set(now) - set(first) == {
        "_plan-000004.parquet",
        "part-000004.jsonl",
        "part-000005.jsonl",
    }


def test_nothing_is_written_over_what_is_there(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with pytest.raises(OptionError, match="files there already; --resume goes on"):
        (tmp_path / "rows.jsonl").mkdir()
        (tmp_path / "rows.jsonl" / "other").touch()
        Output(job, False)
    with pytest.raises(OptionError, match="did not write, expected its rows"):
        Output(job, True)
    (tmp_path / "rows.jsonl" / "other").unlink()
    Output(job, False).prepare(listed(*items(2)), list_shards, 5, 2)
    for other, reported in (
        ({"prompt": "!"}, r"rows with prompt '\?', now it is '!'"),
        ({"model": "org/other"}, "rows with model None"),
        ({"answering": {"seed": 3}}, "rows with answer options"),
        ({"loading": {"dtype": "bf16"}}, "rows with model options"),
    ):
        with pytest.raises(OptionError, match=reported):
            Output(replace(job, **other), True)
    Output(replace(job, loading={"device": "cuda", "parallel": 8, "tp": 2}), True)
    with pytest.raises(OptionError, match=r"ending '.csv', expected one of .jsonl, .parquet"):
        Output(job_in(tmp_path, ".csv"), False)


def test_a_file_of_rows_that_is_not_whole_is_told(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    run(output, FakePool(job, random.Random(1), never))
    part = Path(job.out) / "part-000001.jsonl"
    for data in (part.read_bytes()[:-30], part.read_bytes().split(b"\n")[0] + b"\n", b"[]\n"):
        part.write_bytes(data)
        with pytest.raises(OptionError, match=r"found unexpected content in part-000001.jsonl"):
            Output(job, True).count_before(Progress())
    part.rename(part.with_name("part-000009.jsonl"))
    with pytest.raises(OptionError, match=r"found part-000009.jsonl, expected files of 2 units"):
        Output(job, True).count_before(Progress())


def test_what_would_fail_for_every_picture_ends_the_job(tmp_path: Path) -> None:
    class Refusing(FakePool):
        value: Failed | Loaded

        def wait(self, seconds: float) -> list[Result | Ended]:  # noqa: ARG002
            return [Result(call[0], call[1], self.value) for call in self.calls]

    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    for result, reported, kind in (
        (Failed("here: no such model"), "here: no such model", DeviceError),
        (Failed("top_p: found 2", is_option=True), "top_p: found 2", OptionError),
        (Loaded("0.0.1", *LOADED[1:]), r"here: found mtmd 0.0.1, expected", OptionError),
    ):
        pool = Refusing(job, random.Random(1), never)
        pool.value = result
        with pytest.raises(kind, match=reported):
            run(output, pool)
    assert ids_in(job) == []


def test_actors_that_only_end_are_told_not_tried_for_ever(tmp_path: Path) -> None:
    class Ending(FakePool):
        def wait(self, seconds: float) -> list[Result | Ended]:  # noqa: ARG002
            calls, self.calls = self.calls, []
            return [Ended(call[0], "out of memory", blame=True) for call in calls]

    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    pool = Ending(job, random.Random(1), never)
    with pytest.raises(DeviceError, match=r"10 actors ended one after another.*out of memory"):
        run(output, pool)
    assert pool.count == 10


def test_nobody_is_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakePool):
        def wait(self, seconds: float) -> list[Result | Ended]:  # noqa: ARG002
            return []

        def needs(self) -> str:
            return "each takes 64 CPUs"

    monkeypatch.setattr(runs, "START_S", -1.0)
    output = Output(job_in(tmp_path), False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    with pytest.raises(DeviceError, match=r"no actor had a machine.*each takes 64 CPUs"):
        run(output, Silent(output.job, random.Random(1), never))


def test_a_full_disk_ends_the_job_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mtmd.cluster.out.folder.os.fsync", full)
        with pytest.raises(MtmdError, match="found a full disk; make room and run the command"):
            run(output, FakePool(job, random.Random(1), never))
        with pytest.raises(MtmdError, match="found a full disk"):
            Output(job_in(tmp_path / "b"), False).prepare(listed(*items(4)), list_shards, 2, 2)
    assert sorted(Folder(job.out).names()) == ["_job.json", "_plan-000000.parquet"]
    assert run(Output(job, True), FakePool(job, random.Random(1), never)).written == 4


def test_what_was_being_written_is_swept_away_at_the_end(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    (Path(job.out) / "_writing-1234-part-000000.jsonl").write_bytes(b'{"id"')
    run(output, FakePool(job, random.Random(1), never))
    assert not [name for name in output.folder.names() if "_writing" in name]


def test_one_that_was_killed_with_its_first_write_is_gone_on_with(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    Path(job.out).mkdir()
    (Path(job.out) / "_writing-1234-_job.json").write_bytes(b'{"id"')
    output = Output(job, True)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    assert run(output, FakePool(job, random.Random(1), never)).written == 4


def test_a_run_that_wrote_no_row_leaves_nothing(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    output.leave()
    assert not Path(job.out).exists()
    output = Output(job, False)
    output.prepare(listed(*items(4)), list_shards, 2, 2)
    with pytest.raises(Killed):
        progress = Progress()
        Run(output, FakePool(job, random.Random(1), never), progress).until_done(1, stop_at(2))
    output.leave()
    assert len(ids_in(job)) == 2


@pytest.mark.parametrize(
    ("bad", "count", "actors"),
    (
        (range(8), 30, 1),
        (range(8), 10, 1),  # before anything is answered
        (range(20, 28), 30, 2),  # in the last unit
        (range(0, 30, 3), 30, 2),  # in every unit
    ),
)
def test_many_bad_pictures_keep_no_other_from_being_answered(
    bad: range, count: int, actors: int, tmp_path: Path
) -> None:
    job, named = job_in(tmp_path), {f"/p/{n}" for n in bad}
    output = Output(job, False)
    output.prepare(listed(*items(count)), list_shards, 10, actors)
    pool = FakePool(job, random.Random(1), lambda here: any(item.id in named for item in here))
    pool.write_late = False
    progress = run(output, pool, actors)
    errors = {row["id"]: row["error"] for row in output.rows()}
    assert {id_ for id_, error in errors.items() if error == LOST} == named
    assert len(errors) == progress.written == count


def test_where_no_picture_at_all_is_answered_the_job_ends(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(100)), list_shards, 10, 2)
    pool = FakePool(job, random.Random(1), lambda _: True)
    pool.write_late = False
    with pytest.raises(DeviceError, match=r"20 pictures were given up, .* none was answered"):
        run(output, pool)
    assert {row["error"] for row in output.rows()} <= {LOST}


class Losing(FakePool):
    """A machine with many actors goes away, whenever they have something to do."""

    times, gone, blame = 1, 12, False

    def wait(self, seconds: float) -> list[Result | Ended]:
        with_tasks = sorted({call[0] for call in self.calls if call[1] is not None})
        if self.times and len(with_tasks) >= self.gone:
            self.times -= 1
            lost = with_tasks[: self.gone]
            self.calls = [call for call in self.calls if call[0] not in lost]
            return [Ended(actor, "its node has died", self.blame) for actor in lost]
        return super().wait(seconds)


@pytest.mark.parametrize("blame", (False, True))
def test_a_machine_with_many_actors_may_go_away(blame: bool, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(160)), list_shards, 2, 16)
    pool = Losing(job, random.Random(1), never)
    pool.times, pool.blame = (1, True) if blame else (2, False)
    progress = run(output, pool, 16)
    assert progress.written == 160 and progress.ended == (12 if blame else 24)


def test_a_second_command_takes_nothing_of_the_first(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    first = Output(job, False)
    first.prepare(listed(*items(8)), list_shards, 2, 2)
    (Path(job.out) / "_writing-1234-part-000000.jsonl").touch()
    there = first.folder.names()
    Output(job, True).leave()  # whose cluster cannot be joined, for one
    second = Output(job, True)
    second.prepare(listed(*items(8)), list_shards, 2, 2)
    second.leave()
    assert first.folder.names() == there
    assert first.manifest.unit(0) == second.manifest.unit(0)
    second.folder.write("part-000000.jsonl", b"")
    first.leave()  # began it, but somebody else goes on
    assert first.folder.names() == there | {"part-000000.jsonl"}


def test_one_whose_actors_may_be_writing_leaves_what_they_need(tmp_path: Path) -> None:
    class Stopped(FakePool):
        def give(self, actor: int, task: Task, unit: Unit) -> None:
            self.late.append(lambda: self.write(unit))
            super().give(actor, task, unit)
            raise Killed

    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(8)), list_shards, 2, 2)
    pool = Stopped(job, random.Random(1), never)
    with pytest.raises(Killed):
        run(output, pool)
    output.leave()
    pool.late.pop()()
    assert len(ids_in(job)) == 2


def finished(folder: Path, ending: str) -> Job:
    job = job_in(folder, ending)
    output = Output(job, False)
    output.prepare(listed(*items(20)), list_shards, 20, 1)
    run(output, FakePool(job, random.Random(1), never), 1)
    return job


@pytest.mark.parametrize("ending", (".jsonl", ".parquet"))
@pytest.mark.parametrize("name", ("_job.json", "_plan-000000.parquet", "part-000000"))
def test_damaged_files_are_named(name: str, ending: str, tmp_path: Path) -> None:
    """Bytes changed, cut off, taken for another's; nothing but an OptionError that names the file,
    or rows as they were in number.
    """
    job, chance = finished(tmp_path, ending), random.Random(4)
    location = Path(job.out, name if "." in name else name + ending)
    data = location.read_bytes()
    damaged = [
        b"",
        b"[1]",
        b"1",
        b"null",
        b"[" * 99_999,
        b"\xff",
        b"PAR1xxxxPAR1",
        b'{"id"',
        data[:-9],
        data[9:],
    ]
    for _ in range(25):
        at = chance.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :])
    reported = 0
    for one in damaged:
        location.write_bytes(one)
        try:
            Output(job, True).count_before(progress := Progress())
        except OptionError as error:
            reported += 1
            assert location.name in str(error) or "rows with" in str(error)
        else:
            assert progress.before == 20
    assert reported >= 9


def test_what_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished(tmp_path, ".jsonl")

    def refused(folder: Folder, name: str) -> bytes:
        if name.startswith(requested):
            raise ConnectionError(f"403 for {folder.name}")
        return real(folder, name)

    real = Folder.read
    monkeypatch.setattr(Folder, "read", refused)
    for name in ("_job", "_plan", "part"):
        requested = name
        with pytest.raises(DeviceError, match=r"cannot be read \(403 for"):
            Output(job, True).count_before(Progress())


def tar_at(location: Path, count: int, cut: int | None = None) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for n in range(count):
            info = tarfile.TarInfo(f"{n}.png")
            info.size = 1000
            tar.addfile(info, io.BytesIO(bytes(1000)))
    location.write_bytes(file.getvalue()[:cut])


def test_a_tar_file_that_was_cut_is_listed_again_when_it_is_whole(tmp_path: Path) -> None:
    location, job = tmp_path / "s.tar", job_in(tmp_path)
    shards = SourceItems((), (str(location),), Counter())

    def numbered() -> list[str]:
        output = Output(job, (tmp_path / "rows.jsonl").exists())
        output.prepare(shards, list_shards, 4, 1)
        units = map(output.manifest.unit, range(output.manifest.units))
        return [item.id.rpartition("#")[2] for unit in units for item in unit.items]

    tar_at(location, 10, 1536 * 5)
    assert numbered() == ["0", "1", "2", "3", "4", "byte-7680"]
    assert len(numbered()) == 6
    tar_at(location, 10)
    assert numbered()[6:] == ["5", "6", "7", "8", "9"]
    tar_at(location, 12)  # and when it has grown
    assert numbered()[11:] == ["10", "11"]


def test_shards_that_have_not_changed_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar_at(tmp_path / "s.tar", 3)
    shards, job = SourceItems((), (f"{tmp_path}/s.tar",), Counter()), job_in(tmp_path)
    Output(job, False).prepare(shards, list_shards, 4, 1)
    monkeypatch.setattr("mtmd.cluster.sources.listing.open_seekable", None)
    again = Output(job, True)
    again.prepare(shards, list_shards, 4, 1)
    assert again.manifest.count == 3


def test_too_many_pictures_are_told_while_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.cluster.manifest.MAX_ITEMS", 5)
    for name in ("a.tar", "b.tar"):
        tar_at(tmp_path / name, 3)

    def listing(shards: Sequence[Shard], columns: Columns) -> Iterator[Listed]:
        for shard in shards:
            assert "c.tar" not in shard[0]
            yield list_shard(shard, columns)

    shards = tuple(f"{tmp_path}/{name}.tar" for name in "abc")
    with pytest.raises(OptionError, match="found more than 5 pictures"):
        Output(job_in(tmp_path), False).prepare(SourceItems((), shards, Counter()), listing, 4, 1)


def test_a_model_may_take_long_to_fetch_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time runs by an hour with each look."""

    class Fetching(FakePool):
        looks = 0

        def wait(self, seconds: float) -> list[Result | Ended]:
            self.looks += 1
            if self.looks == 1:
                return [Result(1, None, "here")]
            return super().wait(seconds) if self.looks > maximum else []

    now = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    output = Output(job_in(tmp_path), False)
    output.prepare(listed(*items(4)), list_shards, 4, 1)
    maximum = 10
    with pytest.raises(DeviceError, match=r"no actor was ready after 4 hours .*`mtmd pull`"):
        run(output, Fetching(output.job, random.Random(1), never))
    maximum = 3
    assert run(output, Fetching(output.job, random.Random(1), never)).written == 4


def stop_at(rows: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.written >= rows:
            raise Killed

    return report


def test_shards_without_a_picture(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w"):
        pass
    output = Output(job_in(tmp_path), False)
    with pytest.raises(OptionError, match=r"found no picture in .*s\.tar"):
        output.prepare(SourceItems((), (f"{tmp_path}/s.tar",), Counter()), list_shards, 2, 2)


def test_what_another_command_has_left_is_seen_before_it_begins(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    mine = Output(job, False)
    other = Output(replace(job, prompt="!"), False)
    other.prepare(listed(*items(2)), list_shards, 2, 2)
    with pytest.raises(OptionError, match="found files there already"):
        mine.look(False)
    with pytest.raises(OptionError, match=r"rows with prompt '!', now it is '\?'"):
        mine.look(True)


def test_nothing_is_left_where_nothing_was_answered(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    output = Output(job, False)
    output.prepare(listed(*items(8)), list_shards, 2, 2)
    output.leave()
    output.leave()
    assert not Path(job.out).exists()
