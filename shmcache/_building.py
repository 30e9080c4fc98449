"""Used by the build alone: where numpy keeps its headers, which pyproject.toml cannot say.

The extension makes arrays by numpy's C interface, which is a fifth of the cost of its constructor.
Built with numpy 2 it runs with any numpy from 1.26 on: that is numpy's promise.
"""

import numpy as np
from setuptools.command.build_ext import build_ext


class BuildWithNumpy(build_ext):  # type: ignore[misc]
    """Looks for headers where numpy has them as well."""

    def finalize_options(self) -> None:
        """After the options of the extension, which come from pyproject.toml."""
        super().finalize_options()
        self.include_dirs.append(np.get_include())
