"""Importing the package, as a whole process, beside the least of the standard library that it needs."""

from __future__ import annotations

import argparse
import subprocess
import sys

from turns import table, take_turns

STATEMENTS = {
    "import json, dataclasses, fnmatch": "import json, dataclasses, fnmatch",
    "import tp_plans": "import tp_plans",
    "import tp_plans; tp_plans.plan_for('llama')": "import tp_plans; tp_plans.plan_for('llama')",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    steps = {
        name: (lambda code=code: [sys.executable, "-c", code], lambda command: subprocess.run(command, check=True))
        for name, code in STATEMENTS.items()
    }
    times = take_turns(steps, options.rounds)
    table("a whole process", times, "import json, dataclasses, fnmatch", "import tp_plans within 1.5 times")


if __name__ == "__main__":
    main()
