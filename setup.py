"""One wheel from several import roots: facade lives at the top, fla_dispatch and every kernel tree below their own."""

import pathlib

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_namespace_packages, setup

# Import root → its packages. The root of the repository holds facade and much that is not installed.
ROOTS = {".": "facade*", "dispatch": "fla_dispatch*"}
ROOTS |= {str(tree): "fla_*" for tree in sorted(pathlib.Path("kernels").glob("*")) if any(tree.glob("fla_*"))}

packages, package_dir = [], {}
for root, pattern in ROOTS.items():
    for package in find_namespace_packages(root, include=[pattern]):
        packages.append(package)
        package_dir[package] = str(pathlib.PurePath(root, *package.split(".")))

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={"": ["*.json", "py.typed"]},
    ext_modules=[
        Pybind11Extension(
            "fla_dispatch._registry",
            sorted(str(source) for source in pathlib.Path("dispatch/src").glob("*.cc")),
            depends=sorted(str(header) for header in pathlib.Path("dispatch/src").glob("*.h")),
            cxx_std=17,
            extra_compile_args=["-O2"],
        )
    ],
)
