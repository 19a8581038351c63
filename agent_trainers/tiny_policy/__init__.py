"""The embedded policy: a model for examples and tests, trained in a minute on CPU."""

from pathlib import Path
from typing import Final

TINY_POLICY: Final = Path(__file__).parent
"""Its folder, for ``from_pretrained``."""
