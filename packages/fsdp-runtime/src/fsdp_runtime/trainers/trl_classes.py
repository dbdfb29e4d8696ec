"""Short names of the most used TRL trainers."""

from __future__ import annotations

import trl

from fsdp_runtime.trainers.factory import on_mesh

SFTTrainer = on_mesh(trl.SFTTrainer)
GRPOTrainer = on_mesh(trl.GRPOTrainer)
