"""Values of a parametrized test with which it runs at night only: CONTRIBUTING.md says what guards them in each change."""

import functools

import pytest

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
