"""The Pareto picture of halting: perplexity over tokens/s."""

from pathlib import Path

from looped_recipes.common.canvas import canvas


def draw(fixed: list[dict], halting: list[dict], budget: float, path: Path):
    """Fixed depths as one line, each criterion as another through its budgets; right and low is good."""
    with canvas(path, size=(7, 4.6), dpi=150) as [axis]:
        speeds, values = [[row[key] for row in fixed] for key in ("tokens_per_second", "perplexity")]
        axis.plot(speeds, values, color="black", marker="o", zorder=3, label="fixed depth")
        for row, speed, value in zip(fixed, speeds, values):
            axis.annotate(f"{row['loops']}", (speed, value), xytext=(5, 5), textcoords="offset points", fontsize=9)
        markers = iter("sD^vP*Xh" * 2)
        for name in dict.fromkeys(row["criterion"] for row in halting):
            rows = sorted(
                (row for row in halting if row["criterion"] == name), key=lambda row: row["tokens_per_second"]
            )
            points = [[row[key] for row in rows] for key in ("tokens_per_second", "perplexity")]
            axis.plot(*points, marker=next(markers), markersize=6, linewidth=1, alpha=0.85, label=name)
        limit = (1 + budget) * values[-1]
        axis.axhline(limit, color="gray", linestyle=":", linewidth=1)
        place = {
            "xycoords": ("axes fraction", "data"),
            "xytext": (-3, 3),
            "textcoords": "offset points",
            "ha": "right",
        }
        axis.annotate(f"{100 * budget:g} % worse than {fixed[-1]['loops']} loops", (1, limit), fontsize=8, **place)
        axis.set(xlabel="tokens/s of scoring", ylabel="perplexity", title="numbers: loops at fixed depth")
        if max(values) > 5 * min(values):
            axis.set_yscale("log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
