"""Every use of a private torch API in this package, by subject, with its reason and the versions it works on.

``tests/test_torch_compat.py`` fails where a later torch has a substitute for a function here.
"""

from fsdp_runtime._torch_compat.attention import *  # noqa: F403
from fsdp_runtime._torch_compat.autograd import *  # noqa: F403
from fsdp_runtime._torch_compat.collectives import *  # noqa: F403
from fsdp_runtime._torch_compat.dispatch import *  # noqa: F403
from fsdp_runtime._torch_compat.fake_tensors import *  # noqa: F403
from fsdp_runtime._torch_compat.fsdp2 import *  # noqa: F403
from fsdp_runtime._torch_compat.fsdp_gathers import *  # noqa: F403
from fsdp_runtime._torch_compat.meshes import *  # noqa: F403
from fsdp_runtime._torch_compat.modules import *  # noqa: F403
