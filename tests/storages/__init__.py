"""Small storages that prove the protocol and serve as test fakes for core."""
