"""All examples."""

from __future__ import annotations

import tests.catalogue.examples.of_runs  # these put their examples into the table
import tests.catalogue.examples.of_settings  # noqa: F401
from tests.catalogue.examples.table import EXAMPLES, message_of

__all__ = ["EXAMPLES", "message_of"]
