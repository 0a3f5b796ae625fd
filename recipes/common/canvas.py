"""Axes to draw on, saved as a picture."""

from contextlib import contextmanager


@contextmanager
def canvas(
    file, count: int = 1, columns: int = 4, size: tuple[float, float] = (3.6, 2.9), dpi: int = 100, share=False
):
    """`count` axes of a size in inches, at most so many side by side. share: both scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns, rows = min(columns, count), -(-count // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(size[0] * columns, size[1] * rows),
        squeeze=False,
        sharex=share,
        sharey=share,
        layout="constrained",
    )
    try:
        for axis in axes.flat[count:]:
            axis.remove()
        yield list(axes.flat[:count])
        figure.savefig(file, dpi=dpi, format=None if hasattr(file, "suffix") or isinstance(file, str) else "png")
    finally:
        pyplot.close(figure)
