"""The health of a run: lost hosts, silent actors, broken paths, stalls, and who is to blame."""
