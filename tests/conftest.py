"""For all tests, and the processes that they start.

A figure that is not in the catalogue is an error. No example of a property has a deadline: machines are slow at times,
and that is no fault of what is tested.
"""

import os

from hypothesis import HealthCheck, settings

os.environ["ASYNCRL_STRICT_METRICS"] = "1"

settings.register_profile("asyncrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asyncrl")
