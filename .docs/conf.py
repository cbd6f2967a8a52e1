"""Configuration of the documentation site: `python -m sphinx -W -b html .docs OUT`.

Nothing is downloaded during a build, and the pages load nothing from other hosts. Each file `plot_*.py` in
`lessons/` and `examples/` is executed, and its printed output and figures become part of its page.
"""

from __future__ import annotations

import sys
from pathlib import Path

import scalelatent

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "scalelatent"
copyright = "the scalelatent developers, BSD-3-Clause"
version = release = scalelatent.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # equations without a content delivery network
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "command_line",
    "repository_pages",
]
exclude_patterns = ["_build", "_ext", "_templates", "lessons/*.rst", "examples/*.rst"]
templates_path = ["_templates"]
# sphinx-gallery keeps a function of this configuration, which Sphinx cannot store between builds.
suppress_warnings = ["config.cache"]

html_theme = "pydata_sphinx_theme"
html_title = "scalelatent"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "scalelatent"},
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "navigation_with_keys": False,
}
# Pages without other pages in their section have no navigation on the left.
_WITHOUT_SECTION = ("index", "troubleshooting", "glossary", "changelog", "genindex", "search")
html_sidebars = {page: [] for page in _WITHOUT_SECTION}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
# The docstring of a class describes its fitted attributes; scikit-learn documents the inherited methods.
autodoc_default_options = {"members": True, "inherited-members": False, "undoc-members": False}
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": ["lessons", "examples"],
    "gallery_dirs": ["start/lessons", "gallery"],
    "filename_pattern": r"plot_",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("figure_style.reset_figures",),
    "backreferences_dir": "reference/backreferences",
    "doc_module": ("scalelatent",),
    "reference_url": {},
    "image_srcset": ["2x"],
    "thumbnail_size": (400, 280),
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 0,
    "write_computation_times": False,
    "download_all_examples": False,
}


def _skip_member(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Skip the methods that scikit-learn adds to all estimators and documents itself."""
    generated = name == "get_metadata_routing" or (name.startswith("set_") and name.endswith("_request"))
    return True if generated else None


def setup(app: object) -> None:
    app.connect("autodoc-skip-member", _skip_member)  # type: ignore[attr-defined]
