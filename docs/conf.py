"""How Sphinx builds these pages: ``sphinx-build -W docs build/docs``."""

from importlib import metadata

project = "mha_fast"
release = metadata.version("mha_fast")
copyright = "the mha_fast authors"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
autosummary_generate = False  # the tables link to the entries below them
default_role = "py:obj"  # what single backticks mean in numpydoc docstrings
autodoc_typehints = "none"  # the docstrings say it in words
# Members are written out below their class; tables of them would only repeat that.
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"mha_fast {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide_tables.css"]
