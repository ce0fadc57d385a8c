"""What all tools of benchmark/ do: say what a mistake is, and write a file as a whole."""

import sys
from pathlib import Path
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """Reports a mistake of the user in one line on stderr; exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def write_file(path: Path, content: str | bytes):
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)
