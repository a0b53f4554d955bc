"""The quickstart: the model and task that `make quickstart` trains, and how they are made."""
