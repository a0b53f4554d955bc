"""The page of ``asyncrl-view``: the rollouts of runs, read in a browser. It changes nothing in a run."""
