"""The one way in which the tools of benchmark/ draw curves and write pages."""

import base64
import html
import io
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from benchmark.files import write_file

matplotlib.rcParams["svg.hashsalt"] = "benchmark"  # the same curves make the same file

# of each source of published curves, in all figures
PUBLISHED = {
    "CleanRL": "tab:orange",
    "openai/baselines": "tab:green",
    "the blog": "tab:red",
    "openai/baselines 2018": "tab:olive",
}
PUBLISHED |= {"RLlib, 32 workers": "tab:pink", "RLlib, 64 workers": "tab:olive"}
PUBLISHED |= {"RLlib, 128 workers": "tab:brown", "RLlib": "tab:pink", "RLlib 2020": "tab:brown"}
OURS = ["tab:blue", "black", "tab:purple", "tab:cyan", "tab:gray", "tab:orange", "tab:green", "tab:red"]


def colors(names: list[str]) -> dict[str, str]:
    """One color a name: that of its source, else the next of ours."""
    found, ours = {}, iter(OURS * len(names))
    for name in dict.fromkeys(names):
        found[name] = PUBLISHED.get(name) or next(ours)
    return found


def panels(number: int, columns: int = 3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A figure of panels with room for a legend below, and their axes."""
    columns = min(columns, number)
    rows = -(-number // columns)
    figure = Figure(figsize=(4 * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[number:]:
        ax.axis("off")
    return figure, axes[:number]


def curve(ax: Axes, x: np.ndarray, mean: np.ndarray, std: np.ndarray | None = None, **style) -> Line2D:
    """A mean, and a band of one standard deviation over runs, if there is one."""
    (line,) = ax.plot(x, mean, linewidth=1.4, **style)
    if std is not None:
        band(ax, x, mean - std, mean + std, line)
    return line


def band(ax: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, line: Line2D):
    """Around a line, in its color."""
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def hide_the_beginning(ax: Axes):
    """Lets the vertical axis begin at the lowest point of a line after a tenth of its steps.

    The first returns of an agent may be so low that nothing else could be seen.
    """
    lows = [y[x >= 0.1 * x[-1]].min() for x, y in (line.get_data() for line in ax.lines) if len(x) > 10]
    bottom, top = ax.dataLim.intervaly
    if lows and min(lows) < top:
        margin = 0.05 * (top - min(lows))
        ax.set_ylim(max(bottom, min(lows) - margin) - margin, top + margin)


def finish(ax: Axes, title: str, xlabel: str = "environment steps", ylabel: str = "episodic return"):
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.tick_params(which="both", labelsize=9)
    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_locator(MaxNLocator(6))
    else:
        ax.yaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, columns: int | None = None):
    """One for all panels, below them, with as many columns as there is room for."""
    found = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    inches = 0.7 + 0.075 * max(map(len, found), default=0)  # of a column: a line and the longest label
    columns = columns or max(1, int(figure.get_figwidth() // inches))
    place = dict(loc="outside lower center", ncols=min(columns, max(1, len(found))), fontsize=9)
    figure.legend(found.values(), found.keys(), **place)


def png(figure: Figure, dpi: int = 100) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path):
    """As PNG and as SVG beside it."""
    write_file(path.with_suffix(".png"), png(figure))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_file(path.with_suffix(".svg"), buffer.getvalue())


STYLE = "body{font:14px sans-serif;margin:2em} "
STYLE += "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto} "
STYLE += "td,th{border:1px solid #ccc;padding:3px 8px;text-align:left} img{max-width:100%}"


def html_page(title: str, parts: list[str]) -> str:
    """A page that needs no other file."""
    head = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"{head}{''.join(parts)}\n"


def html_text(text: str) -> str:
    """Markdown of one paragraph, of which only `code` is known."""
    return "<p>" + re.sub("`(.*?)`", r"<code>\1</code>", html.escape(text))


def html_table(lines: list[list[str]]) -> str:
    """Rows of cells, the head first; nothing if there is only a head."""
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines]
    head, *body = [f"<tr>{line}</tr>" for line in cells]
    return f"<table>{head.replace('td>', 'th>')}{''.join(body)}</table>" if body else ""


def html_image(figure: Figure) -> str:
    return f'<p><img src="data:image/png;base64,{base64.b64encode(png(figure)).decode()}">'
