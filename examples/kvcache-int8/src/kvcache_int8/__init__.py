"""A backend of kvcache-core that stores keys and values in 8 bits, with a scale for each token and head."""
