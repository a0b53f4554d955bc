"""For all tests, and the processes that they start.

A figure that is not in the catalogue is an error. No example of a property has a deadline: machines are slow at times,
and that is no fault of what is tested. Tests open more files and sockets than many shells allow at first.
"""

import os
import resource

from hypothesis import HealthCheck, settings

os.environ["ASYNCRL_STRICT_METRICS"] = "1"

_MOST_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_DESCRIPTORS, _MOST_DESCRIPTORS))

settings.register_profile("asyncrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asyncrl")
