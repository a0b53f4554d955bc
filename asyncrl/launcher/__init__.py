"""Starts and follows a run: checks, placement, node agents, progress, the doctor, hosts that join and leave."""
