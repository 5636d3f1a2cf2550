"""A pytest plugin: null GPUs with values, without the race checker of
``nullcuda.plugin``.
"""

import warnings

from nullcuda import values


def pytest_configure():
    # Torch warns that kernels are replaced.
    with warnings.catch_warnings(action="ignore"):
        values.install()
