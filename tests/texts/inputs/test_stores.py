"""Inputs in object stores: listed, split and read by ranges of one version.

::

    read_rows --> FaultServer --> rclone serve s3 --> folder        s3://, through boto3
    read_rows --> FaultServer --> folder                            http://, through fsspec
    read_rows --> fsspec's own file system in memory                memory://, as any other store
"""

from __future__ import annotations

from uuid import uuid4

import fsspec
import pytest

from streampack.errors import DataError
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows, with_contents
from tests.helpers.examples import crossed
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.faults.servers import s3_environment, s3_server
from tests.helpers.inputs import TEXT, rows_of, split, texts_of, write_rows

pytestmark = pytest.mark.processes
TEXTS = [f"{number} é日本" * (number % 50) for number in range(3000)]  # 1.5 MB as JSON lines
SUFFIXES = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet", "arrow")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of a bucket that has a file of each format."""
    folder = tmp_path_factory.mktemp("store") / "bucket"
    (folder / "in" / "deep").mkdir(parents=True)
    for suffix in SUFFIXES:
        write_rows(folder / "in" / f"rows.{suffix}", [f"x{text}" for text in TEXTS], 500)
    for name in ("a.txt", "b.txt", ".hidden.txt", "deep/c.txt"):
        (folder / "in" / name).write_text(name)
    for name in ("a.txt", "a/b/c.txt", "a/_x.txt", "a-b.txt", "a0.txt", "É.txt"):
        (folder / "order" / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "order" / "x" / name).write_text(name)
    for name in (".a.txt", "a/.git/b.txt", "a/_SUCCESS", "_metadata", ".b/c.txt"):
        (folder / "order" / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "order" / "x" / name).write_text(name)
    (folder / "marks").mkdir()
    (folder / "marks" / "a[1].txt").write_text("a")
    return folder


@pytest.fixture(scope="module")
def s3(root):
    """The bucket on an S3 server, behind a proxy that fails on demand."""
    with (
        s3_server(root.parent) as server,
        FaultServer(upstream=server.url) as proxy,
        s3_environment(proxy.url),
    ):
        yield proxy


@pytest.fixture(scope="module")
def web(root):
    """The bucket on a web server, which has no index pages."""
    with FaultServer(folder=root.parent) as server:
        yield server


@pytest.fixture
def faults(s3):
    """The proxy, with its faults cleared before and after."""
    s3.clear()
    yield s3
    s3.clear()


@pytest.fixture(scope="module")
def memory(root):
    """The bucket in fsspec's memory."""
    url = f"memory://{uuid4().hex}"
    files = fsspec.filesystem("memory")
    files.put(f"{root}/", f"{url}/", recursive=True)
    yield url
    files.rm(url, recursive=True)


@pytest.fixture(params=["s3", "memory"])
def url(request, root):
    """The URL of the bucket."""
    place = request.getfixturevalue(request.param)
    return f"s3://{root.name}" if request.param == "s3" else place


@pytest.fixture(params=["s3", "web"])
def server(request, root):
    """A server, with its faults cleared before and after, and the URL of the bucket."""
    found = request.getfixturevalue(request.param)
    found.clear()
    yield found, f"s3://{root.name}" if request.param == "s3" else f"{found.url}/{root.name}"
    found.clear()


@pytest.mark.parametrize(("suffix", "store"), crossed(SUFFIXES, ["s3", "web", "memory"]))
def test_slices_of_an_object_give_each_row_once(request, root, store, suffix):
    place = request.getfixturevalue(store)
    base = {"s3": f"s3://{root.name}", "web": f"{getattr(place, 'url', '')}/{root.name}"}
    uri = f"{base.get(store, place)}/in/rows.{suffix}"

    part_bytes = 20_000 if suffix == "parquet" else 300_000
    parts = split(uri, part_bytes)

    rows, bad = rows_of(parts)
    assert bad == []
    assert [text for _, text in rows] == [f"x{text}" for text in TEXTS]
    assert (len(parts) > 1) == (suffix in ("jsonl", "parquet"))
    assert parts == split(uri, part_bytes)


@pytest.mark.parametrize("named", ["x", "x/", "x/*", "x/**", "x/**/*", "x/[!.]*", "?", "x*/"])
def test_folders_globs_and_stores_give_the_same_files_in_the_same_order(url, root, named):
    def names(base: str) -> list[str]:
        return [file.uri.rpartition("/x/")[2] for file in list_inputs([f"{base}/order/{named}"])]

    expected = ["a-b.txt", "a.txt", "a/_x.txt", "a/b/c.txt", "a0.txt", "É.txt"]
    assert names(str(root)) == expected
    assert names(url) == expected


def test_an_object_whose_name_looks_like_a_glob_is_found_by_it(url):
    assert texts_of(split(f"{url}/marks/a[1].txt")) == ["a"]


@pytest.mark.parametrize("name", ["in/none.txt", "in/none/*.txt", "in/a.tx", "in/.hidden"])
def test_an_input_that_a_store_lacks_is_refused(url, name):
    with pytest.raises(DataError, match="0 files; check the"):
        list_inputs([f"{url}/{name}"])


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "parquet"])
def test_an_object_that_was_replaced_is_an_error(server, root, suffix):
    name = f"replaced.{suffix}"
    uri = f"{server[1]}/{name}"
    write_rows(root / name, ["a"] * 100)
    parts = split(uri)
    write_rows(root / name, ["b"] * 100)

    with pytest.raises(DataError, match=rf"^{uri}: changed since it was listed"):
        rows_of(parts)
    assert texts_of(split(uri)) == ["b"] * 100
    (root / name).write_bytes(b"")  # of which nothing would be requested
    with pytest.raises(DataError, match=rf"^{uri}: changed since it was listed"):
        rows_of(parts)


@pytest.mark.parametrize("has_next_block", [False, True])
def test_an_object_that_is_replaced_under_its_reader_is_an_error(server, root, has_next_block):
    name = f"under-{has_next_block}.jsonl"
    write_rows(root / name, ["x" * 10_000] * (2200 if has_next_block else 200))
    [part] = split(f"{server[1]}/{name}")
    batches = read_rows(part, TEXT)
    next(batches)

    write_rows(root / name, ["y" * 10_000] * 2200)

    if has_next_block:  # of 22 MB, at most 16 MiB were fetched
        with pytest.raises(DataError, match=rf"{name}: changed since it was listed"):
            list(batches)
    else:  # the whole version is in memory
        assert {text for batch in batches for text in batch.values} == {"x" * 10_000}


@pytest.mark.parametrize("kind", ["status", "reset", "short", "stall_body", "down"])
def test_passing_faults_of_the_store_change_no_row(server, kind):
    proxy, url = server
    parts = split(f"{url}/in/rows.jsonl", 300_000)
    options = {"seconds": 1.0} if kind == "down" else {"status": 503, "times": 3, "seconds": 0.2}
    proxy.add(kind, path=r"rows\.jsonl", skip=1, **options)

    assert texts_of(parts) == [f"x{text}" for text in TEXTS]
    assert any(request.fault == kind for request in proxy.log)


@pytest.mark.parametrize("suffix", ["txt", "jsonl.zst", "parquet"])
def test_small_objects_are_fetched_several_at_a_time_each_in_one_request(faults, root, suffix):
    texts = [f"text {number}" for number in range(40)]
    for number, text in enumerate(texts):
        file = root / "many" / suffix / f"{number:02}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if suffix == "txt":
            file.write_text(text)
        else:
            write_rows(file, [text])
    parts = split(f"s3://{root.name}/many/{suffix}")
    faults.add("slow_start", path="/many/", seconds=0.25)
    faults.log.clear()

    pairs = list(with_contents(parts))

    assert faults.most_at_once >= 4
    assert [part for part, _ in pairs] == parts
    read = [batch.values for part, data in pairs for batch in read_rows(part, TEXT, contents=data)]
    assert read == [[text] for text in texts]
    assert len(faults.log) == 40


def test_an_object_that_fails_ahead_is_an_error_at_its_own_place(faults, root):
    parts = [split(f"s3://{root.name}/in/{name}")[0] for name in ("a.txt", "b.txt", "deep/c.txt")]
    faults.add("status", status=403, path=r"/deep/c\.txt")
    pairs = with_contents(parts)

    assert [next(pairs)[1], next(pairs)[1]] == [b"a.txt", b"b.txt"]
    with pytest.raises(DataError, match=r"s3://bucket/in/deep/c.txt: cannot be read.*refuses"):
        next(pairs)


def test_large_objects_and_files_are_not_fetched_ahead(faults, root):
    write_rows(root / "large.jsonl", ["x" * 1000] * 2000)
    parts = [split(root / "in" / "a.txt")[0], split(f"s3://{root.name}/large.jsonl")[0]]
    small = split(f"s3://{root.name}/in/a.txt")[0]
    faults.log.clear()

    assert [data for _, data in with_contents(parts)] == [None, None]
    assert [data for _, data in with_contents([*parts, small])] == [None, None, b"a.txt"]
    assert len(faults.log) == 1


def test_each_byte_of_an_object_is_requested_once(faults, root):
    [part] = split(f"s3://{root.name}/in/rows.jsonl")
    faults.log.clear()

    texts_of([part])

    gets = [request for request in faults.log if request.method == "GET"]
    assert sum(request.num_bytes for request in gets) == part.num_bytes
