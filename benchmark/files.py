"""What all tools of benchmark/ do: say what a mistake is, read a CSV, and write a file as a whole."""

import csv
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """Reports a mistake of the user in one line on stderr; exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def python_path(folder: Path) -> str:
    """PYTHONPATH of a program that is started: the folder, and then the user's own."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def write_file(path: Path, content: str | bytes):
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def csv_path(folder: Path, name: str) -> Path:
    """NAME.csv, or NAME.csv.gz if only that is there."""
    path, zipped = folder / f"{name}.csv", folder / f"{name}.csv.gz"
    return zipped if zipped.exists() and not path.exists() else path


def csv_files(folder: Path, prefix: str) -> dict[str, Path]:
    """NAME.csv and NAME.csv.gz of a folder, by what follows the prefix in NAME, except runs.csv."""
    names = {path.name.partition(".csv")[0] for end in ("csv", "csv.gz") for path in folder.glob(f"*.{end}")}
    names = sorted(name for name in names - {"runs"} if name.startswith(prefix))
    return {name.removeprefix(prefix): csv_path(folder, name) for name in names}


def read_csv(path: Path, columns: Iterable[str] | None = None) -> list[dict[str, str]]:
    """Rows of a CSV, zipped or not, by column. Fails at columns other than those given and at half a line."""
    rows = []
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
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
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        fail(f"{path} cannot be read: {error}")
    return rows
