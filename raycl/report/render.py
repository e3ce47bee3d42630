"""Render the templates of pages."""

import re
from typing import Any

import jinja2
from markupsafe import Markup, escape


def render_template(name: str, **values: Any) -> str:
    """Return the page of the template ``name`` with these values; everything but our own drawings is escaped."""
    # Names, labels, texts and errors come from users.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("raycl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    page = environment.get_template(name).render(**values)
    # Lone surrogates, for example from file names that are not UTF-8, cannot be encoded.
    return page.encode("utf-8", "replace").decode("utf-8")


def _breakable(text: object) -> Markup:
    """Let a long path break after its slashes instead of in the middle of a word; samples/s stays whole."""
    return Markup(re.sub(r"/(?=[^/]{2})", "/<wbr>", escape(str(text))))
