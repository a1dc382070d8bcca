"""Finding pictures by pictures: an index of embeddings."""
