"""What the tools of benchmark/ say of a mistake."""

import sys
from pathlib import Path
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """Reports a mistake of the user in one line on stderr; exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)
