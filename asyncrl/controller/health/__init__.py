"""The health of a run: lost hosts, silent actors, broken paths and stalls."""
