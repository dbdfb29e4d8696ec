"""The random states of a rank."""

import pickle
import random

import numpy
import torch

from fsdp_runtime.model import rng_states, set_rng_states


def test_set_rng_states_restores_pickled_states_of_torch_python_and_numpy() -> None:
    def draws() -> list[float]:
        return [*torch.rand(2).tolist(), random.random(), *numpy.random.rand(2).tolist()]

    states = pickle.loads(pickle.dumps(rng_states()))
    expected = draws()
    set_rng_states(states)
    assert draws() == expected
