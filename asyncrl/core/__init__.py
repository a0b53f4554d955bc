"""Leaves that every part may import: errors, files, disk, roles, results of user functions, text for people."""
