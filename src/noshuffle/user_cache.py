"""The folder in which data, features and fitted strategies are kept between processes.

>>> user_cache().name
'noshuffle'
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """noshuffle/ in $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noshuffle"
