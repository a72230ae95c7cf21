"""Every error this project raises on purpose. A message says what was wanted, what was found and what mends it."""


class PackerError(Exception):
    """Base class: catch it to catch everything the packer and its clients raise on purpose."""


class SettingError(PackerError, ValueError):
    """A setting has a value that is not allowed; the message names the setting, the value and what is allowed."""


class ProtocolError(PackerError):
    """A peer sent bytes that are not a message, or a message that is not allowed where it came."""


class HandshakeError(PackerError):
    """A connection was refused: wrong key, another protocol version, a uid not on the list, a full house."""


class PeerClosed(PackerError):
    """The peer closed its end of the connection, or died."""


class PeerHung(PeerClosed):
    """The peer is there and does not answer; its connection is given up."""


class DeviceError(PackerError):
    """The device or its driver refused a call; the message carries the driver's name for it."""


class PoolExhausted(PackerError):
    """No host memory for an output within the time a setting allows."""


class PackerUnavailable(PackerError):
    """No packer can be had: it did not start, cannot be reached, or a probe of its device failed."""
