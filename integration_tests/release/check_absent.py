"""Fail if any of the named modules can be found: ``check_absent.py torch transformers``."""

import sys
from importlib.util import find_spec

found = [name for name in sys.argv[1:] if find_spec(name)]
sys.exit(f"should not be importable here: {', '.join(found)}" if found else 0)
