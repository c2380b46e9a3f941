"""The log on stderr: which lines, and in which form."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

ACCESS = "mtmd.access"


class JsonLines(logging.Formatter):
    """One object a line; `fields` of a record beside the usual."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def write_log(form: str, level: str, *, requests: bool) -> None:
    """Write the log to stderr for the rest of the process. `requests`: a line for each, whatever
    the level.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logger = logging.getLogger("mtmd")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logging.getLogger(ACCESS).setLevel(logging.INFO if requests else logging.CRITICAL)
