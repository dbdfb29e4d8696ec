"""A ``python`` and a ``torchrun`` whose processes start with torch and the packages already imported.

Tests of examples and launchers start programs as users do. An interpreter needs about 4 seconds of CPU time to import
torch and transformers; these programs hand their arguments, environment, folder and streams to a server forked from
the preloaded one, which runs them in a child of its own. Everything that a launcher does (its agent, its variables,
its signals, its exit codes) takes place as with an ordinary interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.processes import preloaded_context

#: The program that users' commands start: it asks the server for a process, passes signals on and ends as that ends.
CLIENT = r"""#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
arguments = {first!r} + sys.argv[1:]
request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
child = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
last = signal.SIGKILL
def pass_on(number, frame):
    global last
    last = number
    os.kill(child, number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, pass_on)
status = server.recv(1)
if not status:  # the child was killed
    if last != signal.SIGKILL:
        signal.signal(last, signal.SIG_DFL)
    os.kill(os.getpid(), last)
os._exit(status[0])
"""


#: Variables that tell a process its place in a job.
LAUNCHERS = re.compile(r"SLURM_|MASTER_|TORCHELASTIC_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)$")


@cache
def programs() -> Path:
    """Return the folder with ``python`` and ``torchrun``; the first call starts their server."""
    folder = Path(tempfile.mkdtemp(prefix="programs-"))
    address = str(folder / "server")
    for name, first in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
        program = folder / name
        program.write_text(CLIENT.format(python=sys.executable, address=address, first=first))
        program.chmod(0o755)
    server = preloaded_context().Process(target=_serve, args=(address,))
    server.start()
    atexit.register(_end, server, folder)
    while not (folder / "ready").exists():
        server.join(0.02)
        if server.exitcode is not None:
            raise RuntimeError(f"the server of {folder} ended with status {server.exitcode}")
    return folder


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with those programs and this process's import path first.

    No launcher's variables are in it.

    ``torchrun`` starts its workers with the interpreter that ``PYTHON_EXEC`` names.
    """
    path = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join(filter(None, sys.path))
    kept = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    own = {"PATH": path, "PYTHONPATH": modules, "PYTHON_EXEC": str(programs() / "python"), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **changes}


def _end(server: Any, folder: Path) -> None:
    server.kill()
    server.join()
    shutil.rmtree(folder, ignore_errors=True)


def _serve(address: str) -> None:
    """Fork a child for each connection until the process of the tests has ended."""
    tests = parent_process()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(32)
        Path(address).with_name("ready").touch()
        while tests is not None and tests.sentinel not in wait([listening, tests.sentinel]):
            connection, _ = listening.accept()
            _reap()
            if os.fork() == 0:
                listening.close()
                os._exit(_run(connection))
            connection.close()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _run(connection: socket.socket) -> int:
    """Run the program of a connection in this process, which was forked for it, and return its exit status."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    arguments, environment, folder = json.loads(_received(connection, int.from_bytes(length, "big")))
    connection.sendall(os.getpid().to_bytes(8, "big"))
    for stream, received in enumerate(streams):
        os.dup2(received, stream)
        os.close(received)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 they last as the process does
    threading.Thread(target=_end_with_client, args=(connection.dup(),), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    status = _status_of(arguments)
    connection.sendall(bytes([status]))
    return status


def _received(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        found += connection.recv(length - len(found))
    return found


def _end_with_client(connection: socket.socket) -> None:
    connection.recv(1)  # nothing is sent: this returns when the client has been killed
    os.kill(os.getpid(), signal.SIGKILL)


def _status_of(arguments: list[str]) -> int:
    """Run what ``python ARGUMENTS`` would run: ``-m MODULE``, ``-c CODE`` or a script; and return its exit status."""
    try:
        while arguments[0] == "-u":
            arguments.pop(0)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF
