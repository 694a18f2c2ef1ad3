"""Run torchrun from a test: one agent per node, all on this machine, all gone after the test.

::

    with torchrun(script, arguments, log=..., num_ranks=4, num_nodes=2) as job:
        job.wait()           if an exit code is not 0, the error shows the end of the log
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.helpers.faults.servers import free_port

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0  # on an idle machine, a tenth of this would do
CONF = "join_timeout=120,last_call_timeout=5,keep_alive_interval=1"
SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Running agents, and their log."""

    agents: list[subprocess.Popen[bytes]]
    log: Path

    def wait(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all agents have exited successfully."""
        end = time.monotonic() + timeout_s
        for agent in self.agents:
            try:
                code = agent.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                code = None
            assert code == 0, f"exit code {code} (None: not in time)\n{self.tail()}"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def environment() -> dict[str, str]:
    """Return an agent's environment: one thread per rank, cached bytecode, no inherited world."""
    kept = {key: value for key, value in os.environ.items() if key not in SET_BY_TORCHRUN}
    # With this variable set, every rank of every job would recompile torch's sources.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def torchrun(
    script: Path,
    arguments: Sequence[Any],
    *,
    log: Path,
    num_ranks: int,
    num_nodes: int = 1,
    max_restarts: int = 0,
    options: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start a script as a job, which ends with the block no matter how that exits."""
    if options is None:
        options = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += [f"--nproc-per-node={num_ranks // num_nodes}", "--monitor-interval=0.1"]
    command.append(f"--max-restarts={max_restarts}")
    if not any(option.startswith("--nnodes") for option in options):
        command.append(f"--nnodes={num_nodes}")
    is_static = any(option.startswith("--master-port") for option in options)
    agents: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as out:
            for node in range(num_nodes):
                # Otherwise the agent that is quicker would have the store that all need.
                own = (
                    f"--node-rank={node}" if is_static else f"--rdzv-conf=is_host={not node},{CONF}"
                )
                line = [*command, own, str(script), *map(str, arguments)]
                agents.append(
                    subprocess.Popen(
                        line,
                        cwd=ROOT,
                        env=environment() | dict(variables or {}),
                        stdout=out,
                        stderr=out,
                    )
                )
        yield Job(agents=agents, log=log)
    finally:
        stop(agents)


def run_job(name: str, *arguments: Any, python: Path | None = None) -> None:
    """Run a script of this folder; if it fails, the error shows the end of its output.

    It runs in a fork of this process, since importing the trainers takes ten seconds. With another
    Python, and where backward passes on a GPU forbid forks, it has a process of its own.
    """
    if python is None and not torch.cuda.is_available():
        _run_fork(Path(name).stem, arguments)
        return
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [python or sys.executable, "-W", "ignore", script, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def _run_fork(name: str, arguments: Sequence[Any]) -> None:
    with tempfile.TemporaryFile() as output:
        job = ForkProcess(target=_as_job, args=(output.fileno(), name, arguments))
        job.start()
        job.join(PATIENCE_S)
        code = job.exitcode
        job.kill()
        output.seek(0)
        said = output.read().decode(errors="replace")[-6000:]
    assert code == 0, f"exit code {code} (None: not in time)\n{said}"


def _as_job(output: int, name: str, arguments: Sequence[Any]) -> None:
    """Run a script's `main` as if its process had begun with it."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(environment())
    for variable in SET_BY_TORCHRUN:
        os.environ.pop(variable, None)
    # accelerate keeps the state of the last run in its classes.
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.GradientState._reset_state()
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    sys.argv = [name, *map(str, arguments)]
    import_module(f"tests.helpers.worlds.{name}").main()
    sys.stdout.flush()


def launch(
    function: Callable[..., None], arguments: Sequence[Any], num_ranks: int, num_nodes: int = 1
) -> None:
    """Call a function in every rank of a job: torchrun's agents, in forks of this process.

    So the ranks need not import anything again. They have one thread each: GNU's OpenMP waits
    forever in a fork of a process that has used several.
    """
    agents = agents_of(function, arguments, num_ranks, num_nodes)
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join(PATIENCE_S)
    codes = [agent.exitcode for agent in agents]
    for agent in agents:
        agent.kill()
    assert codes == [0] * num_nodes, f"exit codes {codes} (None: not in time)"


def agents_of(
    function: Callable[..., None],
    arguments: Sequence[Any],
    num_ranks: int,
    num_nodes: int = 1,
    max_restarts: int = 0,
) -> list[ForkProcess]:
    """Return torchrun's agents, one for each node, which call a function in every rank."""
    endpoint = f"127.0.0.1:{free_port()}"

    def run_agent(node: int) -> None:
        config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=num_ranks // num_nodes,
            run_id="job",  # that all agents know
            rdzv_backend="static",
            rdzv_endpoint=endpoint,
            rdzv_configs={"rank": node, "timeout": 60},
            start_method="fork",
            monitor_interval=0.1,
            max_restarts=max_restarts,
        )
        elastic_launch(config, _in_one_thread)(function, *arguments)

    return [ForkProcess(target=run_agent, args=(node,)) for node in range(num_nodes)]


def _in_one_thread(function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(*arguments)


def fork_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> list[int | None]:
    """Call `function(rank, *arguments)` in forks, with torchrun's variables if there are several.

    Returns:
        The exit code of each rank, or None where it was stopped because another one had failed.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": 0}
    shared |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    ranks = [
        ForkProcess(target=_as_rank, args=(rank, shared, function, arguments))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    codes: dict[ForkProcess, int | None] = {}
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in connection.wait(list(waiting)):
            ended = waiting.pop(sentinel)
            ended.join()
            codes.setdefault(ended, ended.exitcode)
            if ended.exitcode:  # the others would wait forever
                for other in filter(ForkProcess.is_alive, waiting.values()):
                    other.kill()
                    codes[other] = None
    return [codes[rank] for rank in ranks]


def _as_rank(
    rank: int, shared: dict[str, Any], function: Callable[..., None], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    if shared["WORLD_SIZE"] > 1:
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({key: str(value) for key, value in own.items()})
    function(rank, *arguments)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can keep a process from exiting


def stop(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate agents and their ranks; agents forward SIGTERM to their ranks."""
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    for agent in agents:
        try:
            agent.wait(40)  # an agent gives its ranks 30 s
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
