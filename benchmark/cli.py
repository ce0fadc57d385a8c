"""What all tools of benchmark/ do: say what a mistake is, read a CSV, and write a file as a whole."""

import csv
import io
import sys
from collections.abc import Iterable
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


def read_csv(path: Path, columns: Iterable[str] | None = None) -> list[dict[str, str]]:
    """Rows of a CSV by column. Fails at other columns than those given, and at a line that was cut."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
        reader = csv.reader(io.StringIO(text))
        head = next(reader, [])
        if columns is not None and head != list(columns):
            fail(f"{path} has other columns than {', '.join(columns)}")
        for cells in filter(None, reader):  # without empty lines
            if len(cells) != len(head):
                fail(f"{path}, line {reader.line_num} has {len(cells)} of {len(head)} columns")
            rows.append(dict(zip(head, cells, strict=True)))
        if rows and not text.endswith("\n"):
            fail(f"{path}, line {reader.line_num} has no line end: it was cut, maybe within a number")
    except (OSError, ValueError, csv.Error) as error:
        fail(f"{path} cannot be read: {error}")
    return rows
