"""The quickstart: what `make quickstart` trains, and how it is made."""
