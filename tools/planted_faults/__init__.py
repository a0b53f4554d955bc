"""Plant known faults, one at a time, and see whether the tests notice; see ``__main__``."""
