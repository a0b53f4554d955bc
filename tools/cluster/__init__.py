"""Clusters of namespaces on one machine: for the tests in tests/cluster, and for tools that need several hosts."""
