"""Supervised fine-tuning: conversations from a file as tokens to train on."""
