"""The health of a run: silent actors, broken paths, stalls, and who is to blame."""
