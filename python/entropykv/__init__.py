"""entropykv: a hard KV-cache budget for GGUF models in stock llama.cpp.

>>> from entropykv import Session
>>> with Session("model.gguf", n_ctx=8192, kv_budget=0.2) as session:
...     for token in session.generate(session.tokenize("Once upon a time"), max_tokens=50):
...         print(session.detokenize([token]), end="")
"""

from entropykv import _version

_version.check()

from entropykv.constraint.constraint import Constraint  # noqa: E402
from entropykv.drop_in.arguments import EvictionEvent  # noqa: E402
from entropykv.drop_in.attach import attach, detach  # noqa: E402
from entropykv.drop_in.entropy_llama import EntropyLlama  # noqa: E402
from entropykv.errors import (  # noqa: E402
    BudgetError,
    CalibrationError,
    ContextError,
    EntropyKVError,
    FreezeError,
    HubError,
    ImageError,
    ModelFileError,
    PoolError,
    ProfileError,
    SessionFileError,
    SettingsError,
    UnsupportedModelError,
    VersionError,
)
from entropykv.profile.profile import EntropyProfile  # noqa: E402
from entropykv.session.images import ImageLimits, ImagePrompt, Images  # noqa: E402
from entropykv.session.pool import Pool, PoolStats  # noqa: E402
from entropykv.session.session import Session  # noqa: E402
from entropykv.session.stats import SessionStats  # noqa: E402
from entropykv.settings.cache_options import CacheOptions  # noqa: E402
from entropykv.settings.freezing import Freezing  # noqa: E402
from entropykv.settings.options import Budget  # noqa: E402
from entropykv.settings.own_policy import BudgetToShare, MicroBatchSeen, OwnPolicy  # noqa: E402
from entropykv.settings.recovery import Recovery, Rung  # noqa: E402

__version__ = _version.VERSION

__all__ = [
    "Budget",
    "BudgetError",
    "BudgetToShare",
    "CacheOptions",
    "CalibrationError",
    "Constraint",
    "ContextError",
    "EntropyKVError",
    "EntropyLlama",
    "EntropyProfile",
    "EvictionEvent",
    "FreezeError",
    "Freezing",
    "HubError",
    "ImageError",
    "ImageLimits",
    "ImagePrompt",
    "Images",
    "MicroBatchSeen",
    "ModelFileError",
    "OwnPolicy",
    "Pool",
    "PoolError",
    "PoolStats",
    "ProfileError",
    "Recovery",
    "Rung",
    "Session",
    "SessionFileError",
    "SessionStats",
    "SettingsError",
    "UnsupportedModelError",
    "VersionError",
    "__version__",
    "attach",
    "detach",
]
