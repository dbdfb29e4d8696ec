"""Test support shared by the three packages.

A test that needs several ranks takes the fixture ``two_ranks`` or ``four_ranks`` and gives it an importable function:

    def _norms() -> float: ...

    def test_all_ranks_have_the_same_norm(two_ranks: RankPool) -> None:
        assert len(set(two_ranks.run(_norms))) == 1

Each rank runs the function, and ``run`` returns the results in rank order, or raises one error with the traceback of
every rank that failed.  A pool serves all tests of a process: starting ranks costs more than most tests, so a test
puts its cases into few calls.  To run without ranks: ``pytest -m "not ranks"``; to run slow combinations: ``--slow``.

=====================  ================================================================================================
ranks                  the pools; a world that may be out of step after a failure is replaced
processes, preload     the server that test processes and ranks are forked from, with torch and the packages imported
interpreter, torchrun  programs ``python`` and ``torchrun`` forked from that server, for tests of scripts and launchers
launched               scripts of several ranks without an agent above them
pytest_plugin          the fixtures, the marks ``ranks`` and ``slow``, and what a report says of the versions
models                 tiny models of transformers with jittered parameters, and inputs for them
layers                 one layer under a plan, compared with the layer in one process
parity                 one model on a mesh, compared with the model in one process: outputs, and gradients on every rank
mutants                wrong parallelizations, which ``parity`` has to find
float64                models that compute parts in float32, run in float64
collectives, memory    counters of collectives, and of live bytes
pairwise               few combinations of many factors; the others are marked ``slow``
misuse                 calls with wrong arguments, which must be refused with an error for users
pages                  code blocks of documentation pages, run as they stand there
=====================  ================================================================================================

The other modules serve one kind of test each, as their first lines say.  ``coverage`` next to this folder
has a tiny model of every architecture.
"""
