"""The picture of figure 5 from a result of `bench/h200.py`.

    python bench/gpu/figure5_picture.py bench/results/DEVICE-DATE.json PICTURE.png

For a machine with matplotlib; the one that measures may have none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STAGE = "figure5"
ADAPTIVE = "adaptive"
SHOWN = (("mean_s", "mean latency, ms", 1e3), ("p90_s", "P90 latency, ms", 1e3), ("requests_per_s", "requests/s", 1.0))


def curves(windows: Mapping[str, Any], name: str) -> dict[float, tuple[list[tuple[float, float]], float | None]]:
    """By rate: a point (window in ms, value) for each fixed window that was measured, and the adaptive one's value."""
    found: dict[float, tuple[list[tuple[float, float]], float | None]] = {}
    for window, outcome in windows.items():
        for level in outcome.get("levels", ()):
            points, adaptive = found.get(level["rate_per_s"], ([], None))
            if window == ADAPTIVE:
                adaptive = level[name]
            else:
                points.append((float(window), level[name]))
            found[level["rate_per_s"]] = sorted(points), adaptive
    return dict(sorted(found.items()))


def draw(windows: Mapping[str, Any], path: Path) -> None:
    """Lines over the fixed windows, the adaptive one dashed across; a colour for each rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHOWN), figsize=(4.2 * len(SHOWN), 3.6))
    for axis, (name, label, scale) in zip(axes, SHOWN, strict=True):
        for number, (rate_per_s, (points, adaptive)) in enumerate(curves(windows, name).items()):
            axis.plot(
                [window for window, _ in points],
                [value * scale for _, value in points],
                marker="o",
                color=f"C{number}",
                label=f"{rate_per_s:g}/s",
            )
            if adaptive is not None:
                axis.axhline(adaptive * scale, color=f"C{number}", linestyle="--", linewidth=1)
        axis.set_xlabel("window, ms (dashed: adaptive)")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    draw(record["stages"][STAGE]["steps"], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
