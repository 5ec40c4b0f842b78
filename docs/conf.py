"""How Sphinx builds the documentation: MyST Markdown pages and an API page read from the docstrings."""

from importlib.metadata import version as installed_version

project = "draftree"
author = "The draftree authors"
project_copyright = author
version = release = installed_version("draftree")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_cli_introduction.md"]

html_theme = "furo"
html_title = f"draftree {release}"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
