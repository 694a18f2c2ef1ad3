"""Real servers on the loopback, running for as long as a test needs them.

`rclone serve s3` checks signatures like S3, and responds to a wrong secret with 403. Each server
ends with its block, no matter how that exits.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY, SECRET = "faults-key-0", "faults-secret-0"
READY_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    port: int
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(command: list[str], port: int, url: str, log: Path) -> Iterator[Server]:
    """Run a server until the block ends; enter it once the port takes connections."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        _wait_until_ready(process, port, log)
        yield Server(url=url, port=port, pid=process.pid)
    finally:
        process.kill()
        process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            try:
                process.wait(0.02)  # until the next try, or its end
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
            raise RuntimeError(f"{process.args}: {log.read_text()[-2000:]}") from error


@contextmanager
def s3_server(
    folder: Path, *, is_written: bool = False, tls: tuple[Path, Path] | None = None
) -> Iterator[Server]:
    """Serve a folder as S3, with its top-level folders as the buckets."""
    rclone = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if rclone is None:
        pytest.skip("rclone is not installed; it is in the dev extra: make install")
    port = free_port()
    log = folder.with_name(f"{folder.name}.rclone-{port}.log")
    command = [rclone, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    cache = "1h" if is_written else "0s"
    command += ["--auth-key", f"{KEY},{SECRET}", "--dir-cache-time", cache, "--config", os.devnull]
    if tls is not None:
        command += ["--cert", str(tls[0]), "--key", str(tls[1])]
    with serve(command, port, f"http{'s' * bool(tls)}://127.0.0.1:{port}", log) as server:
        yield server


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def s3_variables(url: str, *, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Return the environment that points S3 clients at a server; for subprocesses, say."""
    return {
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def s3_environment(url: str, *, key: str = KEY, secret: str = SECRET) -> Iterator[None]:
    """Point this process's S3 clients, and those of its children, at a server.

    Existing clients keep using their server, so use another bucket's name.
    """
    with _environment(s3_variables(url, key=key, secret=secret)):
        yield


@contextmanager
def sftp_server(folder: Path) -> Iterator[Server]:
    """Serve the machine's files by sftp; its url ends with the absolute path of `folder`."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    keygen = shutil.which("ssh-keygen")
    if sshd is None or keygen is None:
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    own = folder / ".sshd"
    own.mkdir(mode=0o700)
    for name in ("host", "client"):
        command = [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(own / name)]
        subprocess.run(command, check=True, timeout=60)
    port = free_port()
    (own / "authorized").write_text((own / "client.pub").read_text())
    (own / "known").write_text(f"[127.0.0.1]:{port} {(own / 'host.pub').read_text()}")
    (own / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {own / 'host'}\nPidFile none\n"
        f"AuthorizedKeysFile {own / 'authorized'}\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nSubsystem sftp internal-sftp\nPermitRootLogin yes\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs it if it runs as root
    variables = {
        "COMPOSER_SFTP_KEY_FILE": str(own / "client"),
        "COMPOSER_SFTP_KNOWN_HOSTS_FILE": str(own / "known"),
    }
    url = f"sftp://{_user()}@127.0.0.1:{port}{folder.absolute()}"
    command = [sshd, "-D", "-e", "-f", str(own / "config")]
    with _environment(variables), serve(command, port, url, own / "log") as server:
        yield server


def _user() -> str:
    return os.environ.get("USER") or ("root" if os.getuid() == 0 else str(os.getuid()))
