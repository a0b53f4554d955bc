"""The engine as it serves: requests, pauses, deaths, drift from the learner."""
