"""Programs as a user would write them, one for each page of the site that has code.

`test_static_types.py` reads them with pyright and mypy: a line that ends with `# error` is an error
to both, and no other line is. They are never run.
"""
