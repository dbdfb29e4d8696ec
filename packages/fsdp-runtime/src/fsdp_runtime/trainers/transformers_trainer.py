"""``transformers.Trainer`` on a mesh."""

from __future__ import annotations

import transformers

from fsdp_runtime.trainers.factory import on_mesh

Trainer = on_mesh(transformers.Trainer)
