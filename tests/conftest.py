"""For all tests, and the processes that they start: a figure that is not in the catalogue is an error."""

import os

os.environ["ASYNCRL_STRICT_METRICS"] = "1"
