"""The lightning indexer, sparse attention over the tokens that it chooses, and the loss that trains it."""
