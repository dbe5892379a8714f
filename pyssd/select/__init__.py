"""Ways to find a skip set."""

from __future__ import annotations

from .sweep import find_skip_set as find_skip_set
