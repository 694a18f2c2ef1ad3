"""Azure and Google Cloud with emulators: azurite from npm, gcp-storage-emulator from PyPI."""

from __future__ import annotations

import os
import shutil
from urllib.request import Request, urlopen

import pytest

from streampack.errors import DataError
from streampack.stores.failures import ChangedError, FailureKind
from streampack.stores.retries import kind_of, list_objects, request
from streampack.stores.store import open_store
from streampack.streams import Stream
from tests.helpers.faults import harness, servers

ACCOUNT = "devstoreaccount1"
# The emulator's published key, the same for everyone.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
LARGE = os.urandom(1 << 20) * 20

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def azure(tmp_path, monkeypatch):
    adlfs = pytest.importorskip("adlfs", reason="adlfs is in the azure extra")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("azurite is not installed: npm install -g azurite")
    port = servers.free_port()
    command = [azurite, "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    command += ["--inMemoryPersistence", "--disableTelemetry"]
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{connection}BlobEndpoint={url};")
    with servers.serve(command, port, url, tmp_path / "log"):
        # A unique name, because the process keeps one store per bucket, and with it the server.
        adlfs.AzureBlobFileSystem(skip_instance_cache=True).mkdir(f"bucket{port}")
        yield f"az://bucket{port}"


@pytest.fixture
def google(tmp_path, monkeypatch):
    pytest.importorskip("gcsfs", reason="gcsfs is in the gcs extra")
    emulator = shutil.which("gcp-storage-emulator")
    if emulator is None:
        pytest.skip("the emulator is not installed: pip install gcp-storage-emulator")
    port = servers.free_port()
    command = [emulator, "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    with servers.serve(command, port, url, tmp_path / "log"):
        body = f'{{"name": "bucket{port}"}}'.encode()
        headers = {"Content-Type": "application/json"}
        urlopen(Request(f"{url}/storage/v1/b?project=test", body, headers), timeout=60).close()
        yield f"gs://bucket{port}"


@pytest.fixture(params=["azure", "google"])
def url(request):
    return request.getfixturevalue(request.param)


def test_objects_are_written_listed_read_and_removed(url, tmp_path):
    store = open_store(url)
    for name in ("ds/a", "ds/b/c", "other"):
        store.write(f"{url}/{name}", name.encode())
    found = list(list_objects(f"{url}/ds/"))
    assert [each.url for each in found] == [f"{url}/ds/a", f"{url}/ds/b/c"]
    assert store.stat(f"{url}/ds/a") == found[0]
    assert store.read(f"{url}/ds/a", 1, 3, version=found[0].version) == b"s/"
    store.write(f"{url}/ds/a", b"another")
    with pytest.raises(ChangedError):
        store.read(f"{url}/ds/a", 1, 3, version=found[0].version)
    store.write(f"{url}/large", LARGE)
    store.download(f"{url}/large", tmp_path / "large", len(LARGE), is_checked=False)
    assert (tmp_path / "large").read_bytes() == LARGE
    store.remove(f"{url}/other")
    with pytest.raises(DataError) as raised:
        request(f"{url}/other", "read", lambda store: store.read(f"{url}/other"))
    assert kind_of(raised.value) is FailureKind.MISSING


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_an_epoch_is_exact_without_workers_and_then_with_workers(url, tmp_path, method):
    ds = harness.write_dataset(tmp_path / "written", num_samples=600)
    store = open_store(url)
    for path in ds.folder.iterdir():
        if path.is_file():
            store.write(f"{url}/ds/{path.name}", path.read_bytes())
    for num_workers, options in ((0, {}), (2, {"multiprocessing_context": method})):
        stream = Stream(remote=f"{url}/ds", local=str(tmp_path / f"local-{num_workers}"))
        loader = harness.make_loader(stream, num_workers=num_workers, **options)
        harness.run_epoch(lambda loader=loader: loader, ds).assert_exact()
