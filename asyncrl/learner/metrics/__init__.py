"""Lines of metrics, records, generations and warnings that come of the steps of a run."""
