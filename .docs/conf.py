"""The reference of the public names, and a page for each model whose code runs while the pages are built."""

from __future__ import annotations

import scalelatent

project = "scalelatent"
copyright = "the scalelatent developers, BSD-3-Clause"
version = release = scalelatent.__version__

extensions = [
    "sphinx.ext.autodoc",
    "numpydoc",
    "matplotlib.sphinxext.plot_directive",
]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "fixed_sidebar": True}
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
# Learned attributes are told by the docstring of their class; methods of scikit-learn by its own pages.
autodoc_default_options = {"members": True, "inherited-members": False, "undoc-members": False}
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False

plot_include_source = True
plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = [("png", 110)]
plot_rcparams = {"figure.figsize": (8, 3), "figure.constrained_layout.use": True}
plot_apply_rcparams = True


def _skip(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Methods that scikit-learn makes, and explains, for all estimators."""
    made = name == "get_metadata_routing" or (name.startswith("set_") and name.endswith("_request"))
    return True if made else None


def setup(app: object) -> None:
    app.connect("autodoc-skip-member", _skip)  # type: ignore[attr-defined]
