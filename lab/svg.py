"""How all pictures look, and how they are written."""

import json
import zlib

LOOK = {  # of matplotlib
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "",
}


def checksum(data) -> str:
    """A line in the SVG: it shows whether a picture belongs to its data."""
    return f"crc32 of its data: {zlib.crc32(json.dumps(data).encode())}"


def new_figure(width, height):
    """An empty one, in inches."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(LOOK)
    return Figure((width, height), layout="constrained")


def save(figure, data, path):
    """As SVG. Without a date the same data give the same file."""
    metadata = {"Date": None, "Description": checksum(data)}
    figure.savefig(path, format="svg", metadata=metadata)
