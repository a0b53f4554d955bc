"""New versions of the weights, from the shards of all ranks to the parameter server."""
