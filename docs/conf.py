"""How Sphinx builds these pages: ``sphinx-build -W docs build/docs``."""

from importlib import metadata

project = "mha_fast"
release = metadata.version("mha_fast")
copyright = "the mha_fast authors"

extensions = ["sphinx.ext.autodoc", "numpydoc"]
default_role = "py:obj"  # what single backticks mean in numpydoc docstrings
autodoc_typehints = "none"  # the docstrings say it in words
# Members are written out below their class; tables of them would only repeat that.
numpydoc_show_class_members = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Fused multi-head attention on the CPU for NumPy",
    "fixed_sidebar": True,
    "page_width": "1100px",
    "sidebar_width": "260px",
}
html_show_sourcelink = False
html_copy_source = False
