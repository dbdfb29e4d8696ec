"""Files are read by system calls: every slice and dtype has the bits that safetensors gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded import safetensors_io
from fsdp_runtime.sharded.boxes import slices_of
from fsdp_runtime.sharded.safetensors_io import STORED_DTYPES, SafetensorsReader
from tp_plans.boxes import Box

SHAPES = ((), (0,), (7,), (5, 6), (4, 0, 3), (3, 4, 5), (2, 3, 4, 5))


def test_slices_have_the_bits_that_safetensors_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "_LONG_RUN", 2 * 5 * 2)  # some boxes are read with what lies between
    monkeypatch.setattr(safetensors_io, "_READ_THROUGH", 32)
    file, draw = tmp_path / "model.safetensors", random.Random(0)
    save_file({str(shape): torch.randn(shape).bfloat16() for shape in SHAPES}, file)
    reader = SafetensorsReader("save it again")
    with safe_open(file, framework="pt") as expected:
        for shape in SHAPES:
            assert torch.equal(reader.read_box(file, str(shape)), expected.get_tensor(str(shape)))
            for _ in range(100):
                pairs = [sorted(draw.randint(0, size) for _ in range(2)) for size in shape]
                box = tuple((start, stop) for start, stop in pairs)
                found = reader.read_box(file, str(shape), box)
                assert torch.equal(found, expected.get_tensor(str(shape))[slices_of(box)])
    reader.close()


def test_every_dtype_that_torch_has_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    values = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tensors = {
        name: values.clone().view(dtype) if name != "BOOL" else values.bool() for name, dtype in STORED_DTYPES.items()
    }
    save_file(tensors, file)
    reader = SafetensorsReader("save it again")
    headers = reader.headers(file)
    for name, expected in tensors.items():
        found = reader.read_box(file, name)
        assert (found.dtype, headers[name][1]) == (expected.dtype, name)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    reader.close()


@pytest.mark.parametrize(("name", "box"), [("a", ((0, 3),)), ("a", ((0, 1), (0, 1))), ("b", ())])
def test_what_a_file_lacks_is_named(tmp_path: Path, name: str, box: Box) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    reader = SafetensorsReader("save it again")
    with pytest.raises(CheckpointError, match=rf"{file} .*of the tensor {name} is needed.*: save it again"):
        reader.read_box(file, name, box)
    reader.close()
