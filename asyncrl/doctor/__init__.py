"""asyncrl-doctor: whether hosts, configuration and what lies on the disks let a run begin, and how to mend it."""
