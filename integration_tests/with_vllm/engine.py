"""A vLLM server in its own environment, as a child process that is started, asked, killed and started again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_gloo import EngineClient

#: Settings under which the CPU build runs on two cores, offline and without asking anything of the machine.
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
#: What a launcher of the trainer's ranks sets, and an engine must not see.
_TRAINERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "TORCHELASTIC")


class Engine:
    """One server; a context manager that ends it.

    Args:
        python: the interpreter of the engine's environment.
        checkpoint: a folder with a config and a tokenizer; the weights come from the trainer.
        tp: its tensor-parallel workers.
        log: where its output goes.
        options: more command-line options.
    """

    def __init__(self, python: str, checkpoint: Path, tp: int, log: Path, *options: str) -> None:
        self.tp, self._log = tp, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
            *("--served-model-name", "policy", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
            *(
                "--max-model-len",
                "256",
                "--max-num-seqs",
                "64",
                "--num-gpu-blocks-override",
                "128",
                "--tensor-parallel-size",
                str(tp),
            ),
            *("--host", "127.0.0.1", "--port", str(self._port), "--disable-uvicorn-access-log"),
            *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
            *("--weight-transfer-config", '{"backend": "gloo"}', *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> EngineClient:
        """A client of this server."""
        return EngineClient(f"http://127.0.0.1:{self._port}", timeout_s=120)

    def start(self) -> Engine:
        """Start the server, without waiting until it answers."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_TRAINERS_OWN)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**environment, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self

    def wait(self, limit_s: float = 900.0) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended or did not answer in time; the message has the end of its log.
        """
        end = time.monotonic() + limit_s
        while self._process is not None and self._process.poll() is None and time.monotonic() < end:
            try:
                self.client.weight_version(timeout_s=2)
                return
            except Exception:
                time.sleep(0.25)
        text = self._log.read_text(errors="replace")
        raise RuntimeError(f"the engine did not start:\n{text[-4000:]}")

    def ask(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of every worker, and return what each says; see ``worker_extension``."""
        answer = self.client.request("/collective_rpc", {"method": method, "args": list(arguments)})
        return list(answer["results"]) if answer else []

    def at(self, other: Engine) -> Engine:
        """This server at the address of another, which has ended."""
        self._command[self._command.index("--port") + 1] = str(other._port)
        self._port = other._port
        return self

    def stop(self) -> None:
        """Stop all of its processes, as a machine that hangs."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let stopped processes continue."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            for pid in _descendants(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """End the server and its workers at once."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def _descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            parents[int(number)] = int(rest[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _end_with_parent() -> None:
    """Let the kernel end this process when the rank that started it dies (PR_SET_PDEATHSIG); vLLM ends its workers."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
