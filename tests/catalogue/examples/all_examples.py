"""All examples."""

from __future__ import annotations

import tests.catalogue.examples.of_settings  # noqa: F401  puts its examples into the table
from tests.catalogue.examples.table import EXAMPLES, message_of

__all__ = ["EXAMPLES", "message_of"]
