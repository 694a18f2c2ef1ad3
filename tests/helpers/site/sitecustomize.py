"""Python imports this at startup in every process of the tests: conftest.py sets PYTHONPATH."""

import torchvision_operators

torchvision_operators.declare_on_import()
