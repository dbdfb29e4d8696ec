"""Plans that transformers ships with its models, translated to styles of this package."""

from __future__ import annotations

from tp_plans.hugging_face.style_names import IGNORED_STYLES, STYLE_BY_NAME, parameter_style_from_name, style_from_name
from tp_plans.hugging_face.translate import from_hugging_face

__all__ = ["IGNORED_STYLES", "STYLE_BY_NAME", "from_hugging_face", "parameter_style_from_name", "style_from_name"]
