"""Let verl start gloo, whose name it would give to torch twice on a machine without an accelerator."""

from with_verl import cpu_platform

cpu_platform.patch_process_group()
