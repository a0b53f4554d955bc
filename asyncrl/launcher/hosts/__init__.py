"""The hosts of a run: named, reached, checked and given their parts."""
