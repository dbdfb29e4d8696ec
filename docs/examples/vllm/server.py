"""A vLLM server in an environment of its own, as a child process of the trainer's first rank."""

import os
import subprocess
import time
from pathlib import Path

from fsdp_runtime.errors import WeightSyncError
from vllm_gloo import EngineClient

PORT, NAME = 8123, "policy"
LARGEST_BATCH = 256

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # trainer and engine on one machine
}


def start_server(python: str, checkpoint: Path, log: Path, tp: int) -> subprocess.Popen:
    """Start a server that has the checkpoint's config and tokenizer, and no weights yet.

    Args:
        python: The interpreter of the engine's environment.
        checkpoint: The folder with config and tokenizer.
        log: Where its output goes.
        tp: Its tensor-parallel workers.

    Returns:
        Its process.
    """
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--served-model-name", NAME),
        *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--tensor-parallel-size", str(tp)),
        *("--max-model-len", "64", "--max-num-seqs", str(LARGEST_BATCH), "--host", "127.0.0.1", "--port", str(PORT)),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--disable-uvicorn-access-log"),
        *(
            "--generation-config",
            "vllm",
            "--num-gpu-blocks-override",
            "512",
            "--weight-transfer-config",
            '{"backend": "gloo"}',
        ),
    ]
    trainers_own = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(trainers_own)}
    with log.open("wb") as output:
        return subprocess.Popen(command, env={**environment, **SETTINGS}, stdout=output, stderr=subprocess.STDOUT)


def wait_for(client: EngineClient, process: subprocess.Popen | None, limit_s: float = 900) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: It ended, or took too long.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end and (process is None or process.poll() is None):
        try:
            client.weight_version(timeout_s=2)
            return
        except WeightSyncError:
            time.sleep(0.5)
    raise RuntimeError(f"no vLLM answers at {client.url}; its log is engine.log in the output folder")
