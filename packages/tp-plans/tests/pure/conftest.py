"""Lets test modules import ``stand_ins`` beside them, from wherever this folder is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
