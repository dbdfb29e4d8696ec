"""Every use of a private torch API in this package, by subject, with its reason and the versions it works on.

The names are private in torch 2.11 to 2.15, unless a function names other versions, and no public name replaces them:
``tests/test_torch_compat.py`` fails where a later torch has a substitute for a function here.
"""

from fsdp_runtime._torch_compat.attention import *  # noqa: F403
from fsdp_runtime._torch_compat.autograd import *  # noqa: F403
from fsdp_runtime._torch_compat.dispatch import *  # noqa: F403
from fsdp_runtime._torch_compat.fake_tensors import *  # noqa: F403
from fsdp_runtime._torch_compat.fsdp2 import *  # noqa: F403
from fsdp_runtime._torch_compat.meshes import *  # noqa: F403
from fsdp_runtime._torch_compat.modules import *  # noqa: F403
