"""The lightning indexer, sparse attention over its choice, and the loss that trains it."""
