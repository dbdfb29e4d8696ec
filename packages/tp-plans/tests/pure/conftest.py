"""Lets test modules import ``stub_modules`` beside them, from wherever this folder is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
