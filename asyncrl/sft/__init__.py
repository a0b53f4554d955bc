"""Conversations that somebody else wrote, as tokens to train on."""
