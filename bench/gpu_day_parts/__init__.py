"""A GPU day: all that a machine without network needs is packed here, and measured there."""
