"""Keeps one harmless line out of sight.

torchao 0.15 logs at import that its C++ extensions do not fit the installed torch; torchtune needs that torchao, and
none of what is used here needs the extensions. Every other message of torchao stays.
"""

import logging


def _is_wanted(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


logging.getLogger("torchao").addFilter(_is_wanted)
