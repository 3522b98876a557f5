"""The driver of the handshake's state machines: control channel, invitations, transfers under way."""
