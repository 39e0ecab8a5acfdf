"""All mutants."""

from __future__ import annotations

from tests.mutants.clipping import CLIPPING
from tests.mutants.drivers import DRIVERS
from tests.mutants.noise import NOISE
from tests.mutants.promises import PROMISES
from tests.mutants.release import RELEASE

MUTANTS = (*NOISE, *RELEASE, *PROMISES, *CLIPPING, *DRIVERS)
