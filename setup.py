"""Map the folders whose import name differs from their folder name (see CONTRIBUTING.md)."""

from setuptools import find_packages, setup

ROOTS = {"ddtree_ops": "ddtree_ops", "ddtree_engine": "engine_patch", "ddtree_kernels": "kernels"}

packages = []
for name, folder in ROOTS.items():
    packages.append(name)
    packages += [f"{name}.{package}" for package in find_packages(folder)]

# Data alone: the Ansible playbooks that `ddtree deploy` runs, and what it builds images from.
DATA = {"ddtree_playbooks": "playbooks", "ddtree_dockerfiles": "dockerfiles"}
packages += DATA

setup(packages=packages, package_dir={**ROOTS, **DATA})
