"""Leaves that every part may import: errors, files, disk, roles, text for people, names of other frameworks."""
