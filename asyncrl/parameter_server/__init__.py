"""The parameter server: conducts every weight update and keeps the newest versions."""
