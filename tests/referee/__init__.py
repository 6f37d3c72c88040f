"""The referee runs torch's own tests of its checkpoint package, unmodified, with our writer and reader."""
