"""Worker processes that run users' code: started, spoken to in frames, limited, ended with all they started."""
