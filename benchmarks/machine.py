"""The machine that the figures are measured on."""

import platform
import re
from pathlib import Path


def machine() -> str:
    """Return the processors and the system."""
    model = platform.processor() or platform.machine()
    description = Path("/proc/cpuinfo")
    if description.exists():
        models = re.findall(r"^model name\s*: (.+)$", description.read_text(), re.MULTILINE)
        if models:
            model = f"{len(models)} × {models[0]}"
    return f"{model}, {platform.system()}"
