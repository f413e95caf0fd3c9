"""Transports: bytes in, messages out, and nothing else. What a message means is the service's affair."""
