"""BatchNorm over the whole batch when the batch goes through the network in chunks."""
