"""The fault server does what its faults say, so that a green row means something.

Quick: about 3 s, most of it the start of a real S3 server.
"""

from __future__ import annotations

import http.client
import multiprocessing
import threading
import time

import pytest

from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer

BODY = bytes(range(256)) * 40


@pytest.fixture
def server(tmp_path):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "object").write_bytes(BODY)
    with FaultServer(folder=tmp_path) as server:
        yield server


def ask(server, method="GET", headers=None, path="/bucket/object", timeout_s=10.0):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_objects_are_served_whole_and_in_ranges(server):
    status, headers, body = ask(server)
    assert (status, body, headers["Content-Length"]) == (200, BODY, str(len(BODY)))
    assert ask(server, headers={"Range": "bytes=10-19"})[::2] == (206, BODY[10:20])
    status, headers, body = ask(server, "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(BODY)), b"")
    assert ask(server, path="/bucket/none")[0] == 404
    assert server.count() == 3
    assert [request.num_bytes for request in server.requests("object")] == [len(BODY), 10, 0]


@pytest.mark.parametrize("status", [403, 404, 429, 500, 503])
def test_a_status_is_answered_as_often_as_asked(server, status):
    fault = server.add("status", status=status, skip=1, times=2)
    assert [ask(server)[0] for _ in range(5)] == [200, status, status, 200, 200]
    assert fault.given == 2


def test_faults_count_for_each_path_where_asked(server):
    server.add("status", status=503, times=1, per_path=True)
    paths = ["/bucket/object", "/bucket/none", "/bucket/object", "/bucket/none"]
    assert [ask(server, path=path)[0] for path in paths] == [503, 503, 200, 404]


def test_a_reset_reaches_the_client_also_while_a_forked_child_lives(server):
    server.add("reset", skip=1)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/bucket/object")
    connection.getresponse().read()
    context = multiprocessing.get_context("fork")
    go_on = context.Event()
    child = context.Process(target=go_on.wait, args=(30,))
    child.start()
    try:
        connection.request("GET", "/bucket/object")
        with pytest.raises(ConnectionResetError):
            connection.getresponse()
    finally:
        go_on.set()
        child.join(10)
        connection.close()
    assert child.exitcode == 0


def test_a_short_body_ends_before_its_length(server):
    server.add("short")
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(server)
    assert caught.value.partial == BODY[: len(BODY) // 2]


def test_a_shorter_object_is_whole_by_its_own_account(server):
    server.add("shorter")
    status, headers, body = ask(server)
    assert (status, body) == (200, BODY[: len(BODY) // 2])
    assert headers["Content-Length"] == str(len(body))


def test_a_flip_changes_one_bit(server):
    server.add("flip", times=1)
    different = [a ^ b for a, b in zip(ask(server)[2], BODY, strict=True) if a != b]
    assert different == [1]
    assert ask(server)[2] == BODY


@pytest.mark.parametrize("kind", ["stall_headers", "stall_body"])
def test_a_stall_ends_when_the_server_does(server, kind):
    fault = server.add(kind)
    failures = []

    def wait():
        try:
            ask(server, timeout_s=60)
        except (OSError, http.client.HTTPException) as error:
            failures.append(error)

    client = threading.Thread(target=wait)
    client.start()
    server.wait_for(fault)
    begin = time.monotonic()
    server.close()
    client.join(10)
    assert time.monotonic() - begin < 5
    assert failures


def test_slow_ones_take_their_time_and_are_right(server):
    server.add("slow_start", seconds=0.3, times=1)
    server.add("trickle", bytes_per_s=len(BODY) * 2, skip=1)
    for _ in range(2):
        begin = time.monotonic()
        assert ask(server)[2] == BODY
        assert time.monotonic() - begin >= 0.3


def test_down_is_down_for_its_time_from_the_first_match(server):
    fault = server.add("down", seconds=0.3, skip=1)
    assert ask(server)[0] == 200
    with pytest.raises(ConnectionError):
        ask(server)
    deadline = time.monotonic() + 10
    while True:
        try:
            assert ask(server)[0] == 200
            break
        except ConnectionError:
            assert time.monotonic() < deadline
    assert time.monotonic() - fault.since >= 0.3


def test_a_share_of_requests_is_chosen_by_the_seed(server):
    fault = server.add("status", status=500, share=0.3, seed=1)
    first = [ask(server)[0] for _ in range(40)]
    assert 4 <= fault.given <= 22
    server.clear()
    server.add("status", status=500, share=0.3, seed=1)
    assert [ask(server)[0] for _ in range(40)] == first


def test_a_proxy_passes_signatures_on(store):
    boto3 = pytest.importorskip("boto3")
    (store.folder / "object").write_bytes(BODY)
    bucket, _, prefix = store.bucket.partition("/")
    for secret, status in ((servers.SECRET, 200), ("another-secret", 403)):
        with servers.s3_environment(store.server.url, secret=secret):
            client = boto3.session.Session().client("s3", endpoint_url=store.server.url)
            if status == 200:
                answer = client.get_object(Bucket=bucket, Key=f"{prefix}/object")
                assert answer["Body"].read() == BODY
            else:
                with pytest.raises(client.exceptions.ClientError):
                    client.get_object(Bucket=bucket, Key=f"{prefix}/object")
            client.close()
        assert store.server.requests("object")[-1].status == status
