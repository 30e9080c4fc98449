"""What pyproject.toml cannot say: where the numpy of the build keeps its headers.

The extension makes arrays by numpy's C interface, which is a fifth of the cost of its constructor.
Built with numpy 2 it runs with any numpy from 1.26 on: that is numpy's promise.
"""

import numpy as np
from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildWithNumpy(build_ext):
    """Looks for headers where numpy has them as well."""

    def finalize_options(self) -> None:
        """After the options of the extension, which come from pyproject.toml."""
        super().finalize_options()
        self.include_dirs.append(np.get_include())


setup(cmdclass={"build_ext": BuildWithNumpy})
