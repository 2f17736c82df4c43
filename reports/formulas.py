"""A formula as a picture that scales: glyph outlines in SVG, in the colour of the text around them."""

from __future__ import annotations

from markupsafe import Markup, escape

_SIZE = 15.0


def as_svg(tex: str) -> Markup:
    """Return a formula in TeX as inline SVG, with the TeX as its title; what cannot be drawn stays as text.

    Args:
        tex: in the part of TeX that matplotlib's mathtext draws.
    """
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    try:
        outline = TextPath((0, 0), f"${tex}$", size=_SIZE)
    except (ValueError, RuntimeError):
        return Markup("<code>{}</code>").format(tex)
    letters = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
    parts = []
    for points, code in outline.iter_segments(curves=True, simplify=False):
        numbers = "" if code == Path.CLOSEPOLY else " ".join(f"{v:.2f}" for v in points)
        parts.append(letters[code] + numbers)
    box = outline.get_extents()
    width, height = box.width + 2, box.height + 2
    return Markup(
        '<svg class="formula" role="img" viewBox="{:.2f} {:.2f} {:.2f} {:.2f}" width="{:.1f}" height="{:.1f}"'
        ' style="vertical-align: {:.1f}px">'
        "<title>{}</title>"
        '<path transform="scale(1 -1)" fill="currentColor" d="{}"/></svg>'
    ).format(box.x0 - 1, -box.y1 - 1, width, height, width, height, box.y0 - 1, escape(tex), Markup(" ".join(parts)))
