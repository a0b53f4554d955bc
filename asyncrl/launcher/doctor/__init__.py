"""asyncrl-doctor: whether hosts, configuration, chat template and agent are fit for a run, and what to do if not."""
