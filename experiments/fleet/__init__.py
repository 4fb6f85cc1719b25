"""A fleet on one machine: a SuperLink with TLS, SuperNodes with keys, and what happens when one of them dies."""
